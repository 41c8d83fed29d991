"""Decides whether a job starts again after its processes have ended. Imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2

from parallel.errors import UserError
from recipes.files.exit_codes import CANNOT_WRITE, HUNG, POISONED, PREEMPTED, REFUSED, ended_by
from recipes.files.layout import CHECKPOINTS, checkpoint_steps


class End(StrEnum):
    """How the processes of an attempt ended. The values are written to attempts.json."""

    DONE = "done"
    FINAL = "ended for a reason that a restart does not mend"
    PREEMPTED = "preempted"
    CRASHED = "crashed"
    UNSTARTED = "did not start on all nodes"
    """A node does not answer. Other nodes are the remedy, not a change of the run."""
    TAKEN = "ended by the scheduler"
    """The scheduler cancels the job or requeues it by itself."""


# Codes that are in neither of these are crashes.
FINAL_CODES = (REFUSED, CANNOT_WRITE, POISONED)
# The state is saved, or a signal came before there was anything to save; the same command starts over.
PREEMPTED_CODES = {PREEMPTED, *(ended_by(number) for number in (SIGHUP, SIGINT, SIGUSR1, SIGUSR2, SIGTERM))}


def end_of(codes: Sequence[int | None]) -> tuple[End, int]:
    """How the nodes with these exit codes ended, and the exit code for all. None = the node left no code.

    A node that fails ends the others, so most codes are consequences. The code of the cause wins.
    """
    known = [code for code in codes if code is not None]
    for final in FINAL_CODES:
        if final in known:
            return End.FINAL, final
    if known and all(code == 0 for code in codes):
        return End.DONE, 0
    if known and all(code in PREEMPTED_CODES for code in codes):
        return End.PREEMPTED, max(known)
    if HUNG in known:  # the frozen process was killed, and others may only have lost their connection
        return End.CRASHED, HUNG
    return End.CRASHED, next((code for code in known if code not in {0, *PREEMPTED_CODES}), 1)


@dataclass(frozen=True)
class Attempt:
    """One start of all processes."""

    step: int
    """Step of the newest checkpoint at the start; 0 = none."""
    end: End | None = None
    """None: unknown, because the node that records it was lost."""


def reason_to_stop(attempts: Sequence[Attempt], *, step: int, restarts: int) -> str | None:
    """Why the job should not start again after these attempts, or None if it should.

    step: of the newest checkpoint now. restarts: how many crashes may be followed by a restart.
    """
    if attempts and attempts[-1].end in (End.DONE, End.FINAL):
        return attempts[-1].end.value
    crashes = sum(attempt.end in (End.CRASHED, End.UNSTARTED, None) for attempt in attempts)
    if crashes > restarts:
        return f"it crashed {crashes} times, and RESTARTS={restarts}"
    ours = [
        (attempt, index > 0) for index, attempt in enumerate(attempts) if attempt.end not in (End.TAKEN, End.UNSTARTED)
    ]
    in_vain = 0
    for attempt, is_restart in reversed(ours):
        if attempt.step != step:
            break
        in_vain += is_restart
    if in_vain >= 2:
        return f"two restarts got no further than step {step} (a crash loop, or checkpoints too far apart)"
    return None


def number_of_restarts(text: str) -> int:
    """The value of RESTARTS. Raises UserError."""
    if not text.isdecimal():
        raise UserError(f"RESTARTS={text}: must be a number of restarts, 0 or more")
    return int(text)


def newest_step(folder: Path) -> int:
    """Step of the newest checkpoint in a run's folder; 0 = none."""
    return max(checkpoint_steps(folder / CHECKPOINTS), default=0)


class History:
    """The attempts of a job, in a file, so that a requeued job continues the count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.attempts: list[Attempt] = []
        if path.exists():
            for item in json.loads(path.read_text(encoding="utf-8")):
                self.attempts.append(Attempt(item["step"], End(item["end"]) if item["end"] else None))

    def begin(self, step: int) -> None:
        self.attempts.append(Attempt(step))
        self._write()

    def end(self, end: End) -> None:
        self.attempts[-1] = Attempt(self.attempts[-1].step, end)
        self._write()

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps([asdict(attempt) for attempt in self.attempts], indent=1), encoding="utf-8")
        partial.replace(self._path)
