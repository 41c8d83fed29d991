"""Tests of the network between the processes: exactness and speed of collectives, and differences of clocks.

And what a plan needs of a machine: the speed of messages along each axis of the mesh, of which two sizes tell latency
and bandwidth apart, and of one product on each GPU. environment.json keeps it, and `--plan --calibrated-by` reads it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.dist import World, all_gather_single, wait_for
from parallel.mesh import Mesh
from parallel.nodes import Node
from recipes.files.units import size

BUFFER = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}
"""Bytes per message: enough to reach the full speed of a link, little compared with a model."""
REPEATS = {"cuda": 10, "cpu": 3}
MOST_ROUNDS = 7
"""Rounds of exchanges along an axis: all pairs in groups of up to 8, some pairs of each process in larger ones."""

Pair = tuple[int, int]
"""Ranks, the lower one first."""


@dataclass(frozen=True)
class Links:
    """What one process measured."""

    wrong_sum: bool
    """Whether its all-reduce returned wrong numbers."""
    wrong_parts: tuple[int, ...]
    """Ranks whose part of the all-gather arrived wrong."""
    all_reduce_seconds: float
    all_gather_seconds: float
    exchanges: dict[int, float]
    """Rank on a neighbouring node -> bytes per second in each direction between it and this rank."""
    inside: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Axis of the mesh -> rank in this one's group along it -> the same."""


def clock_bounds(world: World) -> tuple[float, float]:
    """The least and the most seconds that this process's clock can be ahead of rank 0's. Every process must call it.

    No process leaves a barrier before all have entered it. So each process's time of entry is before every other's time
    of leaving. The bounds hold whatever the delays are, and are as wide as the network is slow.
    """
    stamps = []
    for _ in range(4):
        entered = time.time()
        world.messages.barrier()
        stamps.append((entered, time.time()))
    pairs = list(zip(stamps, world.messages.from_main(stamps), strict=True))
    least = max(entered - left for (entered, _), (_, left) in pairs)
    most = min(left - entered for (_, left), (entered, _) in pairs)
    return least, most


def measure_links(world: World, groups: Mapping[str, Sequence[Sequence[int]]] | None = None) -> Links:
    """This process's measurements. Every process must call it; it takes a second or less.

    groups: axis of the mesh -> the ranks of each group along it, whose links are measured, too; see groups_along().
    """
    mine = _measured(world, groups or {})
    forget_memory(world.device)
    return mine


def _measured(world: World, groups: Mapping[str, Sequence[Sequence[int]]]) -> Links:
    device = world.device
    length = BUFFER[device.type] // 4
    part = length // world.size
    reduced = summand(world.rank, length, device)
    dist.all_reduce(reduced)
    own, gathered = contribution(world.rank, part, device), torch.empty(part * world.size, device=device)
    all_gather_single(gathered, own)
    wrong_sum, wrong_parts = is_wrong_sum(reduced, world.size), wrong_ranks(gathered, world.size)
    reduced.zero_()  # the repeated sums below must not overflow
    return Links(
        wrong_sum,
        wrong_parts,
        mean_seconds(world, lambda: dist.all_reduce(reduced)),
        mean_seconds(world, lambda: all_gather_single(gathered, own)),
        _exchange(world, reduced, rounds(world.nodes)),
        {
            axis: _exchange(world, reduced, pairings([ranks for ranks in of_axis if world.rank in ranks]))
            for axis, of_axis in groups.items()
        },
    )


def forget_memory(device: torch.device) -> None:
    """Let the run's statistics of memory start after measurements."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def slow_processes(
    best: Mapping[int, float], nodes: Sequence[Node], *, share: float
) -> Iterator[tuple[int, str, float, float]]:
    """(rank, its node's name, its speed, the median speed) of ranks that reach less than `share` of the median.

    best: rank -> its fastest exchange, if it has any. Empty with fewer than three nodes: of two, either may be slow.
    """
    if len(nodes) < 3 or not best:
        return
    usual = median(best.values())
    for node in nodes:
        for rank in node.ranks:
            if best.get(rank, usual) < share * usual:
                yield rank, node.name, best[rank], usual


def groups_along(*, pipeline: int = 1, context: int, tensor: int, processes: int) -> dict[str, list[range]]:
    """The groups in which activations travel, by axis; none for a mesh that does not fit, which others refuse."""
    if processes % (pipeline * context * tensor):
        return {}
    # How many are in a group, and how far apart neighbours in it are.
    axes = {"pipeline": (pipeline, processes // pipeline), "tensor": (tensor, 1), "context": (context, tensor)}
    return {
        axis: [range(rank, rank + size * stride, stride) for rank in range(processes) if rank // stride % size == 0]
        for axis, (size, stride) in axes.items()
        if size > 1
    }


def slow_pairs(links: Sequence[Links], nodes: Sequence[Node], *, share: float) -> Iterator[tuple[str, str]]:
    """(node, which process or pairs in groups along an axis are slow): they have less than `share` of the usual speed.

    Usual is the upper quartile, since half of all pairs may cross between islands of NVLink. Pairs inside nodes are
    compared with each other, and so are pairs of two nodes.
    """
    node_of = {rank: node.name for node in nodes for rank in node.ranks}
    for axis in sorted({axis for link in links for axis in link.inside}):
        inside, between = dict[Pair, float](), dict[Pair, float]()
        for one, link in enumerate(links):
            for other, speed in link.inside[axis].items():
                if one < other:
                    side = inside if node_of[one] == node_of[other] else between
                    side[one, other] = min(speed, links[other].inside[axis][one])
        slow: dict[Pair, str] = {}  # how slow
        for side in (inside, between):
            usual = sorted(side.values())[len(side) * 3 // 4] if side else 0.0
            slow |= {pair: _than(speed, usual) for pair, speed in side.items() if speed < share * usual}
        speeds = inside | between
        by_rank: dict[int, list[Pair]] = {}
        for pair in slow:
            for rank in pair:
                by_rank.setdefault(rank, []).append(pair)
        alone = {rank for rank, own in by_rank.items() if 1 < len(own) == len(links[rank].inside[axis])}
        for rank in sorted(alone):
            best = slow[max(by_rank[rank], key=speeds.__getitem__)]
            yield node_of[rank], f"rank {rank} exchanges {best} with all of its {axis} group"
        by_node: dict[str, list[Pair]] = {}
        for pair in sorted(slow, key=lambda pair: (speeds[pair], pair)):
            if not alone & {*pair}:
                by_node.setdefault(node_of[pair[0]], []).append(pair)
        for name, (pair, *others) in by_node.items():
            more = f"; {len(others)} more are slow" if others else ""
            yield name, f"ranks {pair[0]} and {pair[1]} of a {axis} group exchange {slow[pair]}{more}"


def _than(speed: float, usual: float) -> str:
    return f"{size(int(speed))}/s (others reach {size(int(usual))}/s)"


def summand(rank: int, length: int, device: torch.device) -> Tensor:
    """A rank's input to all-reduce: integers whose sum over thousands of ranks is exact in float32 in any order."""
    return _pattern(length, device) * (rank % 61 + 1)


def is_wrong_sum(reduced: Tensor, ranks: int) -> bool:
    """Whether this differs from the sum of all ranks' summands."""
    weights = sum(rank % 61 + 1 for rank in range(ranks))
    return not torch.equal(reduced, _pattern(len(reduced), reduced.device) * weights)


def contribution(rank: int, length: int, device: torch.device) -> Tensor:
    """A rank's input to all-gather: integers that differ between ranks."""
    return _pattern(length, device) + 8 * rank


def wrong_ranks(gathered: Tensor, ranks: int) -> tuple[int, ...]:
    """Ranks whose contribution arrived changed."""
    rows = gathered.view(ranks, -1)
    numbers = torch.arange(ranks, device=rows.device)[:, None]  # exact in float32, as the products are
    wrong = (rows != _pattern(rows.shape[1], rows.device) + 8 * numbers).any(dim=1)
    return tuple(wrong.nonzero().flatten().tolist())


def _pattern(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, dtype=torch.float32, device=device).remainder_(7).add_(1)  # BUFFER holds 2^24 at most


def mean_seconds(world: World, work: Callable[[], object]) -> float:
    """Mean time of one of several calls in a row, after all processes are connected."""
    work()
    _finish(world.device)
    world.messages.barrier()
    begin = time.perf_counter()
    for _ in range(REPEATS[world.device.type]):
        work()
    _finish(world.device)
    return (time.perf_counter() - begin) / REPEATS[world.device.type]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _exchange(world: World, buffer: Tensor, plan: Sequence[Mapping[int, int]]) -> dict[int, float]:
    """Swap the buffer with this process's partner of each round. Returns bytes per second, by partner."""
    speeds = {}
    received = torch.empty_like(buffer)
    for partners in plan:
        partner = partners.get(world.rank)
        seconds = mean_seconds(world, partial(_swap, buffer, received, partner))
        if partner is not None:
            speeds[partner] = buffer.nbytes / seconds
    return speeds


def rounds(nodes: Sequence[Node]) -> list[dict[int, int]]:
    """The partner of each rank, of the same local rank on a neighbouring node, for each round of exchanges.

    Nodes form a ring and exchange with one neighbour at a time: only a slow node is slow with both of its neighbours.
    """
    count = len(nodes)
    by_round: list[dict[int, int]] = [{}, {}, {}]
    for edge in range(count if count > 2 else count - 1):
        number = 2 if count % 2 and edge == count - 1 else edge % 2  # a ring of odd length takes a third round
        for one, other in zip(nodes[edge].ranks, nodes[(edge + 1) % count].ranks, strict=False):
            by_round[number] |= {one: other, other: one}
    return [partners for partners in by_round if partners]


def pairings(groups: Sequence[Sequence[int]]) -> list[dict[int, int]]:
    """The partner of each rank, for each round of exchanges, at most MOST_ROUNDS. Groups have one size."""
    places = len(groups[0]) + len(groups[0]) % 2  # of an odd number, one member rests in each round
    by_round: list[dict[int, int]] = []
    for turn in range(places - 1)[:MOST_ROUNDS]:
        seats = [places - 1, *((turn + seat) % (places - 1) for seat in range(places - 1))]  # the last one stays
        by_round.append({})
        for seat in range(places):
            one, other = seats[seat], seats[-1 - seat]
            by_round[-1] |= {group[one]: group[other] for group in groups if max(one, other) < len(group)}
    return by_round


def _swap(buffer: Tensor, received: Tensor, partner: int | None) -> None:
    if partner is None:
        return
    operations = [dist.P2POp(dist.isend, buffer, partner), dist.P2POp(dist.irecv, received, partner)]
    for work in dist.batch_isend_irecv(operations):
        wait_for(work)


# What a plan needs.

SIZES = {"cuda": (2**20, 2**26), "cpu": (2**16, 2**21)}
"""Bytes that all members of a group have together: little, and enough to reach the full speed of a link."""
SIDE = {"cuda": 8192, "cpu": 128}
"""Rows and columns of the matrices that are multiplied: on a GPU more than a millisecond of work."""
SLOW = 0.9
"""Warn of a GPU that multiplies at less than this share of the median speed: all others wait for it."""

Seconds = dict[str, list[float]]
"""Collective -> its seconds at each of SIZES."""


def measure_axes(world: World, mesh: Mesh) -> dict[str, Any]:
    """The measurements for environment.json; those of products on rank 0 alone. Every process must call it; it takes a
    second."""
    links = []
    for axis, (group, stride) in _groups(mesh).items():
        slowest = world.messages.from_main(world.messages.reduce(_messages(world, group), _slower))
        sizes = SIZES[world.device.type]
        links.append(
            {"axis": axis, "processes": group.size(), "stride": stride, "per_node": len(world.nodes[0].ranks)}
            | {name: [list(pair) for pair in zip(sizes, seconds, strict=True)] for name, seconds in slowest.items()}
        )
    side = SIDE[world.device.type]
    kind = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    product = partial(torch.matmul, *(torch.ones(side, side, dtype=kind, device=world.device) for _ in range(2)))
    products = world.messages.to_main(mean_seconds(world, product)) or []
    del product
    forget_memory(world.device)
    return {"nodes": len(world.nodes), "links": links, "products": {"flops": 2 * side**3, "seconds": products}}


def summary(measured: dict[str, Any], world: World) -> Iterator[str]:
    """Lines for the log: each axis's bandwidth and latency, and on GPUs those that multiply slowly."""
    for link in measured["links"]:
        (less, sooner), (more, later) = link["all_gather"]
        share = (link["processes"] - 1) / link["processes"]
        yield (
            f"pre-flight: {link['axis']} axis of {link['processes']}: all-gather {size(int(share * more / later))}/s,"
            f" {1e6 * sooner:.0f} us for {size(less)}"
        )
    if world.device.type == "cuda" and world.is_main:
        yield from slow_products(measured["products"]["seconds"], measured["products"]["flops"])


def slow_products(seconds: Sequence[float], flops: float) -> Iterator[str]:
    """A line for each rank that multiplies more slowly than the others."""
    usual = median(seconds)
    for rank, own in enumerate(seconds):
        if usual < SLOW * own:
            yield (
                f"  rank {rank} multiplies matrices at {flops / own / 1e12:.0f} TFLOP/s, the median is"
                f" {flops / usual / 1e12:.0f}; all processes wait for it: nvidia-smi -q -d PERFORMANCE says why"
            )


def _groups(mesh: Mesh) -> dict[str, tuple[ProcessGroup, int]]:
    """Axes with several processes: their groups, and how far apart neighbours in them are."""
    degrees = mesh.degrees
    inner = degrees.tensor * degrees.context * degrees.shard
    groups = {
        "shard": (mesh.fsdp.get_group(mesh.fsdp.ndim - 1), degrees.tensor),
        "replicate": (mesh.replicate_group, inner),
    }
    if mesh.context is not None:
        groups["context"] = (mesh.context.get_group(), degrees.tensor)
    if mesh.tensor is not None:
        groups["tensor"] = (mesh.tensor.get_group(), 1)
    return {axis: (group, stride) for axis, (group, stride) in groups.items() if group.size() > 1}


def _messages(world: World, group: ProcessGroup) -> Seconds:
    """Seconds of both collectives, by size."""
    seconds: Seconds = {"all_gather": [], "reduce_scatter": []}
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name from torch 2.13 on
    for amount in SIZES[world.device.type]:
        part = torch.zeros(amount // 4 // group.size(), device=world.device)
        whole = torch.zeros(len(part) * group.size(), device=world.device)
        seconds["all_gather"].append(mean_seconds(world, partial(all_gather_single, whole, part, group=group)))
        seconds["reduce_scatter"].append(mean_seconds(world, partial(reduce_scatter, part, whole, group=group)))
    return seconds


def _slower(one: Seconds, other: Seconds) -> Seconds:
    """The longer time of each message."""
    return {name: list(map(max, one[name], other[name])) for name in one}
