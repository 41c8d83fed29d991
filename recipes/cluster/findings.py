"""What rank 0 makes of all processes' measurements before the first step: wrong results, warnings and a table."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.nodes import Node, abbreviated
from recipes.cluster.links import BUFFER, Links, slow_pairs, slow_processes
from recipes.files.units import size

CLOCK_SECONDS = 5.0
"""Warn when clocks are further apart: file times and log lines of two nodes no longer compare."""
TEMPORARY_BYTES = 10**9
"""Warn when the folder for temporary files has less free space: torch.compile writes there."""
OCCUPIED = 0.05
"""Warn when a GPU has this share of its memory less free than the others: another process is probably using it."""
SLOW = 0.5
"""Warn when a process reaches less than this share of the median speed between nodes."""
MOST_ROWS = 16
"""Most rows of the table."""


@dataclass(frozen=True)
class Room:
    """The memory and the disks that one process found on its node, in bytes. None: not present, or not visible."""

    device: int | None
    """Total memory of the GPU."""
    free_device: int | None
    free_host: int | None
    free_disk: int | None
    """Free bytes on the file system of the run's folder."""
    free_temporary: int | None


class Measured(NamedTuple):
    """What one process measured."""

    room: Room
    clock: tuple[float, float]
    """The least and most seconds that its clock is ahead of rank 0's."""
    links: Links


def report(everyone: Sequence[Measured], nodes: Sequence[Node], *, device: str) -> list[str]:
    """The speed of the network, a table of several nodes, and what is unusual. everyone: by rank, as below."""
    links, warnings = [each.links for each in everyone], list(node_warnings(everyone, nodes))
    if device == "cuda":  # processes on CPUs share cores, so their speeds vary
        warnings += [*slow_links(links, nodes), *slow_pairs(links, nodes, share=SLOW)]
    lines = table(everyone, nodes, always=[name for name, _ in warnings]) if len(nodes) > 1 else []
    return [speeds(links, BUFFER[device]), *lines, *(f"{name}: {what}" for name, what in warnings)]


def wrong_results(links: Sequence[Links], nodes: Sequence[Node]) -> list[str]:
    """One line per collective and node with wrong numbers, and what to do."""
    name_of = {rank: node.name for node in nodes for rank in node.ranks}
    lines = []
    if summed := sorted({name_of[rank] for rank, link in enumerate(links) if link.wrong_sum}):
        lines.append(f"all-reduce: wrong on {abbreviated(summed)}")
    by_source: dict[str, set[str]] = {}
    for rank, link in enumerate(links):
        for source in link.wrong_parts:
            by_source.setdefault(name_of[source], set()).add(name_of[rank])
    lines += [f"all-gather: what {name} sends is wrong on {abbreviated(sorted(to))}" for name, to in by_source.items()]
    if lines:
        lines.append("exclude these nodes (sbatch --exclude), and have their memory, GPUs and network tested")
    return lines


def speeds(links: Sequence[Links], size_bytes: int) -> str:
    """The collectives' bus bandwidth, as nccl-tests defines it, and the speed of the slowest pair along each axis."""
    ranks = len(links)
    reduce_seconds = max(link.all_reduce_seconds for link in links)
    gather_seconds = max(link.all_gather_seconds for link in links)
    moved = size_bytes * (ranks - 1) / ranks
    said = [f"all-reduce {size(int(2 * moved / reduce_seconds))}/s, all-gather {size(int(moved / gather_seconds))}/s"]
    for axis in links[0].inside:
        slowest = min(speed for link in links for speed in link.inside[axis].values())
        said.append(f"in {axis} groups {size(int(slowest))}/s")
    return ", ".join(said)


def node_warnings(everyone: Sequence[Measured], nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """(node, what is unusual about it). Only warnings: what a run needs is known only later."""
    rooms = [each.room for each in everyone]
    free = [room.free_device for room in rooms if room.free_device is not None]
    usual = statistics.median(free) if free else 0
    for node in nodes:
        for rank in node.ranks:
            room = rooms[rank]
            if room.free_device is not None and room.free_device < usual - OCCUPIED * (room.device or 0):
                yield (
                    node.name,
                    f"rank {rank} has {size(room.free_device)} of GPU memory free, the median is {size(int(usual))}"
                    "; is another process using it? nvidia-smi lists them",
                )
        temporary = [some for rank in node.ranks if (some := rooms[rank].free_temporary) is not None]
        if temporary and (least_free := min(temporary)) < TEMPORARY_BYTES:
            yield node.name, f"the folder for temporary files has {size(least_free)} free; set TMPDIR to use another"
        least, most = everyone[node.ranks[0]].clock
        if least > CLOCK_SECONDS or most < -CLOCK_SECONDS:
            yield (
                node.name,
                f"its clock is {_offset(least, most)} from that of {nodes[0].name}; file times and log lines do not"
                " compare, so synchronize it (NTP)",
            )


def slow_links(links: Sequence[Links], nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """(node, which of its processes is slow to reach other nodes)."""
    best = {rank: max(link.exchanges.values()) for rank, link in enumerate(links) if link.exchanges}
    for rank, node, speed, usual in slow_processes(best, nodes, share=SLOW):
        yield (
            node,
            f"rank {rank} reaches {size(int(speed))}/s to its neighbours, the median is {size(int(usual))}/s; all"
            " processes wait for the slowest",
        )


def _least(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    return size(min(known)) if known else ""


def table(everyone: Sequence[Measured], nodes: Sequence[Node], *, always: Sequence[str]) -> list[str]:
    """A row for each node, with the worst value of its processes.

    always: nodes that get a row even if there are more than MOST_ROWS; the rest then share one row of minima.
    """
    chosen = [node for node in nodes if len(nodes) <= MOST_ROWS or node.name in always][:MOST_ROWS]
    minima = Node(f"least of {len(nodes)}", tuple(rank for node in nodes for rank in node.ranks))
    rows = [["node", "ranks", "GPU free", "host free", "disk free", "tmp free", "clock", "to the next"]]
    for node in [*chosen, *([minima] if len(chosen) < len(nodes) else [])]:
        free = ("free_device", "free_host", "free_disk", "free_temporary")
        rooms, clocks, links = zip(*(everyone[rank] for rank in node.ranks), strict=True)
        sent = [speed for link in links for speed in link.exchanges.values()]
        rows.append(
            [
                node.name,
                f"{node.ranks[0]}-{node.ranks[-1]}" if len(node.ranks) > 1 else str(node.ranks[0]),
                *(_least([getattr(room, name) for room in rooms]) for name in free),
                _offset(*max(clocks, key=lambda bounds: abs(sum(bounds)))),
                f"{size(int(min(sent)))}/s" if sent else "",
            ]
        )
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]


def _offset(least: float, most: float) -> str:
    """A clock's offset and its uncertainty."""
    middle, doubt = (least + most) / 2, (most - least) / 2
    if abs(middle) < 1:
        return f"{middle * 1000:+.1f} ms ±{doubt * 1000:.1f}"
    return f"{middle:+.1f} s ±{doubt:.1f}"
