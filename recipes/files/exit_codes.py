"""The exit codes of all commands, which scripts/run.sh passes on, what errors of disks and servers have which, and the
signals that stop a run: see docs/running.md. Imports no torch."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

from parallel.errors import TemporaryError, UserError
from recipes.files.screen import say

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C, and what schedulers send before they take a machine. The first signal stops a run after the current step."""
ECHO_SECONDS = 1.0
"""A repeated signal within this time is an echo: it was sent to all processes, and their launcher passed it on too."""

DIE_WITH_PARENT = ("setpriv", "--pdeathsig")  # util-linux >= 2.33: not on macOS, not on RHEL 8

FINISHED = 0
FAILED = 1
"""An error in the program, with its traceback."""
REFUSED = 2
"""An error that the user can fix; the message says how."""
NOT_MET = 69
"""The launchers of the nodes could not connect to each other. (EX_UNAVAILABLE)"""
TEMPORARY = 71
"""A fault that may pass, such as a file system that does not answer: the same command tries again. (EX_OSERR)"""
CANNOT_WRITE = 74
"""All steps are done, but the last checkpoint cannot be written. (EX_IOERR)"""
PREEMPTED = 75
"""Stopped by a signal; the state is saved, and the same command continues. (EX_TEMPFAIL: try again.)"""
POISONED = 76
"""run.max_skipped_steps steps in a row were skipped; the last checkpoint is unchanged."""
HUNG = 77
"""No progress for run.hang_timeout; the message names the ranks that the others waited for."""
OUT_OF_MEMORY = 78
"""A device ran out of memory. Another start would too: the message names the fields that help. (EX_CONFIG)"""
CORRUPTED = 79
"""The weights or moments in memory are NaN, or differ between replicas: the same command resumes from a good
checkpoint."""

WRONG = 80
"""--prove: these processes compute other numbers than one process does; the verdict names the first difference."""


class Fault(NamedTuple):
    """What an error of a disk or of a server leads to, in every command."""

    code: int
    """TEMPORARY if the same command may succeed later, without any change by the user; else REFUSED."""
    remedy: str = ""


_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or what your server asks for"

FAULTS: dict[int | str, Fault] = {
    **dict.fromkeys(
        (
            *(errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ENOMEM, errno.EMFILE),
            *(errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ENFILE),
            *(errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ESHUTDOWN, errno.EREMOTEIO, errno.ENOLINK),
            *(errno.EHOSTDOWN, errno.ENODEV, 408, 409, 425, 429, 500, 502, 503, 504),
            # S3 says 400 to what did not arrive whole or in time
            *("RequestTimeout", "IncompleteBody", "BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch"),
            "XAmzContentChecksumMismatch",
        ),
        Fault(TEMPORARY),
    ),
    errno.EACCES: Fault(TEMPORARY, "let this user read it, or renew the ticket of its login"),
    errno.ENOSPC: Fault(REFUSED, "free some space"),
    errno.EDQUOT: Fault(REFUSED, "free some space, or ask for a larger quota"),
    **dict.fromkeys((401, "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"), Fault(REFUSED, _KEYS)),
    "ExpiredToken": Fault(REFUSED, "renew these credentials"),
    403: Fault(REFUSED, f"grant them {{right}}, or {_KEYS}"),
    "RequestTimeTooSkewed": Fault(REFUSED, "set this machine's clock"),
}
"""Number of the system's error, status of a server's answer, or the code in it -> what it leads to. That of the answer
counts first."""


def meaning(*keys: int | str | None) -> Fault:
    """What the first of these that FAULTS knows leads to; REFUSED if it knows none."""
    return next((FAULTS[key] for key in keys if key in FAULTS), Fault(REFUSED))


def exit_code(error: UserError) -> int:
    """The exit code of a command that this error ends."""
    return TEMPORARY if isinstance(error, TemporaryError) else REFUSED


def is_there(process: int) -> bool:
    """Whether a process on this machine has this id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        pass
    return True


def with_parent(command: Sequence[str], number: signal.Signals = signal.SIGTERM) -> list[str]:
    """The command, wrapped so that it gets this signal when its parent ends, if the system supports that."""
    bound = [*DIE_WITH_PARENT, number.name.removeprefix("SIG")]
    try:
        can = subprocess.run([*bound, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        can = False
    return [*bound, *command] if can else [*command]


def leave(code: int) -> NoReturn:
    """Exit without finalizing the interpreter, which threads inside of gloo or of a store would abort."""
    with suppress(OSError, ValueError):  # when stdout is a file on a full disk, or closed
        say(end="")
    os._exit(code)


def leave_after(work: Callable[[], int]) -> NoReturn:
    """Exit so with the code that `work` returns, or with 1 after the traceback of what it raised: the interpreter would
    finalize NCCL, too, which waits for other processes."""
    try:
        code = work()
    except Exception:
        code = FAILED
        with suppress(OSError, ValueError):
            sys.excepthook(*sys.exc_info())  # which knows some errors by name
    leave(code)


def ended_by(number: int) -> int:
    """The exit code, by the convention of shells, of a run that signal `number` ended without saving."""
    return 128 + number
