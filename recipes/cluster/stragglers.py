"""Names the process that the others wait for.

All processes take a step together, so their steps last equally long, whoever is slow. What differs is the time that
each spends on its own: reading data, and computing. What is left of a step is collectives, where the fastest waits
longest: that names nobody. But when even the process that waits least waits longer than it used to, the links between
nodes are measured, and they do.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor, nn

from parallel.dist import World
from parallel.nodes import Node
from parallel.reduce import gather_over_processes
from recipes.cluster.links import measure_exchanges, slow_processes
from recipes.files.units import size
from recipes.metrics.clock import RunClock

WINDOW = 15
"""Logged steps whose lower quartile counts: noise only adds time, and who is slow is slow in most of them."""
IN_A_ROW = 4
"""Logged steps at which that must be too long."""
SLOWER = 1.3
"""Than the median process."""
SLOWER_ON_CPUS = 2.0
"""There others use the cores too, and what shares a core or its cache with a process makes it a third slower."""
MATTERS = 0.05
"""Of the step: less time for data than that is nobody's concern."""
NOTICEABLE = 0.1
"""Of the step: communication that has become slower by less is not looked into."""
EXCHANGES = 2
"""So often links are measured, and the fastest counts: noise only adds time."""
PROBES = 10
"""Of links in a run at most."""
DATA, COMPUTE, COMMUNICATION = "data", "compute", "communication"


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


@dataclass(frozen=True)
class SlowLink:
    """A process that is slow to exchange data with those on other nodes."""

    rank: int
    node: str
    phase: str
    bytes_per_second: float
    """In each direction, with the faster of its neighbours."""
    median: float
    """Of all processes."""

    def __str__(self) -> str:
        return (
            f"STRAGGLER: rank {self.rank} on {self.node} reaches {size(int(self.bytes_per_second))}/s in {self.phase},"
            f" the median process {size(int(self.median))}/s"
        )


class Comparison:
    """Every process's seconds at the last logged steps."""

    def __init__(self, nodes: Sequence[str], *, slower: float = SLOWER) -> None:
        """nodes: names, by rank of the process. slower: so many times the median is slow."""
        self._nodes, self._slower = nodes, slower
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
            by_rank = [lower_quartile(values) for values in zip(*history, strict=True)]
            usual = median_low(by_rank)  # of two processes the faster one
            matters = MATTERS * median(self._steps) if phase == DATA else 0.0
            for rank, seconds in enumerate(by_rank):
                if seconds > self._slower * usual and seconds - usual > matters:
                    yield Straggler(rank, self._nodes[rank], phase, seconds, usual)


class Communication:
    """Whether it takes longer than it used to in this run.

    It is what is left of a step beside data and compute, where least is left: with the process that the others wait
    for. On CUDA, compute stands for a part of computing only, and what is left holds the rest: there is no telling how
    much of it is communication, and only what it grows by counts, which a GPU that computes more slowly adds to.
    """

    def __init__(self, *, is_all: bool) -> None:
        """is_all: nothing else is left, as on a CPU."""
        self._slower = SLOWER if is_all else 1.0
        self._left, self._steps = deque[float](maxlen=WINDOW), deque[float](maxlen=WINDOW)
        self._usual, self._in_a_row = float("inf"), 0

    def add(self, step: Sequence[float], data: Sequence[float], compute: Sequence[float]) -> float | None:
        """Take in a logged step, seconds by rank; how many more it takes now, if that is slow."""
        self._left.append(min(whole - own - work for whole, own, work in zip(step, data, compute, strict=True)))
        self._steps.append(median(step))
        if len(self._left) < WINDOW:
            return None
        self._usual = min(self._usual, median(self._left))
        recent = lower_quartile(self._left)
        more = recent - self._usual
        slow = recent > self._slower * self._usual and more > NOTICEABLE * median(self._steps)
        self._in_a_row = self._in_a_row + 1 if slow else 0
        return more if self._in_a_row >= IN_A_ROW else None

    def get_used_to_it(self) -> None:
        """What it takes now is the usual, until it takes less."""
        self._usual, self._in_a_row = median(self._left), 0


def lower_quartile(values: Collection[float]) -> float:
    """A quarter of them are smaller."""
    return sorted(values)[len(values) // 4]


class Work:
    """How long this process computes, waits for others left out.

    On a CPU: processor time of the main thread, a step. On CUDA: the device's time from the last norm to the loss of
    the last micro-batch, which no collective interrupts; it stands for the rest.
    """

    def __init__(self, clock: RunClock, device: torch.device, *, model: nn.Module, head: nn.Module) -> None:
        """head: where the last part of the model's forward begins."""
        self._clock, self._cuda = clock, device.type == "cuda"
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            head.register_forward_pre_hook(lambda module, inputs: begin.record())
            model.register_forward_hook(lambda module, inputs, output: end.record())
            self._begin, self._end = begin, end

    def seconds(self) -> float:
        """Of the last step on CUDA, where the host waits for it; else the mean since the last logged step."""
        if not self._cuda:
            return self._clock.worked_per_step()
        torch.cuda.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3


class Stragglers:
    """Compares all processes at logged steps, by the one message that the loss takes anyway.

    All know the same numbers, and measure links together without asking each other.
    """

    def __init__(self, world: World, clock: RunClock, *, model: nn.Module, head: nn.Module) -> None:
        """head: where the last part of the model's forward begins."""
        self._world, self._clock = world, clock
        self._work = Work(clock, world.device, model=model, head=head)
        self._is_cpu = world.device.type == "cpu"
        self._slower = SLOWER_ON_CPUS if self._is_cpu else SLOWER
        self._comparison = Comparison([world.node_of(rank) for rank in range(world.size)], slower=self._slower)
        self._communication = Communication(is_all=self._is_cpu)
        self._is_warm, self._steps = False, 0
        self._step, self._data, self._compute = [0.0], [0.0], [0.0]
        self._slow_links, self._probes = list[SlowLink](), 0
        self._named: set[tuple[int, str]] = set()

    def gather(self, loss: Tensor) -> float:
        """The sum of all processes' losses; their seconds come with it. The host waits for the device."""
        self._steps = self._clock.steps
        compute = self._work.seconds()  # first: on CUDA it waits, and the step is whole only then
        own = torch.tensor([0.0, *self._clock.seconds_per_step(), compute], dtype=torch.float64).to(loss.device)
        own[0] = loss
        losses, self._step, self._data, self._compute = gather_over_processes(own).t().tolist()
        return sum(losses)

    def waited_for_data(self) -> float:
        """Seconds since the last logged step that this process waited because another one had no data yet."""
        return (max(self._data) - self._data[self._world.rank]) * self._steps

    def compare(self) -> tuple[dict[str, Any], list[str]]:
        """After gather(), on all ranks: the columns of metrics.jsonl, if there is anything to say, lines for people."""
        found: list[Straggler | SlowLink] = []
        lines: list[str] = []
        if self._is_warm:  # the first step compiles, on whichever process is first
            found += self._comparison.add(median(self._step), {DATA: self._data, COMPUTE: self._compute})
            lines += self._look_at_links()
            found += self._slow_links
        self._is_warm = True
        before, self._named = self._named, {(one.rank, one.phase) for one in found}
        lines += [str(one) for one in found if (one.rank, one.phase) not in before]
        return {"stragglers": [asdict(one) for one in found]} if found else {}, lines

    def _look_at_links(self) -> list[str]:
        """When communication has become slow: find who is slow to reach other nodes; a line if nobody can be named.

        Processes on CPUs share the cores with others, and may wait longer for those: there only a name is worth a word.
        """
        world = self._world
        if world.size == 1 or (self._is_cpu and len(world.nodes) < 3):
            return []
        more = self._communication.add(self._step, self._data, self._compute)
        if more is None:
            self._slow_links = []
        if more is None or self._slow_links or self._probes == PROBES:
            return []
        self._probes += 1
        best = self._best_exchanges() if len(world.nodes) > 1 else {}
        self._slow_links = [
            SlowLink(rank, world.node_of(rank), COMMUNICATION, speed, usual)
            for rank, speed, usual in slow_processes(best, world.nodes, share=1 / self._slower)
        ]
        if self._slow_links:
            return []
        self._communication.get_used_to_it()
        return [] if self._is_cpu else [nobody_to_name(more, best, world.nodes)]

    def _best_exchanges(self) -> dict[int, float]:
        """Rank -> bytes per second with the faster of its neighbours."""
        best: dict[int, float] = {}
        for _ in self._clock.with_progress(range(EXCHANGES)):  # each is progress
            for rank, speeds in enumerate(measure_exchanges(self._world)):
                if speeds:
                    best[rank] = max(best.get(rank, 0.0), *speeds.values())
        return best


def nobody_to_name(more: float, best: Mapping[int, float], nodes: Sequence[Node]) -> str:
    """That communication takes so many seconds more, and what the links are like. best: bytes per second, by rank."""
    if len(nodes) == 1:
        why = f"all processes are on {nodes[0].name}"
    elif len(nodes) == 2:
        speed = f"{size(int(min(best.values())))}/s"
        why = f"{nodes[0].name} and {nodes[1].name} exchange {speed}, and of two neither is the slow one"
    else:
        why = "no link between nodes is slower than the others"
    return f"SLOWER: communication takes {more:.4f} s a step more than before; {why}"
