"""Small files that kills, full disks and power cuts do not spoil: whole texts, and files that grow by whole lines.

Imports no torch.
"""

import json
import os
import platform
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

PART = ".part-"
"""What the names of texts begin with that are not whole yet; a kill may leave one."""
BLOCK = 4096


def sync_folder(path: Path) -> None:
    """Make sure that the names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(file: Path, text: str, *, sync: bool = False) -> None:
    """A reader finds the whole text or what was there before; of two writers of the same, either's serves.

    sync: after a power cut, too. What can be made again from other files needs none of that.
    """
    part = file.with_name(f"{PART}{platform.node()}-{os.getpid()}-{file.name}")
    try:
        with part.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            if sync:
                os.fsync(out.fileno())
        part.replace(file)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(file.parent)


class Lines:
    """A file that grows while a run goes on, by whole lines.

    Where the disk takes no more, lines are lost and the run goes on. That is told once, and, with their number, when
    there is room again.
    """

    def __init__(self, path: Path, *, log: Callable[[str], None]) -> None:
        """tell: where a line for people goes; if that is this file too, to something else."""
        self.path = path
        self._log = log
        self._lost = 0

    def append(self, *lines: str) -> None:
        """Add lines at the end: all of them or, where that fails, none. What a kill left of a line goes first."""
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
    # Opened anew each time: so it does not matter what became of the disk in between.
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        end = _end_of_lines(file, size)
        if end < size:
            file.truncate(end)
        left = memoryview(content)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):  # else the next call does it
                file.truncate(end)
            raise


def _end_of_lines(file: BinaryIO, size: int) -> int:
    """Where the last whole line of a file of so many bytes ends."""
    end = size
    while end:
        start = max(0, end - BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def cut_back(path: Path, step: int) -> None:
    """Take the rows after `step`, and half ones, out of a .jsonl file, if it is there. Raises OSError.

    A resumed run goes through those steps again.
    """
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    kept = "".join(row + "\n" for row in text.splitlines() if (found := _step_of(row)) is not None and found <= step)
    if kept != text:
        write_whole(path, kept, sync=True)


def _step_of(row: str) -> int | None:
    """The step of a row; None for a line that is none, as a power cut may leave it."""
    try:
        return int(json.loads(row)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def sync(folder: Path, names: Iterable[str]) -> None:
    """Have these files of a folder, as far as they are there, survive a power cut. Raises OSError."""
    for name in names:
        with suppress(FileNotFoundError), (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
