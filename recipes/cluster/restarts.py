"""Decides whether a job starts again after its processes have ended, and starts those of one node again.

Each node decides alone, and all alike: exit code and newest checkpoint are the same on all. Imports no torch.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from types import FrameType

from parallel.errors import UserError
from recipes.files import exit_codes
from recipes.files.atomic import utc_now, write_whole
from recipes.files.end import read_end
from recipes.files.layout import CHECKPOINTS, checkpoint_steps
from recipes.files.screen import tell

PAUSE_SECONDS = 1
"""Seconds to wait before another start, so that ports and devices are free by then."""
WAITS = "LAUNCHER_WAITS"
"""The environment variable of a launcher that starts in advance, and reads from standard input that it is needed."""
FAULT_SECONDS, LONGEST_PAUSE = 30, 300
"""The same after a first fault that may pass, and at most: each in a row doubles it, as a server may need minutes."""


class End(StrEnum):
    """How the processes of an attempt ended. The values are written to attempts.json."""

    DONE = "done"
    FINAL = "ended for a reason that a restart does not mend"
    PREEMPTED = "preempted"
    CRASHED = "crashed"
    TEMPORARY = "met a fault that may pass"
    UNSTARTED = "did not start on all nodes"
    """A node does not answer. Other nodes are the remedy, not a change of the run."""
    TAKEN = "ended by the scheduler"
    """The scheduler cancels the job or requeues it by itself."""


# Codes that are in neither of these are crashes.
FINAL_CODES = (
    *(exit_codes.REFUSED, exit_codes.CANNOT_WRITE, exit_codes.POISONED),
    *(exit_codes.OUT_OF_MEMORY, exit_codes.WRONG),
)
# Crashes whose cause the workers have named. The frozen process was killed, and others may only have lost a peer.
NAMED_CRASHES = (exit_codes.HUNG, exit_codes.CORRUPTED, exit_codes.TEMPORARY)
# The state is saved, or a signal came before there was anything to save; the same command starts over.
PREEMPTED_CODES = {exit_codes.PREEMPTED, *map(exit_codes.ended_by, (*exit_codes.SIGNALS, signal.SIGHUP))}
EXPLAINED = {*FINAL_CODES, *NAMED_CRASHES, exit_codes.PREEMPTED, *map(exit_codes.ended_by, exit_codes.SIGNALS)}
"""Exit codes of workers that have printed the reason themselves."""


def rank_of_code(code: int) -> int:
    """Order in which exit codes are named: what workers have explained, then kills, then other failures."""
    return 0 if code in EXPLAINED else 1 if code < 0 else 2


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
    for crash in NAMED_CRASHES:
        if crash in known:
            return End.TEMPORARY if crash == exit_codes.TEMPORARY else End.CRASHED, crash
    return End.CRASHED, next((code for code in known if code not in {0, *PREEMPTED_CODES}), 1)


@dataclass(frozen=True)
class Attempt:
    """One start of all processes."""

    step: int
    """Step of the newest checkpoint at the start; 0 = none."""
    end: End | None = None
    """None: unknown, because the node that records it was lost."""
    began: str = ""
    ended: str = ""
    """When, by utc_now(); "" = not yet, or before this was noted."""


def reason_to_stop(attempts: Sequence[Attempt], *, step: int, restarts: int) -> str | None:
    """Why not to start again, or None. step: the newest checkpoint's. restarts: how many crashes to restart after."""
    if attempts and attempts[-1].end in (End.DONE, End.FINAL):
        return attempts[-1].end.value
    crashes = sum(attempt.end in (End.CRASHED, End.TEMPORARY, End.UNSTARTED, None) for attempt in attempts)
    if crashes > restarts:
        return f"it crashed {crashes} times, and RESTARTS={restarts}"
    others = (End.TAKEN, End.UNSTARTED, End.TEMPORARY)  # they say nothing about this run
    ours = [(attempt, index > 0) for index, attempt in enumerate(attempts) if attempt.end not in others]
    latest = takewhile(lambda pair: pair[0].step == step, reversed(ours))
    if sum(is_restart for _, is_restart in latest) >= 2:
        return f"two restarts got no further than step {step} (a crash loop, or checkpoints too far apart)"
    return None


def pause_after(attempts: Sequence[Attempt]) -> float:
    """Seconds to wait before another start."""
    faults = sum(1 for _ in takewhile(lambda attempt: attempt.end is End.TEMPORARY, reversed(attempts)))
    return fault_pause(faults) if faults else PAUSE_SECONDS


def fault_pause(faults: int) -> float:
    """Seconds to wait after so many faults in a row that may pass."""
    return min(FAULT_SECONDS * 2 ** (faults - 1), LONGEST_PAUSE)


def number_of_restarts(text: str) -> int:
    """The value of RESTARTS. Raises UserError."""
    if not text.isdecimal():
        raise UserError(f"RESTARTS={text}: must be a number of restarts, 0 or more")
    return int(text)


def newest_step(folder: Path) -> int:
    """The newest step in a run's checkpoints, or in memory; 0 = none, or the folder cannot be read now."""
    from recipes.checkpoint.memory_folder import read_mark  # numpy

    steps = [mark.step] if (mark := read_mark(folder)) else []
    with suppress(UserError):  # the workers report it
        steps += checkpoint_steps(folder / CHECKPOINTS)
    return max(steps, default=0)


class History:
    """The attempts of a job, in a file, so that a requeued job continues the count."""

    def __init__(self, path: Path, *, log: Callable[[str], None]) -> None:
        self._path, self._log = path, log
        self.attempts: list[Attempt] = []
        self.unsaved = False
        """Whether the file lacks attempts, because it cannot be written."""
        try:
            items = json.loads(path.read_text(encoding="utf-8"))
            self.attempts = [Attempt(**item | {"end": End(item["end"]) if item["end"] else None}) for item in items]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log(f"{path} cannot be read ({error}): earlier attempts are not counted")

    def begin(self, step: int) -> None:
        self.attempts.append(Attempt(step, began=utc_now()))
        self._write()

    def end(self, end: End) -> None:
        self.attempts[-1] = replace(self.attempts[-1], end=end, ended=utc_now())
        self._write()

    def _write(self) -> None:
        try:
            write_whole(self._path, json.dumps([asdict(attempt) for attempt in self.attempts], indent=1))
            self.unsaved = False
        except OSError as error:
            if not self.unsaved:
                self._log(f"{self._path} cannot be written: {error.strerror}; only this process knows the attempts")
            self.unsaved = True


def log(text: str) -> None:
    tell(f"{utc_now()} supervise: {text}")


class Launcher:
    """The process that starts the workers, and the signals passed on to it."""

    def __init__(self, command: list[str], *, prepared: bool = False) -> None:
        """prepared: whether the next one starts in advance, and waits until it is needed; see quiet.py."""
        self._command, self._prepared = command, prepared
        self._process: subprocess.Popen[bytes] | None = None
        self._next: subprocess.Popen[bytes] | None = None
        self.signal = 0  # the first signal, 0 = none yet

    def run(self) -> int:
        """Start the launcher and wait. Returns its exit code, 128 + n for signal n."""
        # The launcher unblocks them once it can notify the other nodes.
        signal.pthread_sigmask(signal.SIG_BLOCK, exit_codes.SIGNALS)
        self._process = self._take_next() or subprocess.Popen(self._command)
        if self._prepared:
            waits = os.environ | {WAITS: "1"}
            self._next = subprocess.Popen(self._command, env=waits, stdin=subprocess.PIPE, bufsize=0)
        if self.signal:
            self._process.send_signal(self.signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, exit_codes.SIGNALS)
        code = self._process.wait()
        return code if code >= 0 else exit_codes.ended_by(-code)

    def _take_next(self) -> subprocess.Popen[bytes] | None:
        """The one that is prepared, which is told that it is needed; None if there is none, or it has ended."""
        if self._next and self._next.stdin and self._next.poll() is None:
            with suppress(BrokenPipeError), self._next.stdin as turn:
                turn.write(b"1")
                return self._next
        return None

    def end(self) -> None:
        """End the one that is prepared."""
        if self._next is not None:
            self._next.kill()
            self._next.wait()

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Between two starts, the next launcher gets it, so that other nodes are notified."""
        self.signal = self.signal or number
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def supervise(launcher: Launcher, folder: Path, *, steps: int, restarts: int) -> int:
    """Start the launcher until `steps` steps are saved or another start would not help. Returns the exit code."""
    attempts: list[Attempt] = []
    while True:
        began_at, before = newest_step(folder), read_end(folder)
        code = launcher.run()
        end = End.UNSTARTED if code == exit_codes.NOT_MET else end_of([code])[0]
        attempts.append(Attempt(began_at, end))
        if launcher.signal or end in (End.DONE, End.FINAL, End.PREEMPTED):
            return code
        step = newest_step(folder)
        cause = f"; {killed}" if (killed := read_end(folder)) != before and killed else ""
        log(f"attempt {len(attempts)} {end.value}, exit code {code}; newest checkpoint: step {step}{cause}")
        if step >= steps:
            log("not started again: the last step is saved; the same command does the rest")
            return code
        if stop := reason_to_stop(attempts, step=step, restarts=restarts):
            log(f"stopped: {stop}")
            return code
        pause = pause_after(attempts)
        if end is End.TEMPORARY:
            log(f"starts again in {pause:g} s")
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0 and not launcher.signal:
            time.sleep(min(left, 1))
