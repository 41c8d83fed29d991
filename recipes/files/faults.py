"""Faults of file systems that may pass, such as a server that does not answer for a while. Imports no torch."""

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from parallel.errors import TemporaryError

Result = TypeVar("Result")

MAY_PASS = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ESHUTDOWN),
    *(errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENODEV, errno.EBUSY),
)
SECONDS_BEFORE_TRIES = (0.1, 1.0, 3.0)


def may_pass(error: OSError) -> bool:
    """Whether the same call may succeed later, without any change by the user."""
    return error.errno in MAY_PASS


def patiently(read: Callable[[], Result], *, what: str) -> Result:
    """What `read` returns, trying again after faults that may pass. what: it reads, with the recipe's field, for the
    message. Raises TemporaryError after the last try, and at once whatever else `read` raises."""
    for seconds in (*SECONDS_BEFORE_TRIES, None):
        try:
            return read()
        except OSError as error:
            if not may_pass(error):
                raise
            if seconds is None:
                raise TemporaryError(
                    f"{what} cannot be read now: {error.strerror or error}, {len(SECONDS_BEFORE_TRIES) + 1} times in a"
                    " row; nothing was changed, and the same command continues when the file system answers again"
                ) from error
            time.sleep(seconds)
    raise AssertionError("unreachable")
