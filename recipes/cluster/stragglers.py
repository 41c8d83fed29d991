"""Straggler detection: names the process that the others wait for.

All processes take a step together, so their steps last equally long. What differs is the time each spends on its own,
reading data and computing. The rest is collectives, where the fastest process waits longest, so it identifies none. But
when even the shortest wait is longer than it used to be, the links between nodes are measured, and those do.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from parallel.dist import World
from parallel.nodes import Node
from recipes.cluster.links import measure_exchanges, slow_processes
from recipes.files.units import size
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
NOTICEABLE = 0.1
"""Share of the step: communication that has become slower by less is ignored."""
EXCHANGES = 2
"""Times that links are measured; the fastest counts, since noise only adds time."""
PROBES = 10
"""Most times that links are measured in a run."""
MOST_NAMED = 16
"""Most processes that are named for each phase, the slowest ones."""
PRODUCT = 4096
"""Width of the matrices that a process of a pipeline multiplies on CUDA; that takes a fraction of a millisecond."""
DATA, COMPUTE, COMMUNICATION = "data", "compute", "communication"


@dataclass(frozen=True)
class Straggler:
    """A process that is itself slow, beside the median process."""

    rank: int
    node: str
    phase: str
    value: float
    """Seconds per step (on CUDA, of the part that ComputeTime measures); for COMMUNICATION, bytes per second in each
    direction between it and the faster of its neighbours on other nodes."""
    median: float

    def row(self) -> dict[str, Any]:
        """What metrics.jsonl says of it."""
        unit = "bytes_per_second" if self.phase == COMMUNICATION else "seconds"
        return {"rank": self.rank, "node": self.node, "phase": self.phase, unit: self.value, "median": self.median}

    def __str__(self) -> str:
        who = f"STRAGGLER: rank {self.rank} on {self.node}"
        if self.phase == COMMUNICATION:
            slow, usual = (f"{size(int(speed))}/s" for speed in (self.value, self.median))
            return f"{who} reaches {slow} in {self.phase}, the median process {usual}"
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


class Communication:
    """Whether communication takes longer than it used to in this run.

    Communication is what remains of a step after data and compute, for the process with the smallest remainder: the
    one that the others wait for. On CUDA, compute covers only a part of the computing, so the remainder holds more than
    communication. There only its growth counts, which a GPU that computes more slowly adds to.
    """

    def __init__(self, *, is_all: bool) -> None:
        """is_all: the remainder holds nothing but communication, as on a CPU."""
        self._slower = SLOWER if is_all else 1.0
        self._left, self._steps = deque[float](maxlen=WINDOW), deque[float](maxlen=WINDOW)
        self._usual, self._in_a_row = float("inf"), 0

    def add(self, step: float, left: float) -> float | None:
        """Take in the seconds of a logged step and those of its communication. Returns how many more this takes now, if
        that is slow."""
        self._left.append(left)
        self._steps.append(step)
        if len(self._left) < WINDOW:
            return None
        self._usual = min(self._usual, median(self._left))
        recent = lower_quartile(self._left)
        more = recent - self._usual
        slow = recent > self._slower * self._usual and more > NOTICEABLE * median(self._steps)
        self._in_a_row = self._in_a_row + 1 if slow else 0
        return more if self._in_a_row >= IN_A_ROW else None

    def accept_as_usual(self) -> None:
        """Compare with the present time from now on, until it falls."""
        self._usual, self._in_a_row = median(self._left), 0


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
    All see the same summary, so they start to measure links together without any further agreement.
    """

    def __init__(self, world: World, clock: RunClock, *, stages: int = 1) -> None:
        """stages: processes of a pipeline group, each of which computes something else; on CUDA all time the same."""
        self._world, self._clock = world, clock
        self._is_cpu = world.device.type == "cpu"
        self._slower = SLOWER_ON_CPUS if self._is_cpu else SLOWER
        self._window = deque[tuple[float, float, float]](maxlen=WINDOW)
        stages = stages if self._is_cpu else 1
        self._comparison = Comparison(world.node_of, slower=self._slower, stages=stages)
        self._communication = Communication(is_all=self._is_cpu)
        self._is_warm = False
        self._slow_links, self._probes = list[Straggler](), 0
        self._named: set[tuple[int, str]] = set()
        self._counts = dict[str, int]()

    def counts(self, step: float, data: float, compute: float) -> list[float]:
        """What this process tells the others about a logged step: its seconds per step, and those of its window."""
        if self._is_warm:  # the first step compiles, on whichever process comes first
            self._window.append((step, data, compute))
        return [step, data, step - data - compute, *typical(self._window)]

    def summary(self, rows: Tensor) -> Tensor:
        """What the host needs of the counts of all processes, (processes, numbers), however many they are.

        The median step, the longest wait for data, the least time beside data and compute, and Comparison.summary(). On
        the device that the counts are on, which is not waited for.
        """
        of_step = torch.stack([rows[:, 0].median(), rows[:, 1].amax(), rows[:, 2].amin()])
        return torch.cat([of_step, self._comparison.summary(rows[:, 3:])]) if len(self._window) == WINDOW else of_step

    def compare(self, numbers: Sequence[float]) -> tuple[dict[str, Any], list[str]]:
        """Take in the summary of a logged step, on all ranks: the columns for metrics.jsonl, if any, and lines."""
        step, _, left, *slow = numbers
        stragglers: list[Straggler] = []
        lines: list[str] = []
        before, named = self._counts, self._named
        if slow:
            stragglers, self._counts = self._comparison.read(slow)
        if self._is_warm:
            lines += self._check_links(step, left)
            stragglers += self._slow_links
        self._is_warm = True
        self._named = {(straggler.rank, straggler.phase) for straggler in stragglers}
        many = {phase for phase, count in self._counts.items() if count > MOST_NAMED}
        known = {phase for phase in many if before.get(phase, 0) > MOST_NAMED}  # whose slowest may change every time
        lines += [str(it) for it in stragglers if (it.rank, it.phase) not in named and it.phase not in known]
        lines += [
            f"STRAGGLERS: {self._counts[phase]} processes are slow in {phase}; the {MOST_NAMED} slowest are named"
            for phase in sorted(many - known)
        ]
        return {"stragglers": [straggler.row() for straggler in stragglers]} if stragglers else {}, lines

    def _check_links(self, step: float, left: float) -> list[str]:
        """Find the process with the slow link when communication has become slow; a line if none can be named.

        Processes on CPUs share their cores with others and may wait for those, so only a name is logged there.
        """
        world = self._world
        if world.size == 1 or (self._is_cpu and len(world.nodes) < 3):
            return []
        more = self._communication.add(step, left)
        if more is None:
            self._slow_links = []
        if more is None or self._slow_links or self._probes == PROBES:
            return []
        self._probes += 1
        best = self._best_exchanges() if len(world.nodes) > 1 else {}
        slow = [
            Straggler(rank, node, COMMUNICATION, speed, usual)
            for rank, node, speed, usual in slow_processes(best, world.nodes, share=1 / self._slower)
        ]
        self._slow_links = world.messages.from_main(slow)
        if self._slow_links:
            return []
        self._communication.accept_as_usual()
        return [] if self._is_cpu or not world.is_main else [no_culprit_line(more, best, world.nodes)]

    def _best_exchanges(self) -> dict[int, float]:
        """Rank -> bytes per second with the faster of its neighbours; on rank 0 alone."""
        best: dict[int, float] = {}
        for _ in self._clock.with_progress(range(EXCHANGES)):  # each counts as progress
            for rank, speeds in enumerate(measure_exchanges(self._world)):
                if speeds:
                    best[rank] = max(best.get(rank, 0.0), *speeds.values())
        return best


def no_culprit_line(more: float, best: Mapping[int, float], nodes: Sequence[Node]) -> str:
    """Communication takes `more` seconds longer and no process can be named. best: bytes per second, by rank."""
    if len(nodes) == 1:
        why = f"all processes are on {nodes[0].name}"
    elif len(nodes) == 2:
        speed = f"{size(int(min(best.values())))}/s"
        why = f"{nodes[0].name} and {nodes[1].name} exchange {speed}, and with two nodes neither can be named"
    else:
        why = "no link between nodes is slower than the others"
    return f"SLOWER: communication takes {more:.4f} s a step more than before; {why}"
