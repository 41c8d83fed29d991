"""What to say when a limit of the shell or job (ulimit) ends a run. Imports no torch."""

import resource
from collections.abc import Callable

from parallel.errors import UserError

ADDRESS_SPACE = 600_000 * 1024
"""Bytes of address space with which importing torch aborts."""


def within_limits(work: Callable[[], int]) -> int:
    """The exit code that `work` returns. Raises UserError if a limit ends it, or would abort it while it imports
    torch."""
    if 0 <= (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) < ADDRESS_SPACE:
        raise UserError(f"ulimit -v is {limit // 1024}, and torch needs more than {ADDRESS_SPACE // 1024}; raise it")
    try:
        return work()
    except (MemoryError, RuntimeError) as error:
        if (said := limit_behind(error)) is None:
            raise
        raise UserError(said) from error


def limit_behind(error: Exception) -> str | None:
    """What to say of an error that such a limit causes; None for any other error, or if no limit is set."""
    text = str(error) or "memory ran out"
    threads = "can't start new thread" in text or "Resource temporarily unavailable" in text
    if not threads and not isinstance(error, MemoryError):
        return None
    found = []
    for name, number, unit in (("-u", resource.RLIMIT_NPROC, 1), ("-v", resource.RLIMIT_AS, 1024)):
        limit = resource.getrlimit(number)[0]
        if limit != resource.RLIM_INFINITY and (threads or name == "-v"):
            found.append(f"ulimit {name} ({limit // unit:,})")
    return f"{text}: a limit of this shell or job is too low; raise {' or '.join(found)}" if found else None
