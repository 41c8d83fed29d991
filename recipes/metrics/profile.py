"""Traces some steps with torch.profiler and writes a table of where their time went."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from parallel.dist import World
from recipes.metrics.breakdown import STEP, break_down, read_trace, table
from recipes.metrics.clock import LOG, RunClock
from recipes.metrics.config import ProfileConfig

TRACE, TABLE, NUMBERS = "trace.json.gz", "breakdown.md", "breakdown.json"


class StepProfiler:
    """Traces `config.trace_steps` steps after the first `config.after` steps of this start, on rank 0.

    The host waits for the device before and after a traced step, so that all of the step's work is inside the trace.
    This makes traced steps a little slower, also in metrics.jsonl. While rank 0 writes, the other ranks wait at their
    next collective.
    """

    def __init__(
        self, config: ProfileConfig, world: World, *, folder: Path, clock: RunClock, log: Callable[[str], None]
    ) -> None:
        """
        Args:
            config: which steps.
            world: of the run; rank 0 traces.
            folder: receives the trace and the table.
            clock: of the run; writing counts as logging.
            log: receives one line of text per message.
        """
        self._first = config.after + 1
        self._last = config.after + config.trace_steps if world.is_main else 0
        self._folder, self._device, self._clock, self._log = folder, world.device, clock, log
        self._steps = 0
        self._profile: profile | None = None

    def step(self, number: int) -> AbstractContextManager[None]:
        """Enter it around every step. number: of the step in the run; those of this start are counted here."""
        self._steps += 1
        return self._traced() if self._first <= self._steps <= self._last else nullcontext()

    @contextmanager
    def _traced(self) -> Iterator[None]:
        self._wait()
        if self._profile is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # Kineto's log is of use only to its developers
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
            self._profile = profile(activities=activities, acc_events=True)
            self._profile.start()
        with record_function(STEP):
            yield
            self._wait()
        if self._steps == self._last:
            with self._clock.synchronized(LOG):
                self._finish(self._profile)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _finish(self, traced: profile) -> None:
        traced.stop()
        self._profile = None
        self._folder.mkdir(exist_ok=True)
        traced.export_chrome_trace(str(self._folder / TRACE))
        breakdown = break_down(read_trace(self._folder / TRACE))
        (self._folder / TABLE).write_text(table(breakdown), encoding="utf-8")
        (self._folder / NUMBERS).write_text(json.dumps(asdict(breakdown), indent=2) + "\n", encoding="utf-8")
        self._log(f"steps {self._first} to {self._last} of this start were traced: {self._folder / TABLE}")
