"""Before the first step: are the nodes alike, do they see one folder, does what lies between them work?"""

import os
import platform
import re
import secrets
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import xxhash

from parallel.dist import World, from_all, from_main
from parallel.errors import UserError
from parallel.nodes import Node, listed
from recipes.cluster.links import BUFFER, Links, clock_bounds, measure_links, slow_processes
from recipes.files.layout import holds_results
from recipes.files.units import size
from recipes.metrics.throughput import device_name

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 10.0
"""Seconds until all nodes must see what one of them wrote: network file systems take their time."""
CLOCK_SECONDS = 5.0
"""Clocks further apart are worth a word: times of files and log lines of two nodes no longer compare."""
TEMPORARY_BYTES = 10**9
"""Less room in the folder for temporary files is worth a word: torch.compile writes there."""
OCCUPIED = 0.05
"""A GPU with that share of its memory less to give than the others has somebody else on it."""
SLOW = 0.5
"""A process with less than that share of the others' speed between nodes is worth a word."""
MOST_ROWS = 16

ONE_ENVIRONMENT = "use one environment on all nodes: PYTHON, or .venv in a checkout that they share"
OTHER_NODES = "ask for nodes of one kind, or leave the odd ones out (sbatch --exclude)"
ALIKE = {
    "recipe": ("the recipe", "give the same recipe and the same fields on all nodes"),
    "sources": ("Shardwright's sources", "use one checkout on all nodes, or bring all to the same commit"),
    "python": ("Python", ONE_ENVIRONMENT),
    "torch": ("torch", ONE_ENVIRONMENT),
    "torchao": ("torchao", ONE_ENVIRONMENT),
    "cuda": ("CUDA", ONE_ENVIRONMENT),
    "nccl": ("NCCL", ONE_ENVIRONMENT),
    "driver": ("the GPU driver", OTHER_NODES),
    "device": ("the device", OTHER_NODES),
}
"""What must not differ: field of Facts -> its name, and what to do."""


@dataclass(frozen=True)
class Facts:
    """What a process finds where it is. None: not there, or it does not show."""

    recipe: str
    """A hash of all its fields."""
    sources: str
    """A hash, so that uncommitted changes count and no git is needed."""
    python: str
    torch: str
    torchao: str | None
    cuda: str | None
    nccl: str | None
    driver: str | None
    device: str
    device_bytes: int | None
    free_device: int | None
    """In bytes, as those that follow."""
    free_host: int | None
    free_disk: int
    """Where the run's folder goes."""
    free_temporary: int


def preflight(
    folder: Path, world: World, *, recipe: str, cache: Path | None = None, log: Callable[[str], None]
) -> None:
    """Look at all processes, and let rank 0 say what came of it.

    folder: of the run. recipe: all its fields. cache: where one process writes tokens that all read; None = nothing is
    tokenized. Raises one UserError on all ranks, with the names of the nodes, where recipe, versions, sources or
    devices differ, a node does not see these folders or a collective returns wrong numbers. What is odd and might do
    all the same is said.
    """
    if world.size == 1:
        return
    nodes, several = world.nodes, len(world.nodes) > 1
    facts = from_all(world, local_facts(folder, world.device, recipe=recipe))
    if problems := differences(facts, nodes):
        raise refusal("the processes are not alike", problems)
    agree = f"pre-flight: {world.size} processes on {len(nodes)} {'nodes' if several else 'node'} agree"
    if several:
        log(f"{agree}: {in_common(facts[0])}")  # at once: a network that is not right may hang below
        require_one_folder(folder, world, what="the run's folder", write="run.output")
        cache = from_main(world, cache)
        if cache is not None:
            require_one_folder(cache.expanduser() / "tokens", world, what="the cache of tokens", write="data.cache")
    clocks = clock_bounds(world)
    links = measure_links(world)
    if problems := wrong_results(links, nodes):
        raise refusal("the network between the processes returns wrong numbers", problems)
    log(f"{'pre-flight:' if several else agree + ';'} {speeds(links, BUFFER[world.device.type])}")
    odd = list(oddities(facts, clocks, nodes))
    if world.device.type == "cuda":  # processes on CPUs share cores: their speeds vary
        odd += slow_links(links, nodes)
    lines = table(facts, clocks, links, nodes, odd=[name for name, _ in odd]) if several else []
    for line in [*lines, *(f"{name}: {what}" for name, what in odd)]:
        log(f"  {line}")


def refusal(what: str, problems: Sequence[str]) -> UserError:
    """The error to raise for all of them at once."""
    return UserError("\n  ".join([f"pre-flight: {what}; nothing was started", *problems]))


# What a process finds


def local_facts(folder: Path, device: torch.device, *, recipe: str) -> Facts:
    """Those of this process."""
    cuda = device.type == "cuda"
    free, total = torch.cuda.mem_get_info(device) if cuda else (None, None)
    return Facts(
        recipe=xxhash.xxh3_64_hexdigest(recipe.encode())[:8],
        sources=_hash_of_sources(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        torchao=_version("torchao"),
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        driver=_driver() if cuda else None,
        device=device_name(device),
        device_bytes=total,
        free_device=free,
        free_host=_free_host(),
        free_disk=shutil.disk_usage(_places(folder)[_level(folder)]).free,
        free_temporary=shutil.disk_usage(tempfile.gettempdir()).free,
    )


def _hash_of_sources() -> str:
    digest = xxhash.xxh3_64()
    for file in sorted(
        [
            ROOT / "train.py",
            *(file for room in ("models", "parallel", "recipes") for file in (ROOT / room).rglob("*.py")),
        ]
    ):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Of NVIDIA's GPUs, from the kernel module: nvidia-smi takes a second, and a container need not have it."""
    with suppress(OSError):
        if found := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text()):
            return found[0]
    return None


def _free_host() -> int | None:
    """Bytes of memory that new work can have, where the system says it as Linux does."""
    with suppress(OSError):
        if found := re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return None


# What must be


def differences(facts: Sequence[Facts], nodes: Sequence[Node]) -> list[str]:
    """Where processes are not alike, field by field: the odd ones are those of which there are fewer."""
    found = []
    for field, (name, remedy) in ALIKE.items():
        values = {rank: value for rank, fact in enumerate(facts) if (value := getattr(fact, field)) is not None}
        (usual, _), *others = Counter(values.values()).most_common() or [(None, 0)]
        for value, _ in others:
            where = [node.name for node in nodes if any(values.get(rank) == value for rank in node.ranks)]
            found.append(f"{name}: {value} on {listed(where)}, {usual} on the others; {remedy}")
    return found


def in_common(facts: Facts) -> str:
    """What is the same on all nodes."""
    fields = {
        "sources": facts.sources,
        "Python": facts.python,
        "torch": facts.torch,
        "torchao": facts.torchao,
        "NCCL": facts.nccl,
        "driver": facts.driver,
    }
    return ", ".join([facts.device, *(f"{name} {value}" for name, value in fields.items() if value)])


def require_one_folder(folder: Path, world: World, *, what: str, write: str, patience: float = PATIENCE) -> None:
    """Raises UserError unless every node sees a file that rank 0 writes where the folder is or will be.

    what: it is. write: the field that says where it is.
    """
    level, name = from_main(world, _leave_probe(folder) if world.is_main else (0, ""))
    if not name:  # it cannot write there, which it will say
        return
    probe = _places(folder)[level] / name
    try:
        end = time.monotonic() + patience
        while not (seen := os.path.exists(probe)) and time.monotonic() < end:  # False also where it may not look
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
        also = f" (which is {listed(sorted(elsewhere))} there: a relative path starts at the current folder)"
        raise refusal(
            f"the nodes do not share {what}",
            [
                f"what {world.nodes[0].name} writes into {main}{also if elsewhere else ''} does not show on"
                f" {listed([*blind])} within {patience:g} s; write a {write} on a file system that all nodes share"
            ],
        )


def _places(folder: Path) -> list[Path]:
    """The folder and those around it, from the inside outwards."""
    return [folder.absolute(), *folder.absolute().parents]


def _level(folder: Path) -> int:
    """Which of its places is there already."""
    return next(level for level, place in enumerate(_places(folder)) if os.path.isdir(place))


def _leave_probe(folder: Path) -> tuple[int, str]:
    """Write a file into the innermost place that is there; (which, its name), or no name where that cannot be.

    Not into a run's folder that is there but empty: a file left behind by a kill would spoil it for the run.
    """
    level = _level(folder)
    if level == 0 and not holds_results(folder):
        level = 1
    # A new name each time: no other node can have looked for it, and remember that it is not there.
    name = f".preflight-{secrets.token_hex(8)}"
    try:
        (_places(folder)[level] / name).write_text("")
        return level, name
    except OSError:
        return level, ""


def wrong_results(links: Sequence[Links], nodes: Sequence[Node]) -> list[str]:
    """Which nodes got wrong numbers, and from where."""
    name_of = _names(nodes)
    found = []
    if summed := sorted({name_of[rank] for rank, link in enumerate(links) if link.wrong_sum}):
        found.append(f"all-reduce: wrong on {listed(summed)}")
    by_source: dict[str, set[str]] = {}
    for rank, link in enumerate(links):
        for source in link.wrong_parts:
            by_source.setdefault(name_of[source], set()).add(name_of[rank])
    found += [f"all-gather: what {name} sends is wrong on {listed(sorted(to))}" for name, to in by_source.items()]
    if found:
        found.append("leave such a node out (sbatch --exclude), and have its memory, its GPUs and its network tested")
    return found


# What is worth a word


def speeds(links: Sequence[Links], size_bytes: int) -> str:
    """How fast the collectives are, as they load each process's link (nccl-tests' bus bandwidth)."""
    ranks = len(links)
    reduce_seconds = max(link.all_reduce_seconds for link in links)
    gather_seconds = max(link.all_gather_seconds for link in links)
    moved = size_bytes * (ranks - 1) / ranks
    return f"all-reduce {size(int(2 * moved / reduce_seconds))}/s, all-gather {size(int(moved / gather_seconds))}/s"


def oddities(
    facts: Sequence[Facts], clocks: Sequence[tuple[float, float]], nodes: Sequence[Node]
) -> Iterator[tuple[str, str]]:
    """(node, what is odd about it), which may do all the same: what a run needs shows only later."""
    free = [fact.free_device for fact in facts if fact.free_device is not None]
    usual = statistics.median(free) if free else 0
    for node in nodes:
        for rank in node.ranks:
            fact = facts[rank]
            if fact.free_device is not None and fact.free_device < usual - OCCUPIED * (fact.device_bytes or 0):
                yield (
                    node.name,
                    f"rank {rank} has {size(fact.free_device)} of its GPU's memory, and {size(int(usual))} are usual"
                    "; is another process there? nvidia-smi lists them",
                )
        if (temporary := min(facts[rank].free_temporary for rank in node.ranks)) < TEMPORARY_BYTES:
            yield node.name, f"the folder for temporary files has {size(temporary)} left; TMPDIR names another"
        least, most = clocks[node.ranks[0]]
        if least > CLOCK_SECONDS or most < -CLOCK_SECONDS:
            yield (
                node.name,
                f"its clock is {_offset(least, most)} from that of {nodes[0].name}; times of files and log lines do"
                " not compare, so have it set (NTP)",
            )


def slow_links(links: Sequence[Links], nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """(node, what is slow about it)."""
    best = {rank: max(link.exchanges.values()) for rank, link in enumerate(links) if link.exchanges}
    name_of = _names(nodes)
    for rank, speed, usual in slow_processes(best, nodes, share=SLOW):
        yield (
            name_of[rank],
            f"rank {rank} reaches {size(int(speed))}/s to its neighbours, and {size(int(usual))}/s are usual; all wait"
            " for the slowest",
        )


def table(
    facts: Sequence[Facts],
    clocks: Sequence[tuple[float, float]],
    links: Sequence[Links],
    nodes: Sequence[Node],
    *,
    odd: Sequence[str],
) -> list[str]:
    """A row for each node; of very many, for the odd ones and one with the least of all."""
    chosen = [node for node in nodes if len(nodes) <= MOST_ROWS or node.name in odd][:MOST_ROWS]
    everybody = Node(f"least of {len(nodes)}", tuple(rank for node in nodes for rank in node.ranks))
    rows = [["node", "ranks", "GPU free", "host free", "disk free", "tmp free", "clock", "to the next"]]
    for node in [*chosen, *([everybody] if len(chosen) < len(nodes) else [])]:
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
    """How far a clock is off, and how sure that is."""
    middle, doubt = (least + most) / 2, (most - least) / 2
    if abs(middle) < 1:
        return f"{middle * 1000:+.1f} ms ±{doubt * 1000:.1f}"
    return f"{middle:+.1f} s ±{doubt:.1f}"


def _names(nodes: Sequence[Node]) -> dict[int, str]:
    """Rank -> its node's name."""
    return {rank: node.name for node in nodes for rank in node.ranks}
