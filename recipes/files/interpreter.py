"""One line instead of a traceback for a Python that is too old or lacks our packages; --version. Old Pythons read it.

Imports no torch.
"""

import argparse
import importlib.util
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ADDRESS_SPACE = 600_000 * 1024  # bytes with which the import of torch aborts
REFUSED = 2  # as in exit_codes.py, which old Pythons cannot read


def explain_wrong_interpreter() -> None:
    """Exit now if this Python is too old; and say what is missing if an import of a package fails later.

    Also opens the standard streams that the caller has closed, before any other file.
    """
    if sys.version_info < (3, 11):  # noqa: UP036  # what an old Python reads
        _refuse("is Python {}.{}, and Shardwright needs 3.11 or newer".format(*sys.version_info[:2]))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= limit < ADDRESS_SPACE:
        _exit(f"ulimit -v is {limit // 1024}, and torch needs more than {ADDRESS_SPACE // 1024}; raise it")
    sys.excepthook = _on_error
    from recipes.files.screen import open_missing

    open_missing()


def end_at_interrupt() -> None:
    """Ctrl-C exits at once until a handler is set: torch's C++ would turn an exception into another error."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class ShowVersion(argparse.Action):
    """The option --version: print which Shardwright this is, and exit."""

    def __call__(self, *_: Any) -> None:
        from recipes.files.screen import tell
        from recipes.files.version import version

        tell(version(), to=1)
        raise SystemExit(0)


def _on_error(kind: Any, error: Any, trace: Any) -> None:
    package = (getattr(error, "name", None) or "").partition(".")[0]
    ours = Path(sys.prefix) == ROOT / ".venv"  # set up by scripts/setup.sh: no other Python would help
    if isinstance(error, ModuleNotFoundError) and package and not ours and importlib.util.find_spec(package) is None:
        _refuse("lacks the package " + package)
    said = limit_behind(error)
    if said:
        _exit(said)
    from recipes.files.screen import say

    say("".join(traceback.format_exception(kind, error, trace)).rstrip(), to=2)  # torch puts the rank before each line


def limit_behind(error: BaseException) -> str:
    """What to say of an error that a limit of the shell or job causes; "" for any other, or if none is set."""
    text = str(error) or "memory ran out"
    threads = "can't start new thread" in text or "Resource temporarily unavailable" in text
    in_c = isinstance(error, SystemError) and "without exception set" in text  # of modules in C that get no memory
    if not (threads or in_c or isinstance(error, MemoryError)):
        return ""
    limits = []
    for name, number, unit in (("-u", resource.RLIMIT_NPROC, 1), ("-v", resource.RLIMIT_AS, 1024)):
        limit = resource.getrlimit(number)[0]
        if limit != resource.RLIM_INFINITY and (threads or name == "-v"):
            limits.append(f"ulimit {name} ({limit // unit:,})")
    return f"{text}: a limit of this shell or job is too low; raise {' or '.join(limits)}" if limits else ""


def _refuse(what: str) -> None:
    python = ROOT / ".venv" / "bin" / "python"
    remedy = "" if python.exists() else "run `bash {}`, and then ".format(ROOT / "scripts" / "setup.sh")
    _exit(f"{sys.executable} {what}; {remedy}use {python}")


def _exit(what: str) -> None:
    print(what, file=sys.stderr, flush=True)  # noqa: T201  # screen.py is not for old Pythons
    os._exit(REFUSED)
