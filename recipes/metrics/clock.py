"""What a process does now, and how long it did what: the clock of the loop."""

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
    """Every second of this process belongs to one phase: the innermost it is in. They add up to its wall time.

    The seconds are the host's. On a GPU the host only queues a step, and pays for it where it waits for the device.
    """

    def __init__(self, device: torch.device, *, began: float | None = None) -> None:
        """began: when the process did, by time.monotonic(); None = now."""
        now = time.monotonic()
        self.began = now if began is None else began
        self.now = START
        self.moved_at = now
        """When there was progress last, by time.monotonic(). A watchdog reads it from another thread."""
        self.step = 0
        """Steps that are done."""
        self.steady = False
        """Whether this process has done a step: what is compiled at first is compiled."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._device, self._since = device, self.began
        self._worked, self._processor = 0.0, time.thread_time()
        """Processor time of this thread in steps, that for data left out."""
        self.restart()

    def begin(self, phase: str) -> None:
        """What was until now is over."""
        now = time.monotonic()
        processor = time.thread_time()
        self.seconds[self.now] += now - self._since
        if self.now in (FIRST_STEP, STEP):
            self._worked += processor - self._processor
        self.now, self._since, self._processor, self.moved_at = phase, now, processor, now

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """What happens inside is another phase."""
        outer = self.now
        self.begin(phase)
        try:
            yield
        finally:
            self.begin(outer)

    @contextmanager
    def synchronized(self, phase: str) -> Iterator[None]:
        """The same, left out of the step time: on CUDA what is queued before it is waited for before it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        with self(phase):
            yield

    def with_progress(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items; each is progress, in whatever phase they are taken."""
        for item in items:
            self.moved_at = time.monotonic()
            yield item

    # The loop

    def count_step(self) -> None:
        self.step += 1
        self.steps += 1
        if not self.steady:
            self.steady = True
            self.begin(STEP)

    def restart(self) -> None:
        """Begin a new mean over steps."""
        self.steps, self._before = 0, self.elapsed()
        self._worked_before = self._worked

    def seconds_per_step(self) -> tuple[float, float]:
        """(whole step, its wait for data), mean since restart(). On CUDA ask only after waiting for the device."""
        now = self.elapsed()
        spent = {phase: now.get(phase, 0.0) - self._before.get(phase, 0.0) for phase in IN_A_STEP}
        return sum(spent.values()) / self.steps, spent[LOADING] / self.steps

    def worked_per_step(self) -> float:
        """Processor time of this thread, data left out, mean since restart()."""
        self.begin(self.now)
        return (self._worked - self._worked_before) / self.steps

    def elapsed(self) -> dict[str, float]:
        """Seconds of each phase until now; they add up to the time since the process began."""
        self.begin(self.now)
        return dict(self.seconds)
