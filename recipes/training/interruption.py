"""Signals: after the first, all ranks stop after the same step; a second one ends the process immediately."""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.files.exit_codes import ECHO_SECONDS, SIGNALS, ended_by
from recipes.files.screen import put

SHOW_CURSOR = b"\x1b[?25h\n"


class Agreement:
    """Lets all ranks act on one rank's signal at the same step, one step late, without waiting for the device.

    Each step starts a tiny all-reduce between the hosts and reads the result of the one started a step earlier.
    """

    def __init__(self) -> None:
        self._pending: tuple[dist.Work, Tensor] | None = None

    def largest(self, mine: int) -> int:
        """The largest number >= 0 that any rank passed to the previous call. All ranks must call it equally often."""
        agreed = self.end()
        votes = torch.tensor([mine])
        self._pending = dist.all_reduce(votes, op=dist.ReduceOp.MAX, async_op=True), votes
        return agreed

    def end(self) -> int:
        """Wait for the pending vote, which must not outlive the process group, and return its result."""
        if self._pending is None:
            return 0
        work, votes = self._pending
        work.wait()
        self._pending = None
        return int(votes.item())


class Interruption:
    """Records signals from its construction on, and lets the ranks agree on the step after which they stop.

    A separate thread reads the signals from a pipe: the main thread may be inside C++ code for minutes, and an
    exception raised there could surface as a different error.
    """

    def __init__(self) -> None:
        """Returns once all ranks record signals: from then on none stops without the others."""
        self.noted = 0
        """The signal that asked this process to stop, or 0."""
        self._noted_at = 0.0
        self._ending = False
        self._agreement = Agreement()
        ours, pythons = os.pipe()
        os.set_blocking(pythons, False)
        signal.set_wakeup_fd(pythons)
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: None)  # without a handler Python writes nothing to the pipe
        threading.Thread(target=self._listen, args=(ours,), daemon=True, name="signals").start()
        self.agreed_now()

    def agreed(self) -> int:
        """The signal that any rank had received by the previous call, or 0. Every rank calls it once per step."""
        return self._agreement.largest(self.noted)

    def agreed_now(self) -> int:
        """The signal that any rank has received by now, or 0. Waits for all ranks; leaves no vote pending."""
        self._agreement.largest(self.noted)
        return self._agreement.end()

    def end(self) -> None:
        """Leave together, ignoring signals: when the first rank ends, torchrun may send one to the others."""
        self._ending = True
        self.agreed_now()

    def _listen(self, pipe: int) -> None:
        while numbers := os.read(pipe, 64):
            for number in numbers:
                self._note(number)

    def _note(self, number: int) -> None:
        if number not in SIGNALS or self._ending:
            return
        if self.noted == 0:
            self.noted, self._noted_at = number, time.monotonic()
        elif number != self.noted or time.monotonic() - self._noted_at > ECHO_SECONDS:
            if sys.stdout.isatty():
                put(sys.stdout.fileno(), SHOW_CURSOR)  # which the live line hides
            os._exit(ended_by(number))


def forget_signals() -> None:
    """Restore the default handling of signals, for a run that has failed and is about to end."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
