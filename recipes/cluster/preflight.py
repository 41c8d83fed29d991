"""Checks before the first step: the nodes are alike, they share one folder, and the network between them works."""

import os
import platform
import re
import secrets
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import xxhash

from parallel.dist import World, from_all, from_main
from parallel.errors import UserError
from parallel.nodes import Node, abbreviated
from recipes.cluster.links import BUFFER, Links, clock_bounds, measure_links, slow_pairs, slow_processes
from recipes.files.layout import holds_results
from recipes.files.units import size
from recipes.metrics.throughput import device_name

ROOT = Path(__file__).resolve().parents[2]
VISIBLE_SECONDS = 10.0
"""How long a file may take to appear on all nodes: network file systems cache folder listings."""
CLOCK_SECONDS = 5.0
"""Warn when clocks are further apart: file times and log lines of two nodes no longer compare."""
TEMPORARY_BYTES = 10**9
"""Warn when the folder for temporary files has less free space: torch.compile writes there."""
OCCUPIED = 0.05
"""Warn when a GPU has this share of its memory less free than the others: another process is probably using it."""
SLOW = 0.5
"""Warn when a process reaches less than this share of the median speed between nodes."""
MOST_ROWS = 16
"""In the table."""

ONE_ENVIRONMENT = "use one environment on all nodes: PYTHON, or .venv in a checkout that they share"
OTHER_NODES = "request nodes of one kind, or exclude the ones that differ (sbatch --exclude)"
MUST_MATCH = {
    "recipe": ("the recipe", "pass the same recipe and the same fields on all nodes"),
    "sources": ("Shardwright's sources", "use one checkout on all nodes, or check out the same commit everywhere"),
    "python": ("Python", ONE_ENVIRONMENT),
    "torch": ("torch", ONE_ENVIRONMENT),
    "torchao": ("torchao", ONE_ENVIRONMENT),
    "cuda": ("CUDA", ONE_ENVIRONMENT),
    "nccl": ("NCCL", ONE_ENVIRONMENT),
    "driver": ("the GPU driver", OTHER_NODES),
    "device": ("the device", OTHER_NODES),
}
"""Field of Facts that must be equal on all processes -> (its name in messages, what to do)."""


@dataclass(frozen=True)
class Facts:
    """What one process found on its node. None: not present, or not visible."""

    recipe: str
    """Hash of all fields."""
    sources: str
    """Hash of the files, so that uncommitted changes count and git is not needed."""
    python: str
    torch: str
    torchao: str | None
    cuda: str | None
    nccl: str | None
    driver: str | None
    device: str
    device_bytes: int | None
    """Total memory of the GPU."""
    free_device: int | None
    """In bytes, as are the next three."""
    free_host: int | None
    free_disk: int
    """On the file system of the run's folder."""
    free_temporary: int


def preflight(
    folder: Path,
    world: World,
    *,
    recipe: str,
    cache: Path | None = None,
    groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
    log: Callable[[str], None],
) -> None:
    """Compare all processes and test the network between them. Every process must call it.

    Args:
        folder: Of the run; it need not exist.
        world: All processes.
        recipe: The resolved recipe, to compare.
        cache: Where one process writes tokens that all read; None = nothing is tokenized.
        groups: As of groups_along(): the links inside them are measured, too.
        log: Receives one line of text per message.

    Raises:
        UserError: On all ranks and with the names of the nodes, if recipe, versions, sources or devices differ, if a
            node does not see one of the folders, or if a collective returns wrong numbers. Anything else unusual is
            only logged.
    """
    if world.size == 1:
        return
    nodes, several = world.nodes, len(world.nodes) > 1
    facts = from_all(world, local_facts(folder, world.device, recipe=recipe))
    if problems := differences(facts, nodes):
        raise refusal("the processes differ", problems)
    agree = f"pre-flight: {world.size} processes on {len(nodes)} {'nodes' if several else 'node'} agree"
    if several:
        log(f"{agree}: {in_common(facts[0])}")  # before the network is tested, which may hang
        require_one_folder(folder, world, what="the run's folder", field="run.output")
        cache = from_main(world, cache)
        if cache is not None:
            require_one_folder(cache.expanduser() / "tokens", world, what="the token cache", field="data.cache")
    clocks = clock_bounds(world)
    links = measure_links(world, groups)
    if problems := wrong_results(links, nodes):
        raise refusal("the network between the processes returns wrong numbers", problems)
    log(f"{'pre-flight:' if several else agree + ';'} {speeds(links, BUFFER[world.device.type])}")
    warnings = list(node_warnings(facts, clocks, nodes))
    if world.device.type == "cuda":  # processes on CPUs share cores, so their speeds vary
        warnings += [*slow_links(links, nodes), *slow_pairs(links, nodes, share=SLOW)]
    lines = table(facts, clocks, links, nodes, always=[name for name, _ in warnings]) if several else []
    for line in [*lines, *(f"{name}: {what}" for name, what in warnings)]:
        log(f"  {line}")


def refusal(what: str, problems: Sequence[str]) -> UserError:
    """One error that lists all problems."""
    return UserError("\n  ".join([f"pre-flight: {what}; nothing was started", *problems]))


def local_facts(folder: Path, device: torch.device, *, recipe: str) -> Facts:
    """The facts of this process."""
    cuda = device.type == "cuda"
    free, total = torch.cuda.mem_get_info(device) if cuda else (None, None)
    available = _find("/proc/meminfo", r"^MemAvailable: +(\d+) kB")
    return Facts(
        recipe=xxhash.xxh3_64_hexdigest(recipe.encode())[:8],
        sources=_hash_of_sources(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        torchao=_version("torchao"),
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        # From the kernel module: nvidia-smi takes a second, and containers may lack it.
        driver=_find("/proc/driver/nvidia/version", r"\b(\d{3}\.\d+(?:\.\d+)?)\b") if cuda else None,
        device=device_name(device),
        device_bytes=total,
        free_device=free,
        free_host=int(available) * 1024 if available else None,
        free_disk=shutil.disk_usage(_places(folder)[_level(folder)]).free,
        free_temporary=shutil.disk_usage(tempfile.gettempdir()).free,
    )


def _hash_of_sources() -> str:
    digest = xxhash.xxh3_64()
    files = (file for package in ("models", "parallel", "recipes") for file in (ROOT / package).rglob("*.py"))
    for file in sorted([ROOT / "train.py", *files]):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _find(file: str, pattern: str) -> str | None:
    """What the pattern's group matches in a file under /proc; None if the file (no Linux) or a match is missing."""
    with suppress(OSError):
        if found := re.search(pattern, Path(file).read_text(), re.MULTILINE):
            return found[1]
    return None


def differences(facts: Sequence[Facts], nodes: Sequence[Node]) -> list[str]:
    """One line per value that differs from the most common one of its field."""
    found = []
    for field, (name, remedy) in MUST_MATCH.items():
        values = {rank: value for rank, fact in enumerate(facts) if (value := getattr(fact, field)) is not None}
        (usual, _), *others = Counter(values.values()).most_common() or [(None, 0)]
        for value, _ in others:
            where = [node.name for node in nodes if any(values.get(rank) == value for rank in node.ranks)]
            found.append(f"{name}: {value} on {abbreviated(where)}, {usual} on the others; {remedy}")
    return found


def in_common(facts: Facts) -> str:
    """Device and versions, for the log."""
    fields = {
        "sources": facts.sources,
        "Python": facts.python,
        "torch": facts.torch,
        "torchao": facts.torchao,
        "NCCL": facts.nccl,
        "driver": facts.driver,
    }
    return ", ".join([facts.device, *(f"{name} {value}" for name, value in fields.items() if value)])


def require_one_folder(folder: Path, world: World, *, what: str, field: str, patience: float = VISIBLE_SECONDS) -> None:
    """Check that every node sees a file that rank 0 writes into the folder, or where the folder will be.

    Args:
        folder: It need not exist.
        world: All processes; every one must call this.
        what: The folder's name in the message.
        field: The recipe's field that sets it.
        patience: Seconds until the file must have appeared.

    Raises:
        UserError: On all ranks, with the nodes that do not see the file.
    """
    level, name = from_main(world, _write_probe(folder) if world.is_main else (0, ""))
    if not name:  # rank 0 cannot write there; the run reports that later
        return
    probe = _places(folder)[level] / name
    try:
        end = time.monotonic() + patience
        while not (seen := os.path.exists(probe)) and time.monotonic() < end:  # False also without permission
            time.sleep(0.2)
        everyone = from_all(world, (seen, str(probe.parent)))
    finally:
        if world.is_main:
            with suppress(OSError):
                probe.unlink()
    blind = {node.name: everyone[node.ranks[0]][1] for node in world.nodes if not everyone[node.ranks[0]][0]}
    if blind:
        main = everyone[0][1]
        elsewhere = {place for place in blind.values() if place != main}
        also = f" (which is {abbreviated(sorted(elsewhere))} there: a relative path starts at the current folder)"
        problem = (
            f"a file that {world.nodes[0].name} wrote into {main}{also if elsewhere else ''} did not appear on"
            f" {abbreviated([*blind])} within {patience:g} s; write a {field} on a file system that all nodes share"
        )
        raise refusal(f"the nodes do not share {what}", [problem])


def _places(folder: Path) -> list[Path]:
    """The folder and its parents, innermost first."""
    return [folder.absolute(), *folder.absolute().parents]


def _level(folder: Path) -> int:
    """Index in _places() of the innermost folder that exists."""
    return next(level for level, place in enumerate(_places(folder)) if os.path.isdir(place))


def _write_probe(folder: Path) -> tuple[int, str]:
    """Write a file into the innermost folder that exists. Returns (its index in _places(), file name or "" on failure).

    An existing but empty run folder is left alone: a file left behind by a kill would make it look used.
    """
    level = _level(folder)
    if level == 0 and not holds_results(folder):
        level = 1
    # A new name each time, because another node's file system may have cached that an old one is missing.
    name = f".preflight-{secrets.token_hex(8)}"
    try:
        (_places(folder)[level] / name).write_text("")
        return level, name
    except OSError:
        return level, ""


def wrong_results(links: Sequence[Links], nodes: Sequence[Node]) -> list[str]:
    """One line per collective and node with wrong numbers, and what to do."""
    name_of = {rank: node.name for node in nodes for rank in node.ranks}
    found = []
    if summed := sorted({name_of[rank] for rank, link in enumerate(links) if link.wrong_sum}):
        found.append(f"all-reduce: wrong on {abbreviated(summed)}")
    by_source: dict[str, set[str]] = {}
    for rank, link in enumerate(links):
        for source in link.wrong_parts:
            by_source.setdefault(name_of[source], set()).add(name_of[rank])
    found += [f"all-gather: what {name} sends is wrong on {abbreviated(sorted(to))}" for name, to in by_source.items()]
    if found:
        found.append("exclude these nodes (sbatch --exclude), and have their memory, GPUs and network tested")
    return found


def speeds(links: Sequence[Links], size_bytes: int) -> str:
    """The collectives' bus bandwidth, as nccl-tests defines it; and of each axis the slowest pair."""
    ranks = len(links)
    reduce_seconds = max(link.all_reduce_seconds for link in links)
    gather_seconds = max(link.all_gather_seconds for link in links)
    moved = size_bytes * (ranks - 1) / ranks
    found = [f"all-reduce {size(int(2 * moved / reduce_seconds))}/s, all-gather {size(int(moved / gather_seconds))}/s"]
    for axis in links[0].inside:
        slowest = min(speed for link in links for speed in link.inside[axis].values())
        found.append(f"in {axis} groups {size(int(slowest))}/s")
    return ", ".join(found)


def node_warnings(
    facts: Sequence[Facts], clocks: Sequence[tuple[float, float]], nodes: Sequence[Node]
) -> Iterator[tuple[str, str]]:
    """(node, what is unusual about it). Only warnings: what a run needs is known only later."""
    free = [fact.free_device for fact in facts if fact.free_device is not None]
    usual = statistics.median(free) if free else 0
    for node in nodes:
        for rank in node.ranks:
            fact = facts[rank]
            if fact.free_device is not None and fact.free_device < usual - OCCUPIED * (fact.device_bytes or 0):
                yield (
                    node.name,
                    f"rank {rank} has {size(fact.free_device)} of GPU memory free, the median is {size(int(usual))}"
                    "; is another process using it? nvidia-smi lists them",
                )
        if (temporary := min(facts[rank].free_temporary for rank in node.ranks)) < TEMPORARY_BYTES:
            yield node.name, f"the folder for temporary files has {size(temporary)} free; set TMPDIR to use another"
        least, most = clocks[node.ranks[0]]
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


def table(
    facts: Sequence[Facts],
    clocks: Sequence[tuple[float, float]],
    links: Sequence[Links],
    nodes: Sequence[Node],
    *,
    always: Sequence[str],
) -> list[str]:
    """A row for each node, with the worst value of its processes.

    Args:
        facts: By rank.
        clocks: Seconds ahead of rank 0's clock, at least and at most, by rank.
        links: By rank.
        nodes: All nodes.
        always: Nodes that get a row even if there are more than MOST_ROWS; the rest then share one row of minima.
    """
    chosen = [node for node in nodes if len(nodes) <= MOST_ROWS or node.name in always][:MOST_ROWS]
    minima = Node(f"least of {len(nodes)}", tuple(rank for node in nodes for rank in node.ranks))
    rows = [["node", "ranks", "GPU free", "host free", "disk free", "tmp free", "clock", "to the next"]]
    for node in [*chosen, *([minima] if len(chosen) < len(nodes) else [])]:
        own = [facts[rank] for rank in node.ranks]
        gpus = [fact.free_device for fact in own if fact.free_device is not None]
        hosts = [fact.free_host for fact in own if fact.free_host is not None]
        sent = [speed for rank in node.ranks for speed in links[rank].exchanges.values()]
        rows.append(
            [
                node.name,
                f"{node.ranks[0]}-{node.ranks[-1]}" if len(node.ranks) > 1 else str(node.ranks[0]),
                size(min(gpus)) if gpus else "",
                size(min(hosts)) if hosts else "",
                size(min(fact.free_disk for fact in own)),
                size(min(fact.free_temporary for fact in own)),
                _offset(*max((clocks[rank] for rank in node.ranks), key=lambda bounds: abs(sum(bounds)))),
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
