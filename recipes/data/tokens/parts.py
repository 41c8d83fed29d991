"""A source divided into parts, which as many machines tokenize at once, each into shards with numbers of its own in the
same folder. parts.json says where the parts begin: the first machine decides it for all. Large files are divided where
a row can be found without reading those before it: .jsonl at lines, .parquet at row groups.

Imports no torch.
"""

import json
from bisect import bisect_right
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from parallel.errors import UserError
from recipes.data.text.row import BROKEN, PIECE, Fields, File, Place, names_of
from recipes.data.text.sources import find_files
from recipes.data.tokens.shards import INDEX, OWNER, PART_SHARDS, PARTS, Shard, read_shard, shards_from
from recipes.data.tokens.workspace import Preparation, alone, damage, publish, remove_from
from recipes.files.reading import fault, user_path

DIVIDED = 64
"""A file is divided if it is larger than this fraction of a part. Others stay whole, and the parts are nearly equal."""

NAMED = 20
"""Missing parts in a message."""

AT_ONCE = 8
"""Shards that are read at a time to verify them."""


class Part(NamedTuple):
    """One of several parts of a source; usually the only one."""

    number: int = 1
    of: int = 1

    @property
    def first(self) -> int:
        """The number of its first shard."""
        return self.number * PART_SHARDS if self.of > 1 else 0

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


ALL = Part()


class Cut(NamedTuple):
    """A place between two rows, where one part ends and the next begins."""

    file: int
    at: int = 0
    """Bytes before it in a .jsonl file, rows before it in a .parquet file; 0 = between two files."""
    read: int = 0
    """Bytes of the source before it, about."""


def ends_of(folder: Path, work: Preparation, *, part: Part, unfinished: Path) -> tuple[Cut, Cut]:
    """Where this part begins and ends. unfinished: from claimed(). Raises UserError if the folder was begun with
    another number of parts."""
    with alone(folder):
        cuts = read_cuts(folder)
        if not cuts and part.of > 1 and read_shard(folder, 0) is None:
            cuts = _cuts(work, part.of)
            publish(unfinished, folder / PARTS, json.dumps(cuts))
    count = max(1, len(cuts) - 1)
    if count != part.of:
        begun, go_on = f"as {count} parts", f"with --part I/{count}"
        if count == 1:
            begun, go_on = "without --part", "without it"
        raise UserError(f"'{folder}' was begun {begun}; go on {go_on}, or give another folder")
    return (cuts[part.number - 1], cuts[part.number]) if cuts else (Cut(0), Cut(len(work.states)))


def read_cuts(folder: Path) -> list[Cut]:
    """Where the parts in a folder begin, and where the last ends; empty if it has none. Raises UserError."""
    try:
        cuts = [Cut(*cut) for cut in json.loads((folder / PARTS).read_text(encoding="utf-8"))]
        if len(cuts) < 3 or not all(type(number) is int for cut in cuts for number in cut):
            raise ValueError("not the beginnings of two parts or more, and the end")
        return cuts
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"'{folder / PARTS}' is damaged; remove '{folder}', and prepare it again") from None


def place_of(cut: Cut, work: Preparation) -> Place:
    """The place at which to read on. The lines before it are counted: rows have the numbers that one machine gives.
    Raises TemporaryError if they cannot be read."""
    if not cut.at or (file := find_files(work.source)[cut.file]).name.lower().endswith(".parquet"):
        return Place(cut.file, cut.at)
    lines, left = 0, cut.at
    try:
        with file.open("rb") as content:
            while left and (data := content.read(min(left, PIECE))):
                lines += data.count(b"\n")
                left -= len(data)
    except OSError as error:
        raise fault(f"data.source: cannot read '{file}' now", error) from error
    return Place(cut.file, lines, cut.at)


def parts_in(folder: Path) -> dict[Part, list[Shard]]:
    """The shards that are there of each part in a folder; empty if it has no parts. Raises UserError."""
    count = len(read_cuts(folder)) - 1
    parts = [Part(number, count) for number in range(1, count + 1)]
    return {part: [*shards_from(folder, part.first)] for part in parts}


def whole_parts(folder: Path) -> list[Shard] | None:
    """The shards of all parts in order; None if one is not whole."""
    parts = parts_in(folder).values()
    return [shard for shards in parts for shard in shards] if parts and all(map(_is_whole, parts)) else None


def require_intact(folder: Path, *, besides: Collection[int]) -> None:
    """Compare every byte of all parts, once all are whole, with its checksum. Raises UserError for a damaged one, whose
    shards are removed from there on, so that its command makes them again. besides: shards that were just written."""
    if not whole_parts(folder):
        return
    every = ((part, shard) for part, shards in parts_in(folder).items() for shard in shards)
    others = [(part, shard) for part, shard in every if shard.number not in besides]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="verify") as pool:
        problems = [*pool.map(partial(damage, folder), [shard for _, shard in others])]
    for (part, shard), problem in zip(others, problems, strict=True):
        if problem:
            remove_from(folder, shard.number)
            raise UserError(f"part {part} in '{folder}' is damaged: {problem}; make it again with --part {part}")


def missing_parts(folder: Path) -> str:
    """The names of the parts in a folder that are not whole, for messages."""
    names = [str(part) for part, shards in parts_in(folder).items() if not _is_whole(shards)]
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def unfinished_problem(source: str) -> str | None:
    """What a folder lacks that is being prepared in parts, and what to do; None for any other source."""
    folder = user_path(source)
    if (folder / INDEX).is_file() or not all((folder / name).is_file() for name in (OWNER, PARTS)):
        return None
    try:
        lacking = missing_parts(folder)
    except UserError as error:
        return str(error)
    if lacking:
        return f"the preparation of {source!r} lacks part {lacking}; run scripts/prepare_data.py with --part for each"
    return f"the preparation of {source!r} lacks its index; run scripts/prepare_data.py with any --part of it again"


def state(folder: Path, work: Preparation) -> list[str]:
    """How much of each part is there, in words."""
    cuts, lines = read_cuts(folder), list[str]()
    if not cuts and (shards := [*shards_from(folder, ALL.first)]):
        return [f"begun without --part: {len(shards)} shards, {'whole' if _is_whole(shards) else 'not whole'}"]
    before = [0, *accumulate(size for size, _ in work.states.values())]
    for (part, shards), (begins, ends) in zip(parts_in(folder).items(), pairwise(cuts), strict=True):
        share = float(_is_whole(shards))
        if shards and not share:
            place = Place(**shards[-1].cursor)
            read = min(before[place.file] + place.offset, before[min(place.file + 1, len(work.states))])
            share = min(1, max(0, (read - begins.read) / max(1, ends.read - begins.read)))
        tokens = sum(shard.train + shard.validation for shard in shards)
        lines.append(f"part {part}: {share:.0%}, {len(shards)} shards with {tokens:,} tokens")
    return lines


def require_same_files(names: Sequence[str], work: Preparation) -> None:
    """Raises UserError if these are not the files of which the fingerprint was taken."""
    if list(names) != list(work.states):
        raise UserError(f"data.source: files of {work.source!r} appeared or disappeared just now; start again")


def _is_whole(shards: Sequence[Shard]) -> bool:
    return bool(shards) and shards[-1].last


def _cuts(work: Preparation, parts: int) -> list[Cut]:
    """The beginning of each part, and the end of the last, so that all have about equally many bytes."""
    files = find_files(work.source)
    require_same_files([str(file) for file in files], work)
    ends = list(accumulate(size for size, _ in work.states.values()))
    total = ends[-1]
    cuts = [Cut(0)]
    for number in range(1, parts):
        wanted = total * number // parts
        index = min(bisect_right(ends, wanted), len(ends) - 1)
        before = ends[index - 1] if index else 0
        size = ends[index] - before
        divided = None
        if size * DIVIDED * parts > total:
            divided = _divided(files[index], wanted=wanted - before, size=size, text_field=work.text_field)
        at, whole = divided or ((wanted - before) * 2 // max(1, size), 1)  # or the nearer end of the file
        cut = Cut(index + 1, 0, before + size) if at >= whole else Cut(index, at, before + size * at // whole)
        cuts.append(max(cuts[-1], cut))
    return [*cuts, Cut(len(files), 0, total)]


def _divided(file: File, *, wanted: int, size: int, text_field: Fields) -> tuple[int, int] | None:
    """A beginning of a row near so many bytes, in bytes of a .jsonl file or rows of a .parquet file, and how many there
    are in all; None if the file cannot be divided."""
    name = file.name.lower()
    try:
        if name.endswith(".parquet"):
            return _row_group(file, wanted=wanted / size, text_field=text_field)
        return (_line(file, wanted), size) if name.endswith(".jsonl") else None
    except MemoryError:
        raise
    except BROKEN:  # stays whole: where it is broken is told when it is read
        return None


def _line(file: File, wanted: int) -> int:
    """The first beginning of a line from here on, in bytes; the file's end if there is none."""
    if not wanted:
        return 0
    with file.open("rb") as lines:
        lines.seek(wanted - 1)
        while (line := lines.readline(PIECE)) and not line.endswith(b"\n"):
            pass
        return lines.tell()


def _row_group(file: File, *, wanted: float, text_field: Fields) -> tuple[int, int] | None:
    """The rows before the row group that begins nearest to this share of the file, and all rows; None if the file has
    no such field: then all of its rows are lost at once."""
    import pyarrow.parquet

    with file.open("rb") as content, pyarrow.parquet.ParquetFile(content) as table:
        if not {*names_of(text_field)} <= {*table.schema_arrow.names}:
            return None
        rows = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
    begins = [0, *accumulate(rows)]
    return min(begins, key=lambda begin: abs(begin - wanted * begins[-1])), begins[-1]
