"""Signals: after the first, all ranks stop after the same step; a second one ends the process immediately."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import torch.distributed as dist

from parallel.dist import lost_a_peer
from parallel.messages import Channel, Messages
from recipes.files.end import read_end
from recipes.files.exit_codes import ECHO_SECONDS, PREEMPTED, SIGNALS, ended_by
from recipes.files.screen import SHOW_CURSOR, put

BETWEEN_STAGES = "{}: interrupted between two stages; all steps are saved, and the same command resumes\n"


class Agreement:
    """Lets all ranks act on one rank's signal at the same step, one step late, without waiting for the device.

    Each step hands its vote to a thread, which takes it along the tree of messages, and reads the result of the vote of
    a step earlier. (An all-reduce of gloo would take two hops for every process, one after the other.)
    """

    def __init__(self) -> None:
        self._pending = False
        self._messages = Messages(Channel.VOTES)
        self._votes: SimpleQueue[int | None] = SimpleQueue()
        self._results: SimpleQueue[int | Exception] = SimpleQueue()
        threading.Thread(target=self._vote, daemon=True, name="votes").start()

    def largest(self, mine: int) -> int:
        """The largest number >= 0 that any rank passed to the previous call. All ranks must call it equally often."""
        agreed = self.end()
        self._votes.put(mine)
        self._pending = True
        return agreed

    def end(self) -> int:
        """Wait for the pending vote, which must not outlive the process group, and return its result."""
        if not self._pending:
            return 0
        self._pending = False
        result = self._results.get()
        if isinstance(result, Exception):  # another process is gone
            raise result
        return result

    def close(self) -> None:
        """End the thread."""
        self._votes.put(None)

    def _vote(self) -> None:
        while (mine := self._votes.get()) is not None:
            try:
                self._results.put(self._messages.from_main(self._messages.reduce(mine, max)))
            except Exception as error:
                self._results.put(error)


class Interruption:
    """Records signals from begin() on, and lets the ranks agree on the step after which they stop.

    A separate thread reads the signals from a pipe: the main thread may be inside C++ code for minutes, and an
    exception raised there could surface as a different error.
    """

    def __init__(self) -> None:
        self.noted = 0
        """The signal that asked this process to stop, or 0."""
        self._last, self._noted_at = 0, 0.0
        self.leaves = threading.Event()
        """Set by a signal after end(): this process leaves what it still waits for."""
        self._listens = self._ending = False
        self.can_wait = True
        """Whether the run goes on until the ranks agree on a step; false where nothing is lost by ending at once."""
        self._agreement = Agreement()

    def begin(self) -> None:
        """Record signals from now on. Returns once all ranks do: from then on none stops without the others."""
        self.can_wait = True
        if not self._listens:
            self._listens = True
            ours, pythons = os.pipe()
            os.set_blocking(pythons, False)
            signal.set_wakeup_fd(pythons)
            for number in SIGNALS:
                signal.signal(number, lambda number, frame: None)  # without a handler Python writes nothing to the pipe
            threading.Thread(target=self._listen, args=(ours,), daemon=True, name="signals").start()
        self.agreed_now()

    def cut_short(self, error: Exception, folder: Path, *, done: bool) -> str:
        """The last line of a run in this folder that failed after a signal: that ended a compiler, or a rank got it
        twice, or another rank failed first. done: whether the last step was taken."""
        lost = "a process was lost; " if lost_a_peer(error) else ""
        cause = f"{end}; that" if (end := read_end(folder)) else lost + signal.Signals(self.noted).name
        when = "after its last step; run the same command again" if done else "in the middle of a step; NOT SAVED"
        return f"{cause} ended the run {when}"

    def agreed(self) -> int:
        """The signal that any rank had received by the previous call, or 0. Every rank calls it once per step."""
        return self._agreement.largest(self.noted)

    def agreed_now(self) -> int:
        """The signal that any rank has received by now, or 0. Waits for all ranks; leaves no vote pending."""
        self._agreement.largest(self.noted)
        return self._agreement.end()

    def end(self) -> None:
        """Leave together. From now on the first signal sets `leaves`: when a rank ends, torchrun may send one to the
        others."""
        self._ending = True
        self.agreed_now()
        self._agreement.close()

    def _listen(self, pipe: int) -> None:
        while numbers := os.read(pipe, 64):
            for number in numbers:
                self._note(number)

    def _note(self, number: int) -> None:
        is_echo = number == self._last or (self._ending and self._last)  # at the end, also what torchrun sends
        is_echo = is_echo and time.monotonic() - self._noted_at <= ECHO_SECONDS
        if number not in SIGNALS or is_echo:
            return
        if not self.can_wait:
            if dist.get_rank() == 0:
                put(sys.stdout.fileno(), BETWEEN_STAGES.format(signal.Signals(number).name).encode())
            os._exit(PREEMPTED)
        if not (self.leaves.is_set() if self._ending else self.noted):
            self._last, self._noted_at = number, time.monotonic()
            if self._ending:
                self.leaves.set()
            else:
                self.noted = number
        else:
            if sys.stdout.isatty():
                put(sys.stdout.fileno(), SHOW_CURSOR)
            os._exit(ended_by(number))


def forget_signals() -> None:
    """Restore the default handling of signals, for a run that has failed and is about to end."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
