"""Small files that survive kills, full disks and power cuts: replaced texts and appended lines. Imports no torch."""

import json
import os
import platform
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

PART = ".part-"
"""Prefix of the names of unfinished texts; a kill may leave one behind."""
BLOCK = 4096


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(file: Path, text: str, *, sync: bool = False) -> None:
    """Replace a file atomically: a reader finds the whole new text or the old one, also when two processes write it.
    sync: also after a power cut; not needed for what can be made again from other files."""
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
        size = file.seek(0, os.SEEK_END)
        end = _end_of_lines(file, size)
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


def _end_of_lines(file: BinaryIO, size: int) -> int:
    """The position after the last whole line of a file of this size."""
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
    """Remove partial rows, and rows of steps after `step`, which a resumed run repeats, from a .jsonl file if it
    exists. Raises OSError."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    kept = "".join(row + "\n" for row in text.splitlines() if (found := _step_of(row)) is not None and found <= step)
    if kept != text:
        write_whole(path, kept, sync=True)


def _step_of(row: str) -> int | None:
    """The step of a row; None if the line is not a row, as after a power cut."""
    try:
        step = json.loads(row)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if type(step) is int else None


def sync(folder: Path, names: Iterable[str]) -> None:
    """Sync those of these files that exist, and the folder, so that they survive a power cut. Raises OSError."""
    for name in names:
        with suppress(FileNotFoundError), (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
