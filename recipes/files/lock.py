"""Keeps the folder of a run, or of a sweep, for one process at a time. Imports no torch."""

import errno
import fcntl
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

from parallel.errors import UserError

LOCK = ".lock"
PATIENCE_HERE = 15.0
"""Seconds for what ran before on this host to end: who has lost its peers speaks for 10 seconds before it goes."""
PATIENCE_ELSEWHERE = 120.0
"""... on another one: a server of NFSv4 lets go what a dead host held after its lease, 90 seconds as a rule."""
SECONDS_BETWEEN_LOOKS = 0.2
ANOTHER_NAME = "give this run another name (--run.name OTHER)"
HELD = (errno.EACCES, errno.EAGAIN)
"""What a lock that another process has looks like, by POSIX."""


class FolderLock:
    """The lock of a folder; of a run's, rank 0 takes it for all. It is gone when its process is, however that ends.

    A POSIX lock (fcntl), not flock(): no child inherits it, so nothing that outlives its process can hold it, and
    between nodes it works over NFS (v4, or v3 with lockd) and over Lustre mounted with -o flock. The file stays, and
    means nothing without its lock. Who closes any descriptor of the file loses the lock, so nothing else opens it.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._without = False  # the file system has no locks

    def take(
        self,
        folder: Path,
        *,
        log: Callable[[str], None],
        remedy: str = ANOTHER_NAME,
        here: float = PATIENCE_HERE,
        elsewhere: float = PATIENCE_ELSEWHERE,
    ) -> None:
        """Take the lock of this folder, unless that has happened; nothing where no folder is.

        remedy: what to do other than end that process. here, elsewhere: seconds to wait for one on this host, on
        another. Raises UserError where one goes on
        having the lock. Where the file system has no locks, or cannot be written, that is told.
        """
        if self._without or not folder.is_dir():
            return
        file, began, waits = folder / LOCK, time.monotonic(), False
        while True:
            try:
                if self._holds(file) or self._try(file):
                    return
                holder = file.read_text(encoding="utf-8").strip() or "another process"
            except OSError as error:
                log(f"{file} cannot be locked ({error.strerror}): nothing keeps this run from being started twice")
                self._without = True
                return
            patience = here if holder.endswith(f" on {platform.node()}") else elsewhere
            if time.monotonic() - began > patience:
                break
            if not waits:
                log(f"{folder} is in use by {holder}; waiting up to {patience:.0f} s for its end")
                waits = True
            time.sleep(SECONDS_BETWEEN_LOOKS)
        raise UserError(
            f"{folder} is in use: {holder} runs it; end that first, or {remedy}."
            f" If it is a host that is dead, and the file system has not noticed: remove {file}"
        )

    def release(self) -> None:
        """Let others have it while this process goes on."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _holds(self, file: Path) -> bool:
        return self._descriptor is not None and is_still(file, self._descriptor)

    def _try(self, file: Path) -> bool:
        """Whether the lock is ours now."""
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_still(file, descriptor):  # the folder was set aside, or the file removed, just now
                os.close(descriptor)
                return False
        except OSError as error:
            os.close(descriptor)
            if error.errno in HELD:
                return False
            raise
        self.release()  # of a folder that was set aside
        self._descriptor = descriptor
        try:
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
        except OSError:  # a full disk: it is not said who, but locked it is
            pass
        return True


def is_still(file: Path, descriptor: int) -> bool:
    """Whether that is the file of this name, still."""
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
