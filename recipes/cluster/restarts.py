"""What follows when the processes of a job have ended: nothing, the same again, or a person. Imports no torch."""

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
    """How the processes of an attempt ended."""

    DONE = "done"
    FINAL = "ended for a reason that a restart does not mend"
    PREEMPTED = "preempted"
    CRASHED = "crashed"
    UNSTARTED = "did not start on all nodes"
    """A node does not answer: a crash of the node, which other nodes mend and no change of the run would."""
    TAKEN = "ended by the scheduler"
    """Which cancels the job or requeues it by itself: neither the job's fault nor its decision."""


# What is not here is a crash.
FINAL_CODES = {
    REFUSED: "the recipe, its data or its folder must be mended first (exit code 2)",
    CANNOT_WRITE: "the last checkpoint cannot be saved (exit code 74)",
    POISONED: "the run is poisoned (exit code 76)",
}
# Saved; or ended by a signal with nothing to save yet, which the same command does over.
PREEMPTED_CODES = {PREEMPTED, *(ended_by(number) for number in (SIGHUP, SIGINT, SIGUSR1, SIGUSR2, SIGTERM))}


def end_of(codes: Sequence[int | None]) -> tuple[End, int]:
    """What the nodes' exit codes mean together, and the code that says it. None = killed before it could tell.

    A node that ends takes the others with it, so most of the codes tell of the consequence: the cause goes first.
    """
    known = [code for code in codes if code is not None]
    for final in FINAL_CODES:
        if final in known:
            return End.FINAL, final
    if known and all(code == 0 for code in codes):
        return End.DONE, 0
    if known and all(code in PREEMPTED_CODES for code in codes):
        return End.PREEMPTED, max(known)
    if HUNG in known:  # who was frozen is killed, and others may notice no more than that their peers have gone
        return End.CRASHED, HUNG
    return End.CRASHED, next((code for code in known if code not in {0, *PREEMPTED_CODES}), 1)


@dataclass(frozen=True)
class Attempt:
    """One start of all processes."""

    step: int
    """Of the newest checkpoint when it began; 0 = none."""
    end: End | None = None
    """None: the node that would have written it is gone."""


def reason_to_stop(attempts: Sequence[Attempt], *, step: int, restarts: int) -> str | None:
    """Why the job should not start once more after these attempts; None where it should.

    step: of the newest checkpoint now. restarts: how many times crashes may be answered with a restart.
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
        return f"two restarts came no further than step {step} (a crash loop, or checkpoints too far apart)"
    return None


def number_of_restarts(text: str) -> int:
    """What RESTARTS says. Raises UserError."""
    if not text.isdecimal():
        raise UserError(f"RESTARTS={text}: must be a number of restarts, 0 or more")
    return int(text)


def newest_step(folder: Path) -> int:
    """Of the checkpoints of the run in this folder; 0 = there is none."""
    return max(checkpoint_steps(folder / CHECKPOINTS), default=0)


class History:
    """The attempts of a job, in a file that outlives it: a requeued job goes on counting."""

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
