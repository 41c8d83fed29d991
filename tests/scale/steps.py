"""What rank 0's host does for each logged step, each vote on signals, pre-flight and the check before a save."""

import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch

from parallel.dist import World
from parallel.messages import FRAME, Channel, Messages, children_of, packed, unpacked
from parallel.nodes import FEW, Node, arrange
from parallel.state_check import _first_lines
from recipes.cluster.findings import Measured, Room, report, wrong_results
from recipes.cluster.links import Links
from recipes.cluster.preflight import differences
from recipes.cluster.stragglers import WINDOW, Stragglers
from recipes.metrics.clock import RunClock
from recipes.metrics.memory import FAILURES, PEAK, RESERVED, RETRIES, GpuMemory

Value = TypeVar("Value")

CPU = torch.device("cpu")
PER_NODE = 8
TENSORS = 1000
"""Weights and moments of a model of 36 layers, by name."""
GB = 10**9


def counts(ranks: int) -> dict[str, float]:
    """What it is -> the number, for a cluster of so many processes, eight to a node."""
    return _logged_step(ranks) | _vote(ranks) | _preflight(ranks) | _check(ranks)


def _nodes(ranks: int) -> tuple[Node, ...]:
    return arrange([(f"gpu-{rank // PER_NODE:04d}", 0) for rank in range(ranks)])


def _logged_step(ranks: int) -> dict[str, float]:
    world = World(0, ranks, CPU, cast(Messages, None), _nodes(ranks))  # nothing is sent
    stragglers = Stragglers(world, RunClock(CPU))
    counts = {RETRIES: 0, FAILURES: 0, PEAK: 60 * GB, RESERVED: 70 * GB}
    memory = GpuMemory(world, lambda: counts, {"gpu_utilization": lambda: 1.0, "gpu_power_watts": lambda: 600.0})
    times = 1.0, 0.01, 0.6
    stragglers.compare(stragglers.summary(torch.zeros(ranks, len(stragglers.counts(*times)))).tolist())
    for _ in range(WINDOW):
        own = [*stragglers.counts(*times), *memory.counts()]
    split = len(own) - len(memory.counts())
    rows = torch.tensor(own, dtype=torch.float64) * (1 + torch.rand(ranks, 1, dtype=torch.float64) / 100)
    parts = [stragglers.summary(rows[:, :split]), memory.summary(rows[:, split:])]
    numbers = torch.cat(parts).tolist()
    stragglers.compare(numbers[: len(parts[0])])
    memory.compare(numbers[len(parts[0]) :])
    return {"logged step: numbers that each host reads": 1 + len(numbers)}  # the loss, too


def _vote(ranks: int) -> dict[str, float]:
    neighbours = children_of(0, ranks)
    frame = sum(part.numel() for part in packed(int(Channel.VOTES)))
    assert frame == FRAME
    return {
        "vote on signals: messages one after the other": _up(0, ranks) + _down(0, ranks),
        "vote on signals: messages through rank 0's host": 2 * len(neighbours),
        "vote on signals: bytes through rank 0's host": 2 * len(neighbours) * frame,
    }


def _up(rank: int, ranks: int) -> int:
    """Messages, one after the other, until this rank has heard from all below it; it takes one at a time."""
    done = 0
    for child in children_of(rank, ranks):
        done = max(done, _up(child, ranks)) + 1
    return done


def _down(rank: int, ranks: int) -> int:
    """Messages, one after the other, until all below this rank have heard from it; it sends one at a time."""
    children = children_of(rank, ranks)
    return max((sent + _down(child, ranks) for sent, child in enumerate(children, 1)), default=0)


def _at_main(values: Sequence[Value], merge: Callable[[Value, Value], Value]) -> tuple[Value, int]:
    """Along the tree of messages: what rank 0 has at the end, and the bytes that reach it."""

    def merged(rank: int) -> Value:
        value = values[rank]
        for child in children_of(rank, len(values)):
            value = merge(value, merged(child))
        return value

    received = [packed(merged(child)) for child in children_of(0, len(values))]
    value = values[0]
    for frame in received:
        value = merge(value, unpacked(frame))
    return value, sum(part.numel() for frame in received for part in frame)


def _preflight(ranks: int) -> dict[str, float]:
    nodes = _nodes(ranks)
    values = ("0" * 8, "1" * 8, "3.12.3", "2.13.0", "0.18", "13.0", "2.29.3", "580.65", "NVIDIA H100 80GB HBM3")
    content = pickle.dumps({0: values})  # of which each process has its own
    facts, first_bytes = _at_main([{rank: pickle.loads(content)[0]} for rank in range(ranks)], _both)
    everyone, bytes_in = _at_main([{rank: _measured(rank, ranks)} for rank in range(ranks)], _both)
    by_rank = [everyone[rank] for rank in range(ranks)]

    assert not differences([facts[rank] for rank in range(ranks)], nodes)
    assert not wrong_results([each.links for each in by_rank], nodes)
    report(by_rank, nodes, device="cuda")
    return {"pre-flight: bytes to rank 0's host": first_bytes + bytes_in}


def _both(one: dict[int, Value], other: dict[int, Value]) -> dict[int, Value]:
    return one | other


def _measured(rank: int, ranks: int) -> Measured:
    """What a process of a mesh with tensor groups of a node's size finds where all is well."""
    room = Room(80 * GB, 79 * GB - rank % 5, 10**12 + rank, 10**15, 10**11 + rank)
    group = range(rank - rank % PER_NODE, rank - rank % PER_NODE + PER_NODE)
    neighbours = {(rank + PER_NODE) % ranks, (rank - PER_NODE) % ranks} - {rank}
    inside = {other: 3e11 + rank + other for other in group if other != rank}
    links = Links(False, (), 0.01, 0.01, {other: 4.5e10 + other for other in neighbours}, {"tensor": inside})
    return Measured(room, (-0.001, 0.001), links)


def _check(ranks: int) -> dict[str, float]:
    """With one copy of the model on each node."""
    lines = [(0, 0, n, f"model.layers.{n}.weight has NaN or infinite values on rank 0 on gpu") for n in range(TENSORS)]
    own = _first_lines(([], 0), (lines, TENSORS))

    (kept, _), bytes_in = _at_main([own] * ranks, _first_lines)
    assert len(kept) == FEW
    return {"NaN everywhere: bytes to rank 0's host": bytes_in}
