"""How many files and connections a process may have open at once. Imports no torch."""

import resource
from contextlib import suppress

from parallel.errors import UserError

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


def needed_by_store(processes: int, nodes: int) -> int:
    """The open files and connections of node 0's launcher."""
    return LAUNCHER + OF_PROCESS * processes + OF_NODE * nodes


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
    _require(needed_by_store(processes, nodes), f"the launcher of node 0, which serves {processes} processes,")


def _require(need: int, who: str, *, alone: bool = False) -> None:
    have = raise_limit(need)
    if have < need and not alone:
        raise UserError(
            f"{who} needs about {need} open files and connections, and this node allows {have}"
            f" (ulimit -Hn); nothing was started. Raise the hard limit: LimitNOFILE={2 * need} in the systemd unit that"
            f" starts the run (of slurmd, sshd or the containers), or `ulimit -n {2 * need}` as root before the command"
        )
