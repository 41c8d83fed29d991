"""How many files and connections a process may have open at once. Imports no torch."""

import resource
from contextlib import suppress

from parallel.errors import UserError

OWN = 400
"""What a process needs by itself: up to 256 for files of tokens, the rest for libraries, GPU driver and NCCL. (measured
on CPUs: about 30 without data)"""
# Measured on 2, 4 and 8 processes: three gloo groups connect every process to every other, those of a mesh of R x S
# processes add R + S - 1. Node 0's launcher, which serves the store, has fewer: 16, and two for each process.
TO_ALL, MESH_SHARE = 3, 2
PLENTY = 65_536
"""How far the soft limit is raised at most, unless more is needed: some programs close every number below the limit."""


def needed(processes: int) -> int:
    """The open files and connections of each process of a run with this many."""
    return OWN + TO_ALL * processes + processes // MESH_SHARE


def raise_limit(processes: int = 1) -> int:
    """Raise this process's soft limit towards the hard one, enough for this many processes. Returns the new limit.

    Children inherit it. That harms only a program that passes numbers above 1023 to select(), and no number is that
    high unless so many files are open, which would have failed before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(PLENTY, needed(processes))
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS allows less than its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return 2**62 if soft == resource.RLIM_INFINITY else soft


def require(processes: int) -> None:
    """Raise the soft limit. Raises UserError if even the hard limit is too low for a run of this many processes."""
    have = raise_limit(processes)
    if processes > 1 and have < (need := needed(processes)):
        raise UserError(
            f"each of {processes} processes needs about {need} open files and connections, and this node allows {have}"
            f" (ulimit -Hn); nothing was started. Raise the hard limit: LimitNOFILE={2 * need} in the systemd unit that"
            f" starts the run (of slurmd, sshd or the containers), or `ulimit -n {2 * need}` as root before the command"
        )
