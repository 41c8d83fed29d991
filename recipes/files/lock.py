"""Locks on files that end with their process, however it ends. A run and a sweep lock their folder; so do the
processes that write the same shards of tokens (recipes/data/tokens/workspace.py).

There are two kinds, because neither of the two kinds of lock that Unix has serves both uses:

- "process" (POSIX, fcntl): for a run's folder. No child inherits it, so a forked child that outlives its process does
  not hold it. But locks of one process never conflict, and closing any descriptor of the file drops its lock.
- "descriptor" (flock): for shards, which several threads of a process may write, and may probe, at once: their locks
  conflict. A descriptor that can only be read locks exclusively, too. But a forked child shares the lock.

Between nodes, both work over NFS (v4, or v3 with lockd) and over Lustre mounted with -o flock. Imports no torch.
"""

import argparse
import errno
import fcntl
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Literal

from parallel.errors import UserError

LOCK = ".lock"
PATIENCE_HERE = 15.0
"""Seconds to wait for a process on this host: one that has lost its peers reports for 10 seconds before it exits."""
PATIENCE_ELSEWHERE = 120.0
"""Seconds to wait for a process on another host: an NFSv4 server keeps a dead host's locks for its lease, often 90."""
SECONDS_BETWEEN_LOOKS = 0.2
HELD = (errno.EACCES, errno.EAGAIN)
"""The errors that POSIX allows for a lock that another process holds."""


def free_name(folder: Path) -> str:
    """A name with a number that nothing beside this folder has."""
    return next(name for n in count(2) if not folder.with_name(name := f"{folder.name}-{n}").exists())


def own_name(folder: Path) -> str:
    """What --run.name auto stands for in the run that would have this folder; scripts/run.sh tells its processes."""
    if job := os.environ.get("SLURM_JOB_ID"):  # started again, it goes on
        return f"{folder.name}-{job}"
    return free_name(folder) if folder.exists() else folder.name


def another_name(folder: Path) -> str:
    """What to write where a run has this folder already: the command of this process with a name that is free."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--check", "--processes", "--nodes", "--run.name"):
        parser.add_argument(option, action="store_true" if option == "--check" else "store")
    words = [*parser.parse_known_args(sys.argv[1:])[1], "--run.name", free_name(folder)]
    train = Path(sys.argv[0])
    command = [os.path.relpath(train.parent / "scripts/run.sh"), *words] if train.name == "train.py" else words[-2:]
    return f"give this run another name: {shlex.join(command)}"


def begun_meanwhile(folder: Path) -> UserError:
    """The error of a process that finds a run in a folder that did not exist when it looked."""
    return UserError(
        f"{folder} is in use: another process began this run while this one started. The same command resumes it when"
        f" that has ended; or {another_name(folder)}"
    )


class NoLocks(OSError):
    """The file system has no locks."""


def open_locked(
    file: Path, *, owner: Literal["process", "descriptor"], shared: bool = False, wait: bool = False
) -> int | None:
    """Open a file and lock it; owner says which kind of lock (see above). wait: until the lock is free.

    shared: conflict with exclusive locks only, and do not create the file. Returns the descriptor, which holds the lock
    until it is closed; None if another holds the lock, or the file was removed or replaced in the meantime. Raises
    NoLocks if the file system cannot lock the file; another OSError if it cannot be opened.
    """
    descriptor = _open(file, shared=shared)
    error = None
    try:
        lock = fcntl.lockf if owner == "process" else fcntl.flock
        # POSIX locks a file that may only be read against those that lock it to write, not against other readers.
        readable = owner == "process" and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        lock(descriptor, (fcntl.LOCK_SH if shared or readable else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError as raised:
        error = raised
    still = _is_still(file, descriptor)
    if still and error is None:
        return descriptor
    os.close(descriptor)
    if still and error is not None and (wait or error.errno not in HELD):  # no wait ends with "held"
        raise NoLocks(error.errno, error.strerror)
    return None


def written_alone(real: Path) -> AbstractContextManager[None]:
    """Inside, no other process writes this folder. Raises UserError if one does; OSError if nothing can be written."""
    real.parent.mkdir(parents=True, exist_ok=True)
    busy = f"{real} is being written by another process; wait until it ends, or give another name"
    return alone(real.parent / f".lock-{real.name}", busy=busy)


@contextmanager
def alone(file: Path, *, busy: str = "") -> Iterator[None]:
    """Inside, no other process has this lock, where the file system has locks; the file is removed at the end.

    busy: what the UserError says that is raised if another process has it; "" = wait for that. Raises OSError if
    nothing can be written.
    """
    lock: int | None = None
    with suppress(NoLocks):
        while (lock := open_locked(file, owner="descriptor", wait=not busy)) is None:
            if busy:
                raise UserError(busy)
    try:
        yield
    finally:
        if lock is not None:
            with suppress(OSError):
                file.unlink()
            os.close(lock)


def _open(file: Path, *, shared: bool) -> int:
    if shared:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # another user's file: flock() needs no write permission, except over NFS
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    with suppress(OSError):  # whoever may write in the folder may lock it, whatever the umask is
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600 | os.stat(file.parent).st_mode & 0o066)
    return descriptor


def _is_still(file: Path, descriptor: int) -> bool:
    """Whether this descriptor is of the file that has this name now."""
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


class FolderLock:
    """The lock of a folder. Rank 0 takes that of a run's folder for all processes; it ends with the process.

    The file stays when the lock is gone, and means nothing without it. Nothing else may open the file in a process that
    holds the lock: closing any descriptor of the file would drop it.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._no_locks = False

    def take(
        self,
        folder: Path,
        *,
        log: Callable[[str], None],
        remedy: str = "",
        here: float = PATIENCE_HERE,
        elsewhere: float = PATIENCE_ELSEWHERE,
    ) -> bool:
        """Lock this folder, unless this object already holds its lock. Do nothing if the folder does not exist.

        Returns whether it was locked just now: what was seen of the folder before must be looked at again then. Where
        the file system has no locks, or cannot be written, a message is logged and nothing is locked; the result is the
        same.

        Args:
            folder: the folder to lock.
            log: receives one line of text per message.
            remedy: what the user can do instead of ending the other process; "" = give the run another name.
            here: seconds to wait for a process on this host.
            elsewhere: seconds to wait for a process on another host.

        Raises: UserError if another process still holds the lock after that time.
        """
        if self._no_locks or not folder.is_dir():
            return False
        file, began, waits = folder / LOCK, time.monotonic(), False
        while True:
            try:
                if self._descriptor is not None and _is_still(file, self._descriptor):
                    return False
                if self._try(file):
                    return True
                holder = file.read_text(encoding="utf-8").strip() or "another process"
            except FileNotFoundError:  # its holder sets the folder aside, and makes another one
                holder = "another process"
            except OSError as error:
                log(f"{file} cannot be locked ({error.strerror}): nothing keeps this run from being started twice")
                self._no_locks = True
                return True
            patience = here if holder.endswith(f" on {platform.node()}") else elsewhere
            if time.monotonic() - began > patience:
                break
            if not waits:
                log(f"{folder} is in use by {holder}; waiting up to {patience:.0f} s for it to end")
                waits = True
            time.sleep(SECONDS_BETWEEN_LOOKS)
        raise UserError(
            f"{folder} is in use: {holder} has locked it; end that first, or {remedy or another_name(folder)}."
            f" If that host is dead and the file system has not noticed, remove {file}"
        )

    def release(self) -> None:
        """Unlock the folder, for others to use while this process goes on."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _try(self, file: Path) -> bool:
        """Whether the lock is ours now."""
        descriptor = open_locked(file, owner="process")
        if descriptor is None:
            return False
        self.release()  # the lock of a folder that was set aside
        self._descriptor = descriptor
        try:
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
        except OSError:  # a full disk: the file does not name this process, but it is locked
            pass
        return True
