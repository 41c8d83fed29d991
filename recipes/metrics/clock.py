"""The clock of the training loop: what the process is doing now, and how long it has done what."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")

START, FIRST_STEP, STEP, LOADING = "start", "first step", "step", "data"
LOG, VALIDATION, SAVE, END = "log", "validation", "save", "end"
IN_A_STEP = (FIRST_STEP, STEP, LOADING)


class RunClock:
    """Attributes every second of this process to the innermost phase it is in. The phases add up to its wall time.

    The seconds are the host's. On a GPU the host only queues a step; its time appears where the host waits for it.
    """

    def __init__(self, device: torch.device, *, began: float | None = None) -> None:
        """began: when the process started, by time.monotonic(); None = now."""
        now = time.monotonic()
        self.began = now if began is None else began
        self.now = START
        self.moved_at = now  # the last progress, by time.monotonic(); the watchdog reads it from another thread
        self.step = 0  # steps completed
        self.steady = False  # whether a step of this stage is completed, and so the compilation of the first step
        self.seconds: dict[str, float] = defaultdict(float)
        self._device, self._since = device, self.began
        # Processor time of this thread in steps, without loading data.
        self._worked, self._processor = 0.0, time.thread_time()
        self.restart()

    def begin(self, phase: str) -> None:
        """End the current phase and begin this one."""
        now = time.monotonic()
        processor = time.thread_time()
        self.seconds[self.now] += now - self._since
        if self.now in (FIRST_STEP, STEP):
            self._worked += processor - self._processor
        self.now, self._since, self._processor, self.moved_at = phase, now, processor, now

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """A context manager: its body belongs to this phase."""
        outer = self.now
        self.begin(phase)
        try:
            yield
        finally:
            self.begin(outer)

    @contextmanager
    def synchronized(self, phase: str) -> Iterator[None]:
        """The same after a wait, on CUDA, for all queued work, so that none of it counts towards this phase."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        with self(phase):
            yield

    def with_progress(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items; each one counts as progress, in whatever phase it is taken."""
        for item in items:
            self.progressed()
            yield item

    def progressed(self) -> None:
        """Note that something was done, in whatever phase."""
        self.moved_at = time.monotonic()

    def count_step(self) -> None:
        self.step += 1
        self.steps += 1
        if not self.steady:
            self.steady = True
            self.begin(STEP)

    def rebuild(self) -> None:
        """Begin to build the next stage, whose first step compiles again."""
        self.steady = False
        self.begin(START)

    def restart(self) -> None:
        """Restart the means over steps."""
        self.steps, self._before = 0, self.elapsed()
        self._worked_before = self._worked

    def seconds_per_step(self) -> tuple[float, float]:
        """Means since restart() of (the whole step, its wait for data). On CUDA, synchronize before calling this."""
        now = self.elapsed()
        spent = {phase: now.get(phase, 0.0) - self._before.get(phase, 0.0) for phase in IN_A_STEP}
        return sum(spent.values()) / self.steps, spent[LOADING] / self.steps

    def worked_per_step(self) -> float:
        """Mean processor time of this thread since restart(), without loading data."""
        self.begin(self.now)
        return (self._worked - self._worked_before) / self.steps

    def elapsed(self) -> dict[str, float]:
        """Seconds of each phase until now; they add up to the time since the process started."""
        self.begin(self.now)
        return dict(self.seconds)
