"""Small files that survive kills, full disks and power cuts: replaced texts and appended lines. Imports no torch."""

import errno
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

PART = ".part-"
"""Prefix of the names of unfinished texts; a kill may leave one behind."""
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""What file systems in user space answer to calls that they lack."""
BLOCK = 4096
"""Bytes of a file that are read at a time, from its end."""


def utc_of(seconds: float) -> str:
    """The time so many seconds after the beginning of 1970, as in "2026-11-26T08:20:31Z"."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def utc_now() -> str:
    """The time that logs, metrics and attempts note."""
    return utc_of(time.time())


def free_bytes(folder: Path) -> int | None:
    """Free bytes of a folder's disk; None where its file system does not say."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return None
    return usage.free if usage.total else None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, errors of the system say which file they are of: those of os.write() and os.fsync() do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync_descriptor(descriptor: int, path: Path) -> bool:
    """Sync an open file or folder to the disk. Returns False where the file system cannot."""
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def sync_folder(path: Path) -> bool:
    """Sync the names in a folder to the disk, so that they survive a power cut, and return True, or False where the
    file system cannot."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)


def write_whole(file: Path, text: str, *, sync: bool = False) -> None:
    """Replace a file atomically: a reader finds the whole new text or the old one, also when two processes write it.
    sync: also after a power cut; not needed for what can be made again from other files."""
    replace(file, lambda out: out.write(text.encode()), sync=sync)


def replace(file: Path, write: Callable[[BinaryIO], object], *, sync: bool) -> None:
    """Replace a file with what `write` writes, as write_whole() does; if that raises, leave the old one."""
    part = file.with_name(f"{PART}{platform.node()}-{os.getpid()}-{file.name}")
    try:
        with naming(file), part.open("wb") as out:
            write(out)
            out.flush()
            if sync:
                sync_descriptor(out.fileno(), file)
        part.replace(file)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(file.parent)


class Lines:
    """A file to which a run appends whole lines. When the disk is full, lines are lost and the run goes on. This is
    logged once, and again, with the number of lost lines, when the file can be written again."""

    def __init__(self, path: Path, *, log: Callable[[str], None]) -> None:
        """log: receives one line of text per message; it must not append to this file."""
        self.path = path
        self._log = log
        self._lost = 0

    def append(self, *lines: str) -> None:
        """Append all of these lines, or none if that fails. First remove the partial line that a kill left."""
        if not lines:
            return
        try:
            _append(self.path, "".join(line + "\n" for line in lines).encode())
        except OSError as error:
            if not self._lost:
                self._log(f"{self.path} cannot be written: {error.strerror}; its lines are lost until it can")
            self._lost += len(lines)
            return
        if self._lost:
            lost, self._lost = self._lost, 0
            self._log(f"{self.path} can be written again; {lost} lines were lost")


def _append(path: Path, content: bytes) -> None:
    # Opened every time, so that it does not matter if the file or its disk was replaced in between.
    with path.open("ab+", buffering=0) as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:  # until the end of the last whole line
            begin = max(0, end - BLOCK)
            file.seek(begin)
            if newline := file.read(end - begin).rfind(b"\n") + 1:
                end = begin + newline
                break
            end = begin
        if end < size:
            file.truncate(end)
        left = memoryview(content)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):  # otherwise the next call does it
                file.truncate(end)
            raise


def cut_back(path: Path, step: int) -> None:
    """Remove partial rows, and rows of steps after `step`, which a resumed run repeats, from a .jsonl file if it
    exists: in place where nothing that stays is behind them. Raises OSError."""
    keep_rows(path, "step", lambda value: type(value) is int and value <= step)


def keep_rows(path: Path, column: str, wanted: Callable[[Any], bool]) -> int:
    """Keep the rows of a .jsonl file whose value in this column is wanted; without any, remove it. Returns how many
    there are. Raises OSError."""
    if not path.exists():
        return 0
    count = end = 0  # rows that stay; where the first line that must go begins
    late: list[bytes] = []  # what stays behind that line
    cut = False
    with path.open("rb") as file:
        for line in file:
            is_wanted = wanted(_value_in(line, column))
            cut = cut or not is_wanted or not line.endswith(b"\n")
            count += is_wanted
            if not cut:
                end += len(line)
            elif is_wanted:
                late.append(line.rstrip(b"\n") + b"\n")

        def write(out: BinaryIO) -> None:
            file.seek(0)
            shutil.copyfileobj(file, out)
            out.truncate(end)
            out.seek(end)
            out.writelines(late)

        if late:
            replace(path, write, sync=True)
    if not count:
        path.unlink()
    elif cut and not late:
        with path.open("rb+") as shortened:
            shortened.truncate(end)
            sync_descriptor(shortened.fileno(), path)
    return count


def _value_in(row: bytes, column: str) -> Any:
    """The value in a row; None if there is none, or the line is not a row, as after a power cut."""
    try:
        return json.loads(row)[column]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def sync(folder: Path, names: Iterable[str]) -> None:
    """Sync those of these files that exist, and the folder, so that they survive a power cut. Raises OSError."""
    for name in names:
        with suppress(FileNotFoundError), (folder / name).open("rb") as file:
            sync_descriptor(file.fileno(), folder / name)
    sync_folder(folder)
