"""The processes that share a node, where that puts the shard groups, and what each may have open. Imports no torch."""

import resource
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from parallel.config import MeshDegrees
from parallel.errors import UserError

PREFIX = "shardwright/"
"""Prefix of our keys in the launcher's store."""
FEW = 6
"""Longer lists of names are shortened."""


@dataclass(frozen=True)
class Node:
    """The processes that one launcher started on one host."""

    name: str
    """The host's name, with the launcher's number if the host has several."""
    ranks: tuple[int, ...]


def arrange(places: Sequence[tuple[str, int]]) -> tuple[Node, ...]:
    """The nodes in the order of their first ranks. places: for each rank, its host and its launcher's number."""
    ranks: dict[tuple[str, int], list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place, []).append(rank)
    launchers = Counter(host for host, _ in ranks)
    return tuple(
        Node(host if launchers[host] == 1 else f"{host}#{number}", tuple(own)) for (host, number), own in ranks.items()
    )


def require_like_nodes(nodes: Sequence[Node]) -> None:
    """Raise UserError, with the hosts, unless mesh.shard = "node" is possible.

    It needs the same number of processes on every node, with consecutive ranks.
    """
    by_size: dict[int, list[str]] = {}
    for node in nodes:
        by_size.setdefault(len(node.ranks), []).append(node.name)
    if len(by_size) > 1:
        sizes = " and ".join(f"{size} on {abbreviated(names)}" for size, names in sorted(by_size.items()))
        raise UserError(
            f'mesh.shard = "node" needs the same number of processes on each node, but there are {sizes}'
            "; start as many on each (NPROC), leave out the nodes that differ, or write a number"
        )
    scattered = [node.name for node in nodes if node.ranks[-1] - node.ranks[0] >= len(node.ranks)]
    if scattered:
        raise UserError(
            f'mesh.shard = "node" needs consecutive ranks on each node, but those of {abbreviated(scattered)} are'
            " scattered; start the processes with scripts/run.sh or torchrun, or write a number"
        )


def require_neighbours(nodes: Sequence[Node], *, tensor: int) -> None:
    """Raise UserError, with the hosts, if a tensor group crosses nodes only because their ranks are scattered."""
    node_of = {rank: node.name for node in nodes for rank in node.ranks}
    if any(len(node.ranks) % tensor for node in nodes):  # recipes/recipe/rules_mesh.py reports it
        return
    for rank in range(len(node_of)):
        first = rank - rank % tensor
        if node_of[rank] != node_of[first]:
            raise UserError(
                f"mesh.tensor = {tensor}: ranks {first} and {rank} of a tensor group are on {node_of[first]} and"
                f" {node_of[rank]}, because ranks are scattered over the nodes; start the processes with scripts/run.sh"
                " or torchrun, which number them node by node, or write tensor = 1"
            )


def placement(degrees: MeshDegrees, nodes: Sequence[Node]) -> list[str]:
    """One line that says where the groups of FSDP and of context parallelism are; no line for a single node."""
    if len(nodes) == 1:
        return []
    sizes = sorted({len(node.ranks) for node in nodes})
    processes = " or ".join(map(str, sizes)) + (" process" if sizes == [1] else " processes")
    where = ["nothing is sharded"]
    if degrees.per_layer > degrees.tensor:  # tensor groups, which are neighbours, are inside nodes
        where = [_spans("shard", degrees.per_layer, nodes)]
    elif degrees.tensor > 1:
        where = ["each copy of the model is inside one node"]
    if degrees.context > 1:
        where.append(_spans("context", degrees.context * degrees.tensor, nodes))
    if degrees.pipeline > 1:  # hidden states go to the processes of the next stage
        where.append(_spans("pipeline stage", degrees.processes // degrees.pipeline, nodes).replace(" group", ""))
    names = abbreviated([node.name for node in nodes])
    return [f"nodes: {len(nodes)} of {processes} ({names}); {', '.join(where)}"]


def _spans(name: str, ranks: int, nodes: Sequence[Node]) -> str:
    """Whether groups cross nodes. ranks: how many neighbours have groups of their own, which lie on the same nodes."""
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node.ranks}
    spans = [len({node_of[rank] for rank in range(first, first + ranks)}) for first in range(0, len(node_of), ranks)]
    if max(spans) == 1:
        return f"each {name} group is inside one node"
    if min(spans) == 1:
        crossing = sum(span > 1 for span in spans)
        return f"{crossing} of {len(spans)} {name} groups {'crosses' if crossing == 1 else 'cross'} nodes"
    span = f"{min(spans)}" if min(spans) == max(spans) else f"{min(spans)} to {max(spans)}"
    return f"each {name} group spans {span} nodes"


def abbreviated(names: Sequence[str], *, count: int = 0) -> str:
    """The names as text; of many, only the first ones and the last. count: how many they are, if some are left out."""
    count = count or len(names)
    if count <= FEW:
        return ", ".join(names)
    return f"{', '.join(names[: FEW // 2])}, ... {names[-1]}: {count} in all"


# How many files and connections a process may have open at once.

OWN = 96
"""What a process needs by itself: about 30 without data on CPUs, the rest for files of tokens (at most a quarter of the
limit), libraries and a GPU's driver. Not NCCL's sockets: what those need has only been allowed for where limits are as
usual on GPU machines."""
TREE = 24
"""The neighbours of a process in the tree of parallel/messages.py, at most."""
PEERS = 4
"""Peers of the collectives on hosts, for each doubling of the processes: the default group and those of a mesh connect
two processes when these first have something for each other, and ask the same few ever after."""
LAUNCHER, OF_PROCESS, OF_NODE = 32, 2, 2
"""Node 0's launcher serves the store: one connection of each process, two at most while a hang is judged, and those of
each node's launcher and torchrun."""
PLENTY = 65_536
"""How far the soft limit is raised at most, unless more is needed: some programs close every number below the limit."""
FILES = 1024
"""Files of tokens that a run maps at a time, where the limit allows it."""


def needed(processes: int) -> int:
    """The open files and connections of each process of a run with this many."""
    return OWN + min(processes - 1, TREE) + PEERS * (processes - 1).bit_length()


def raise_limit(wanted: int = 0) -> int:
    """Raise this process's soft limit towards the hard one, enough for so many open files. Returns the new limit.

    Children inherit it. That harms only a program that passes numbers above 1023 to select(), and no number is that
    high unless so many files are open, which would have failed before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(PLENTY, wanted)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS allows less than its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return 2**62 if soft == resource.RLIM_INFINITY else soft


def files_of_tokens() -> int:
    """How many files of tokens a run may keep mapped: each takes a descriptor."""
    return min(FILES, raise_limit() // 4)


def require(processes: int) -> None:
    """Raise the soft limit. Raises UserError if even the hard limit is too low for a run of this many processes."""
    _require(needed(processes), f"each of {processes} processes", alone=processes == 1)


def require_store(processes: int, nodes: int) -> None:
    """The same as require() for node 0's launcher, before it serves the store of these processes."""
    _require(
        LAUNCHER + OF_PROCESS * processes + OF_NODE * nodes,
        f"the launcher of node 0, which serves {processes} processes,",
    )


def _require(need: int, who: str, *, alone: bool = False) -> None:
    have = raise_limit(need)
    if have < need and not alone:
        raise UserError(
            f"{who} needs about {need} open files and connections, and this node allows {have}"
            f" (ulimit -Hn); nothing was started. Raise the hard limit: LimitNOFILE={2 * need} in the systemd unit that"
            f" starts the run (of slurmd, sshd or the containers), or `ulimit -n {2 * need}` as root before the command"
        )
