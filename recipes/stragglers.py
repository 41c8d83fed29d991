"""Names the process that the others wait for.

All processes take a step together, so their steps last equally long, whoever is slow. What differs is the time that
each spends on its own: reading data, and computing. What is left of a step is collectives, where the fastest waits
longest: that names nobody, so communication is not among the phases here.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor, nn

from parallel.dist import World
from parallel.reduce import gather_over_processes
from recipes.phases import Phases

WINDOW = 15
"""Logged steps whose lower quartile counts: noise only adds time, and who is slow is slow in most of them."""
IN_A_ROW = 4
"""Logged steps at which that must be too long."""
SLOWER = 1.3
"""Than the median process."""
MATTERS = 0.05
"""Of the step: less time for data than that is nobody's concern."""
DATA, COMPUTE = "data", "compute"


@dataclass(frozen=True)
class Straggler:
    """A process that is slow on its own, in seconds a step; for Work on CUDA see there."""

    rank: int
    node: str
    phase: str
    seconds: float
    median: float
    """Of all processes."""

    def __str__(self) -> str:
        return (
            f"STRAGGLER: rank {self.rank} on {self.node} takes {self.seconds:.4f} s for {self.phase},"
            f" the median process {self.median:.4f} s"
        )


class Comparison:
    """Every process's seconds at the last logged steps."""

    def __init__(self, nodes: Sequence[str]) -> None:
        """nodes: names, by rank of the process."""
        self._nodes = nodes
        self._steps = deque[float](maxlen=WINDOW)
        self._seconds = {phase: deque[Sequence[float]](maxlen=WINDOW) for phase in (DATA, COMPUTE)}
        self._in_a_row: dict[tuple[int, str], int] = {}

    def add(self, step_seconds: float, seconds: Mapping[str, Sequence[float]]) -> list[Straggler]:
        """Take in a logged step, the seconds by phase and rank; who is a straggler now."""
        self._steps.append(step_seconds)
        for phase, by_rank in seconds.items():
            self._seconds[phase].append(by_rank)
        if len(self._steps) < WINDOW:
            return []
        slow = {(straggler.rank, straggler.phase): straggler for straggler in self._slow()}
        self._in_a_row = {key: self._in_a_row.get(key, 0) + 1 for key in slow}
        return [straggler for key, straggler in slow.items() if self._in_a_row[key] >= IN_A_ROW]

    def _slow(self) -> Iterator[Straggler]:
        for phase, history in self._seconds.items():
            by_rank = [sorted(values)[len(values) // 4] for values in zip(*history, strict=True)]
            usual = median_low(by_rank)  # of two processes the faster one
            matters = MATTERS * median(self._steps) if phase == DATA else 0.0
            for rank, seconds in enumerate(by_rank):
                if seconds > SLOWER * usual and seconds - usual > matters:
                    yield Straggler(rank, self._nodes[rank], phase, seconds, usual)


class Work:
    """How long this process computes, waits for others left out.

    On a CPU: processor time of the main thread, a step. On CUDA: the device's time from the last norm to the loss of
    the last micro-batch, which no collective interrupts; it stands for the rest.
    """

    def __init__(self, phases: Phases, device: torch.device, *, model: nn.Module, head: nn.Module) -> None:
        """head: where the last part of the model's forward begins."""
        self._phases, self._cuda = phases, device.type == "cuda"
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            head.register_forward_pre_hook(lambda module, inputs: begin.record())
            model.register_forward_hook(lambda module, inputs, output: end.record())
            self._begin, self._end = begin, end

    def seconds(self) -> float:
        """Of the last step on CUDA, where the host waits for it; else the mean since the last logged step."""
        if not self._cuda:
            return self._phases.worked_per_step()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3


class Stragglers:
    """Compares all processes at logged steps, by the one message that the loss takes anyway."""

    def __init__(self, world: World, phases: Phases, *, model: nn.Module, head: nn.Module) -> None:
        """head: where the last part of the model's forward begins."""
        self._rank, self._phases = world.rank, phases
        self._work = Work(phases, world.device, model=model, head=head)
        self._comparison = Comparison([world.node_of(rank) for rank in range(world.size)])
        self._is_warm, self._steps = False, 0
        self._data: list[float] = [0.0]
        self._compute: list[float] = [0.0]
        self._named: set[tuple[int, str]] = set()

    def gather(self, loss: Tensor) -> float:
        """The sum of all processes' losses; their seconds come with it. The host waits for the device."""
        self._steps = self._phases.steps
        _, data = self._phases.seconds_per_step()
        own = torch.tensor([0.0, data, self._work.seconds()], dtype=torch.float64).to(loss.device)
        own[0] = loss
        losses, self._data, self._compute = gather_over_processes(own).t().tolist()
        return sum(losses)

    def waited_for_data(self) -> float:
        """Seconds since the last logged step that this process waited because another one had no data yet."""
        return (max(self._data) - self._data[self._rank]) * self._steps

    def compare(self, step_seconds: float) -> tuple[dict[str, Any], list[str]]:
        """After gather(): the columns of metrics.jsonl, if there is anything to say, and lines for people."""
        found: list[Straggler] = []
        if self._is_warm:  # the first step compiles, on whichever process is first
            found = self._comparison.add(step_seconds, {DATA: self._data, COMPUTE: self._compute})
        self._is_warm = True
        before, self._named = self._named, {(one.rank, one.phase) for one in found}
        lines = [str(one) for one in found if (one.rank, one.phase) not in before]
        return {"stragglers": [asdict(one) for one in found]} if found else {}, lines
