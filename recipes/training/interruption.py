"""Signals: all ranks stop after the same step. The first asks for it, a second one ends the process at once."""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.files.exit_codes import ECHO_SECONDS, SIGNALS, ended_by

SHOW_CURSOR = b"\x1b[?25h\n"


class Agreement:
    """Lets all ranks act on one rank's signal at the same step, one step late, without waiting for the device.

    Each step starts a tiny all-reduce between the hosts and reads the result of the one started a step earlier.
    """

    def __init__(self) -> None:
        self._votes: Tensor | None = None
        self._pending: dist.Work | None = None

    def largest(self, mine: int) -> int:
        """The largest number >= 0 that any rank passed to the previous call. All ranks must call it equally often."""
        agreed = self.end()
        self._votes = torch.tensor([mine])
        self._pending = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, async_op=True)
        return agreed

    def end(self) -> int:
        """Wait for the pending vote, which must not outlive the process group, and return its result."""
        if self._pending is None or self._votes is None:
            return 0
        self._pending.wait()
        agreed = int(self._votes.item())
        self._votes = self._pending = None
        return agreed


class Interruption:
    """Notes signals from its making on, and lets the ranks agree on the step after which they stop.

    Signals are read from a pipe by a thread of its own: the main thread may be inside of C++ for minutes, and an
    exception thrown into it there could come out as an error of another kind.
    """

    def __init__(self) -> None:
        """All ranks return when all of them note signals: from then on none leaves without the others."""
        self._first = 0
        self._first_at = 0.0
        self._ending = False
        self._agreement = Agreement()
        ours, pythons = os.pipe()
        os.set_blocking(pythons, False)
        signal.set_wakeup_fd(pythons)
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: None)  # else Python puts nothing into the pipe
        threading.Thread(target=self._listen, args=(ours,), daemon=True, name="signals").start()
        self.agreed_now()

    @property
    def noted(self) -> int:
        """The signal that asks this process to stop, or 0."""
        return self._first

    def agreed(self) -> int:
        """The signal that any rank had noted at the previous call, or 0. Every rank calls it once in each step."""
        return self._agreement.largest(self._first)

    def agreed_now(self) -> int:
        """The signal that any rank has noted by now, or 0: waits for all ranks. No vote of agreed() is left over."""
        self._agreement.largest(self._first)
        return self._agreement.end()

    def end(self) -> None:
        """Leave together: a rank that is first to go has torchrun end the others, which need not be told any more."""
        self._ending = True
        self.agreed_now()

    def _listen(self, pipe: int) -> None:
        while numbers := os.read(pipe, 64):
            for number in numbers:
                self._note(number)

    def _note(self, number: int) -> None:
        if number not in SIGNALS or self._ending:
            return
        if self._first == 0:
            self._first, self._first_at = number, time.monotonic()
        elif number != self._first or time.monotonic() - self._first_at > ECHO_SECONDS:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), SHOW_CURSOR)  # the live line hides it
            os._exit(ended_by(number))


def forget_signals() -> None:
    """From now on a signal does what it does to any program. For a run that has failed, and waits for its end."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
