"""The clock of the training loop: what the process does now, how long it has done what, and what of that trained."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")

START, FIRST_STEP, STEP, LOADING = "start", "first step", "step", "data"
LOG, VALIDATION, SAVE, END = "log", "validation", "save", "end"
IN_A_STEP = (FIRST_STEP, STEP, LOADING)
USEFUL, SKIPPED, RESTARTS = "step", "skipped", "restarts"


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
        self.part = ""  # words for the part of a pipeline that this process has; for the watchdog, too
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

    def name_start(self, part: str, until: float | None = None) -> None:
        """Count what the start has taken, until now or then (by time.monotonic()), as this part of it."""
        self.begin(self.now)
        seconds = self.seconds[START] - (0.0 if until is None else self._since - until)
        self.seconds[part] += seconds
        self.seconds[START] -= seconds

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


class Goodput:
    """Divides the wall time since the start of a run's first process into parts, which add up to it.

    A checkpoint stores the parts as of its step. When a run resumes from it, the time since then was spent on lost
    steps, on waits in a queue and on attempts that saved nothing: all of that counts as "restarts".
    """

    def __init__(self, clock: RunClock, before: Mapping[str, Any]) -> None:
        """before: what state() stored in the checkpoint that the run resumes from, if any."""
        self._clock = clock
        then = before.get("goodput", {})
        self._earlier: dict[str, float] = defaultdict(float, then.get("seconds", {}))
        if then:  # below 0 where the clock was ahead until now: that takes back what it had added
            gap = time.time() - (time.monotonic() - clock.began) - then["at"]
            gap = min(gap, 0.0) if then["finished"] else gap  # a finished run that gets more steps lost no time
            self._earlier[RESTARTS] = max(0.0, self._earlier[RESTARTS] + gap)

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move up to this many seconds, as far as the source has them, from one part to another."""
        seconds = min(seconds, self.parts().get(source, 0.0))
        self._earlier[source] -= seconds
        self._earlier[target] += seconds

    def parts(self) -> dict[str, float]:
        """Seconds by part, without empty parts."""
        sums = defaultdict(float, self._earlier)
        for phase, seconds in self._clock.elapsed().items():
            sums[phase] += seconds
        return {part: seconds for part, seconds in sums.items() if seconds > 0}

    def row(self) -> dict[str, Any]:
        """The columns for metrics.jsonl."""
        parts = self.parts()
        rounded = {part: round(seconds, 3) for part, seconds in parts.items() if seconds >= 0.0005}
        return {"goodput": round(share(parts), 4), "wall_seconds": rounded}

    def state(self, *, finished: bool) -> dict[str, Any]:
        """What a checkpoint stores, as plain JSON. finished: the run has no more steps to do."""
        return {"goodput": {"seconds": self.parts(), "at": time.time(), "finished": finished}}

    def line(self) -> str:
        """One line for the log with all parts, longest first."""
        parts = self.parts()
        total = sum(parts.values())
        ranked = sorted(parts.items(), key=lambda item: -item[1])
        rest = ", ".join(f"{part} {seconds / total:.1%}" for part, seconds in ranked if part != USEFUL)
        return f"goodput {share(parts):.1%} of {total:.1f} s; {rest}"


def share(parts: Mapping[str, float]) -> float:
    """The useful share of all seconds."""
    return parts.get(USEFUL, 0.0) / sum(parts.values())
