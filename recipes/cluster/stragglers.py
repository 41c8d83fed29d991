"""Straggler detection: names the process that the others wait for.

All processes take a step together, so their steps last equally long. What differs is the time each spends on its own,
reading data and computing. The rest is collectives, where the fastest process waits longest, so it identifies none.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from parallel.dist import World
from recipes.metrics.clock import RunClock

WINDOW = 15
"""Logged steps that are compared, by their lower quartile: noise only adds time, and a straggler is slow in most."""
IN_A_ROW = 4
"""Consecutive logged steps at which a process must be too slow before it is named."""
SLOWER = 1.3
"""Multiple of the median process's seconds above which a process is slow."""
SLOWER_ON_CPUS = 2.0
"""The same on CPUs, whose cores other programs use, too: sharing one makes a process about a third slower."""
MATTERS = 0.05
"""Share of the step: shorter waits for data are not reported."""
MOST_NAMED = 16
"""Most processes that are named for each phase, the slowest ones."""
PRODUCT = 4096
"""Width of the matrices that a process of a pipeline multiplies on CUDA; that takes a fraction of a millisecond."""
DATA, COMPUTE = "data", "compute"


@dataclass(frozen=True)
class Straggler:
    """A process that is itself slow, beside the median process."""

    rank: int
    node: str
    phase: str
    value: float
    """Seconds per step; on CUDA, of the part that ComputeTime measures."""
    median: float

    def row(self) -> dict[str, Any]:
        """What metrics.jsonl says of it."""
        facts = {"rank": self.rank, "node": self.node, "phase": self.phase}
        return facts | {"seconds": self.value, "median": self.median}

    def __str__(self) -> str:
        who = f"STRAGGLER: rank {self.rank} on {self.node}"
        return f"{who} takes {self.value:.4f} s for {self.phase}, the median process {self.median:.4f} s"


def typical(steps: Collection[tuple[float, float, float]]) -> list[float]:
    """The lower quartiles of data and compute, and the median of steps, of logged steps' (step, data, compute); zeros
    without any."""
    if not steps:
        return [0.0] * 3
    step, data, compute = zip(*steps, strict=True)
    return [lower_quartile(data), lower_quartile(compute), median(step)]


class Comparison:
    """Finds slow processes from what all of them tell about their windows, with operators of the tensors' device."""

    def __init__(self, node_of: Callable[[int], str], *, slower: float = SLOWER, stages: int = 1) -> None:
        """
        Args:
            node_of: rank -> name of its node.
            slower: a process is slow above this multiple of the median.
            stages: of a pipeline. Compute is compared inside each of them, as their work differs; data among all
                processes, as all stages read. Neighbouring ranks are of one stage.
        """
        self._node_of, self._slower, self._stages = node_of, slower, stages
        self._in_a_row: Tensor | int = 0  # logged steps, (processes, phases)

    def summary(self, rows: Tensor) -> Tensor:
        """Take in the typical times of a logged step of all processes, (processes, 3), whose windows are full.

        Returns what the host needs, for each phase: how many stragglers there are, the ranks of the slowest of them,
        their seconds, and those of the median processes that they are compared with.
        """
        seconds, step = rows[:, :2], rows[:, 2].median()
        # Of two processes the faster one. Sorted, because run.deterministic refuses a median along an axis on GPUs.
        usual = seconds.sort(0).values[(len(seconds) - 1) // 2].expand_as(seconds).clone()
        of_stages = usual[:, 1].view(self._stages, -1)
        of_stages.copy_(seconds[:, 1].reshape_as(of_stages).sort(1).values[:, (of_stages.shape[1] - 1) // 2, None])
        slow = seconds > self._slower * usual
        slow[:, 0] &= seconds[:, 0] - usual[:, 0] > MATTERS * step
        self._in_a_row = (self._in_a_row + 1) * slow
        named = self._in_a_row >= IN_A_ROW
        worst = torch.where(named, seconds, -1.0).topk(min(MOST_NAMED, len(rows)), dim=0)  # (named, phases)
        medians = usual.gather(0, worst.indices)
        return torch.cat([named.sum(0)[None], worst.indices, worst.values, medians]).t().flatten()

    def read(self, numbers: Sequence[float]) -> tuple[list[Straggler], dict[str, int]]:
        """(the stragglers of the summary by rank, phase -> how many there are)."""
        stragglers: list[Straggler] = []
        counts, half = {}, len(numbers) // 2
        for phase, part in ((DATA, numbers[:half]), (COMPUTE, numbers[half:])):
            count, *worst = part
            counts[phase], places = int(count), len(worst) // 3
            named = sorted(zip(worst[:places], worst[places : 2 * places], worst[2 * places :], strict=True))
            slow = [(int(rank), seconds, usual) for rank, seconds, usual in named if seconds >= 0]
            stragglers += [Straggler(rank, self._node_of(rank), phase, seconds, usual) for rank, seconds, usual in slow]
        return stragglers, counts


def lower_quartile(values: Collection[float]) -> float:
    """The value that a quarter of them are below."""
    return sorted(values)[len(values) // 4]


class ComputeTime:
    """How long this process computes, without its waits for others.

    On a CPU: processor time of the main thread, per step; a wait in a collective takes none. On CUDA: the device's time
    for the output projection of the last micro-batch, which stands for the rest of the step. It is the longest piece
    of a step that no collective interrupts on any mesh: with tensor parallelism the projection's input is gathered
    before it and the loss sums over processes after it, as blocks do in their middle, and an untied head's weight is
    gathered just before it, too. (A head in tensorwise float8 with tensor parallelism would sum its scales.) In a
    pipeline only the last stage has a head, and every process times a product of its own behind the step instead.
    """

    def __init__(self, clock: RunClock, device: torch.device, *, head: nn.Module | None) -> None:
        """head: the output projection, as parallelize() has left it; None in a pipeline."""
        self._clock, self._cuda, self._has_head = clock, device.type == "cuda", head is not None
        if self._cuda:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self._cuda and head is not None:
            around(head, self._begin.record, self._end.record)

    def seconds(self) -> float:
        """Seconds of the last step on CUDA, after a wait for the device; else the mean since the last logged step."""
        if not self._cuda:
            return self._clock.worked_per_step()
        if not self._has_head:
            values = torch.ones(PRODUCT, PRODUCT, dtype=torch.bfloat16, device="cuda")
            self._begin.record()
            values @ values
            self._end.record()
        torch.cuda.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3


def around(head: nn.Module, begin: Callable[[], object], end: Callable[[], object]) -> None:
    """Call `begin` when the inputs of this module have arrived, and `end` after its last operator.

    Call this after parallelize(): its hooks ask other processes for the inputs, and run first.
    """

    def before(module: nn.Module, inputs: Any) -> None:  # what a hook returns would replace the module's inputs
        begin()

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        end()

    head.register_forward_pre_hook(before)
    head.register_forward_hook(after)


class Stragglers:
    """Compares all processes at logged steps, from numbers that travel in the same message as the loss.

    Each process sends what it needs of its own window; of all of them, only a summary of constant size reaches a host.
    """

    def __init__(self, world: World, clock: RunClock, *, stages: int = 1) -> None:
        """stages: processes of a pipeline group, each of which computes something else; on CUDA all time the same."""
        is_cpu = world.device.type == "cpu"
        self._window = deque[tuple[float, float, float]](maxlen=WINDOW)
        slower, stages = (SLOWER_ON_CPUS, stages) if is_cpu else (SLOWER, 1)
        self._comparison = Comparison(world.node_of, slower=slower, stages=stages)
        self._is_warm = False
        self._named: set[tuple[int, str]] = set()
        self._counts = dict[str, int]()

    def counts(self, step: float, data: float, compute: float) -> list[float]:
        """What this process tells the others about a logged step: its wait for data, and the times of its window."""
        if self._is_warm:  # the first step compiles, on whichever process comes first
            self._window.append((step, data, compute))
        return [data, *typical(self._window)]

    def summary(self, rows: Tensor) -> Tensor:
        """What the host needs of the counts of all processes, (processes, numbers), however many they are.

        The longest wait for data, and Comparison.summary(). On the device that the counts are on, which is not waited
        for.
        """
        longest = rows[:, :1].amax(0)
        return torch.cat([longest, self._comparison.summary(rows[:, 1:])]) if len(self._window) == WINDOW else longest

    def compare(self, numbers: Sequence[float]) -> tuple[dict[str, Any], list[str]]:
        """Take in the summary of a logged step, on all ranks: the columns for metrics.jsonl, if any, and lines."""
        _, *slow = numbers
        stragglers: list[Straggler] = []
        before, named = self._counts, self._named
        if slow:
            stragglers, self._counts = self._comparison.read(slow)
        self._is_warm = True
        self._named = {(straggler.rank, straggler.phase) for straggler in stragglers}
        many = {phase for phase, count in self._counts.items() if count > MOST_NAMED}
        known = {phase for phase in many if before.get(phase, 0) > MOST_NAMED}  # whose slowest may change every time
        lines = [str(it) for it in stragglers if (it.rank, it.phase) not in named and it.phase not in known]
        lines += [
            f"STRAGGLERS: {self._counts[phase]} processes are slow in {phase}; the {MOST_NAMED} slowest are named"
            for phase in sorted(many - known)
        ]
        return {"stragglers": [straggler.row() for straggler in stragglers]} if stragglers else {}, lines
