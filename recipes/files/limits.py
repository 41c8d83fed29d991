"""What to say when a limit of the shell or job (ulimit) ends a run. Imports no torch."""

import resource


def limit_behind(error: BaseException) -> str:
    """What to say of an error that such a limit causes; "" for any other error, or if no limit is set."""
    text = str(error) or "memory ran out"
    threads = "can't start new thread" in text or "Resource temporarily unavailable" in text
    if not threads and not isinstance(error, MemoryError):
        return ""
    found = []
    for name, number, unit in (("-u", resource.RLIMIT_NPROC, 1), ("-v", resource.RLIMIT_AS, 1024)):
        limit = resource.getrlimit(number)[0]
        if limit != resource.RLIM_INFINITY and (threads or name == "-v"):
            found.append(f"ulimit {name} ({limit // unit:,})")
    return f"{text}: a limit of this shell or job is too low; raise {' or '.join(found)}" if found else ""
