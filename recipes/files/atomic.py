"""Small files that survive kills, full disks and power cuts: replaced texts and appended lines. Imports no torch."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

PART = ".part-"
"""Prefix of the names of unfinished texts; a kill may leave one behind."""
BLOCK = 4096
"""Bytes of a file that are read at a time, from its end."""
SETTLED = 1 << 20
"""Bytes of whole rows of wanted steps, before which no others are looked for: about a thousand rows. Rows are nearly in
order: a skipped step has its row when the next step is logged, and old versions kept the rows of repeated steps."""

Value = TypeVar("Value")


def utc_of(seconds: float) -> str:
    """The time so many seconds after the beginning of 1970, as in "2026-11-26T08:20:31Z"."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def utc_now() -> str:
    """The time that logs, metrics and attempts note."""
    return utc_of(time.time())


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
    replace(file, lambda out: out.write(text.encode()), sync=sync)


def replace(file: Path, write: Callable[[BinaryIO], object], *, sync: bool) -> None:
    """Replace a file with what `write` writes, as write_whole() does; if that raises, leave the old one."""
    part = file.with_name(f"{PART}{platform.node()}-{os.getpid()}-{file.name}")
    try:
        with part.open("wb") as out:
            write(out)
            out.flush()
            if sync:
                os.fsync(out.fileno())
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
        size = file.seek(0, os.SEEK_END)
        end = next((start for start, _ in _lines_from_the_end(file, size)), 0)  # of the last whole line
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
    exists. Looks at no more than its end: what was written before the checkpoint of `step` was synced before it, so
    that even a power cut damages only rows after it. Raises OSError."""
    if not path.exists():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        end, kept = _end_of_rows(file, size, step)
        if kept:

            def write(out: BinaryIO) -> None:
                file.seek(0)
                for start in range(0, end, SETTLED):
                    out.write(file.read(min(SETTLED, end - start)))
                out.write(kept)

            replace(path, write, sync=True)
        elif end < size:
            with path.open("rb+") as shortened:
                shortened.truncate(end)
                os.fsync(shortened.fileno())


def _end_of_rows(file: BinaryIO, size: int, step: int) -> tuple[int, bytes]:
    """The start of the first line that must go, and the rows after it that must stay."""
    end = size
    kept: list[bytes] = []  # after `end`, the last row first
    settled: list[bytes] = []  # the same before it
    for start, line in _lines_from_the_end(file, size):
        if start == size:  # nothing follows the last newline
            continue
        found = _value_in(line.decode(errors="replace"), "step", int)
        if is_wanted := found is not None and found <= step:
            settled.append(line + b"\n")
        if not is_wanted or start + len(line) == size:
            kept += settled
            end, settled = start, []
        elif end - start >= SETTLED:
            break
    return end, b"".join(reversed(kept))


def _lines_from_the_end(file: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
    """Start and content of each line, without its newline, the last one first."""
    parts: list[bytes] = []
    end = size
    while end:
        begin = max(0, end - BLOCK)
        file.seek(begin)
        pieces, at = file.read(end - begin).split(b"\n"), end
        while len(pieces) > 1:
            parts.append(pieces.pop())
            at -= len(parts[-1])
            yield at, b"".join(reversed(parts))
            at, parts = at - 1, []
        parts.append(pieces[0])
        end = begin
    if size:
        yield 0, b"".join(reversed(parts))


def keep_rows(path: Path, wanted: Callable[[str], bool]) -> int:
    """Keep the rows of a .jsonl file whose source is wanted; without any, remove it. Returns how many there are. Raises
    OSError."""
    if not path.exists():
        return 0
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if (source := _value_in(line, "source", str)) is not None and wanted(source)]
    if rows:
        write_whole(path, "".join(f"{row}\n" for row in rows), sync=True)
    else:
        path.unlink()
    return len(rows)


def _value_in(row: str, name: str, kind: type[Value]) -> Value | None:
    """The value in a row; None if there is none of this kind, or the line is not a row, as after a power cut."""
    try:
        value = json.loads(row)[name]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return value if type(value) is kind else None


def sync(folder: Path, names: Iterable[str]) -> None:
    """Sync those of these files that exist, and the folder, so that they survive a power cut. Raises OSError."""
    for name in names:
        with suppress(FileNotFoundError), (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
