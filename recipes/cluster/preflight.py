"""Checks before the first step: the nodes are alike, they share one folder, and the network between them works."""

import os
import platform
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import xxhash

from parallel.dist import World, on_node
from parallel.errors import UserError
from parallel.nodes import Node, abbreviated
from recipes.cluster.findings import Measured, Room, report, wrong_results
from recipes.cluster.links import clock_bounds, measure_links
from recipes.files.atomic import free_bytes
from recipes.files.layout import holds_results
from recipes.files.reading import user_path
from recipes.files.version import hash_of_sources, of_package
from recipes.metrics.throughput import device_name

VISIBLE_SECONDS = 10.0
"""How long a file may take to appear on all nodes: network file systems cache folder listings."""
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
"""What must be alike on all processes -> (its name in messages, what to do)."""


Facts = dict[str, str | None]
"""The values of MUST_MATCH on one process. None: not present, or not visible."""


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
    facts = local_facts(world.device, recipe=recipe, sources=on_node(world, hash_of_sources))
    values = world.messages.to_main([*facts.values()])  # a hundred bytes of each process, without the names
    if problems := world.messages.from_main(differences(values, nodes) if values else []):
        raise refusal("the processes differ", problems)
    agree = f"pre-flight: {world.size} processes on {len(nodes)} {'nodes' if several else 'node'} agree"
    if several:
        log(f"{agree}: {in_common(facts)}")  # before the network is tested, which may hang
        require_one_folder(folder, world, what="the run's folder", field="run.output")
        cache = world.messages.from_main(cache)
        if cache is not None:
            require_one_folder(user_path(cache) / "tokens", world, what="the token cache", field="data.cache")
    mine = Measured(local_room(folder, world.device), clock_bounds(world), measure_links(world, groups))
    everyone = world.messages.to_main(mine)  # rank 0 alone judges and logs
    if problems := world.messages.from_main(wrong_results([link for *_, link in everyone], nodes) if everyone else []):
        raise refusal("the network between the processes returns wrong numbers", problems)
    if everyone:
        speed, *lines = report(everyone, nodes, device=world.device.type)
        log(f"{'pre-flight:' if several else agree + ';'} {speed}")
        for line in lines:
            log(f"  {line}")


def refusal(what: str, problems: Sequence[str]) -> UserError:
    """The error that lists all problems."""
    return UserError("\n  ".join([f"pre-flight: {what}; nothing was started", *problems]))


def local_facts(device: torch.device, *, recipe: str, sources: str) -> Facts:
    """The facts of this process. sources: hash_of_sources() on its node."""
    cuda = device.type == "cuda"
    return {
        "recipe": xxhash.xxh3_64_hexdigest(recipe.encode())[:8],  # of all fields
        "sources": sources,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchao": of_package("torchao"),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        # Read from the kernel module: nvidia-smi takes a second, and containers may lack it.
        "driver": _find("/proc/driver/nvidia/version", r"\b(\d{3}\.\d+(?:\.\d+)?)\b") if cuda else None,
        "device": device_name(device),
    }


def local_room(folder: Path, device: torch.device) -> Room:
    """The memory and the disks of this process. folder: that of the run; it need not exist."""
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (None, None)
    available = _find("/proc/meminfo", r"^MemAvailable: +(\d+) kB")
    return Room(
        device=total,
        free_device=free,
        free_host=int(available) * 1024 if available else None,
        free_disk=free_bytes(_places(folder)[_level(folder)]),
        free_temporary=free_bytes(Path(tempfile.gettempdir())),
    )


def _find(file: str, pattern: str) -> str | None:
    """What the pattern's group matches in a file under /proc; None if the file (no Linux) or a match is missing."""
    with suppress(OSError):
        if match := re.search(pattern, Path(file).read_text(), re.MULTILINE):
            return match[1]
    return None


def differences(everyone: Sequence[Sequence[str | None]], nodes: Sequence[Node]) -> list[str]:
    """One line per value that differs from the most common one of its field. everyone: the facts by rank, each in the
    order of MUST_MATCH."""
    lines = []
    for (name, remedy), values in zip(MUST_MATCH.values(), zip(*everyone, strict=True), strict=True):
        ranks: dict[str, set[int]] = {}
        for rank, value in enumerate(values):
            if value is not None:
                ranks.setdefault(value, set()).add(rank)
        usual, *others = sorted(ranks, key=lambda value: -len(ranks[value])) or [""]  # of as many, the first rank's
        for value in others:
            where = [node.name for node in nodes if not ranks[value].isdisjoint(node.ranks)]
            lines.append(f"{name}: {value} on {abbreviated(where)}, {usual} on the others; {remedy}")
    return lines


def in_common(facts: Facts) -> str:
    """Device and versions, for the log."""
    names = ("sources", "Python", "torch", "torchao", "NCCL", "driver")
    versions = [f"{name} {value}" for name in names if (value := facts[name.lower()])]
    return ", ".join([str(facts["device"]), *versions])


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
    level, name = world.messages.from_main(_write_probe(folder) if world.is_main else (0, ""))
    if not name:  # rank 0 cannot write there; the run reports that later
        return
    probe, looks = _places(folder)[level] / name, any(world.rank == node.ranks[0] for node in world.nodes)
    seen = True
    try:
        end = time.monotonic() + patience  # one process of each node looks
        while looks and not (seen := os.path.exists(probe)) and time.monotonic() < end:  # False also without permission
            time.sleep(0.2)
        unseen = {} if seen else {world.rank: str(probe.parent)}
        unseen = world.messages.reduce(unseen, lambda one, other: one | other)
    finally:
        if world.is_main:
            with suppress(OSError):
                probe.unlink()
    problem = ""
    if world.is_main and unseen:
        elsewhere = sorted({*unseen.values()} - {str(probe.parent)})
        also = f" (which is {abbreviated(elsewhere)} there: a relative path starts at the current folder)"
        problem = (
            f"a file that {world.nodes[0].name} wrote into {probe.parent}{also if elsewhere else ''} did not appear on"
            f" {abbreviated([node.name for node in world.nodes if node.ranks[0] in unseen])} within {patience:g} s"
            f"; write a {field} on a file system that all nodes share"
        )
    if problem := world.messages.from_main(problem):
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
