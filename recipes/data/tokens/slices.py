"""A source divided into slices, which many machines tokenize: the division depends only on the source, so the machines
may be any number, and may change. Large files are divided where a row can be found without reading those before it:
.jsonl at lines, .parquet at row groups. Other files stay whole. Imports no torch."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from parallel.errors import TemporaryError, UserError
from recipes.data.text.readers import read_file
from recipes.data.text.row import BROKEN, UNREADABLE, Fields, File, Place, Row, TextRule, names_of
from recipes.data.text.sources import file_size
from recipes.data.tokens.workspace import Preparation, options_of
from recipes.files.atomic import write_whole

PLAN = "plan.json"
VERSION = 1
SMALLEST_SLICE, MOST_SLICES = 1 << 20, 4096
"""A slice is a share of the source, at least of this size: few files, and hundreds of machines with equal work."""
UNCOUNTED = 1 << 40
"""Rows of a stretch are numbered from here: how many rows come before it is known only when all are tokenized."""
PIECE = 1 << 20


class Slice(NamedTuple):
    """Some whole files, or a stretch of one file."""

    file: int
    """The first file."""
    files: int
    """How many whole files; 0 = a stretch of one."""
    begin: int
    """The first byte of a stretch; for parquet, the rows before it."""
    end: int
    size: int
    """Bytes, to give all machines equally much."""


@dataclass(frozen=True)
class Plan:
    """plan.json: what all machines must agree on."""

    version: int
    fingerprint: str
    """Preparation.fingerprint: of the files' contents and all settings."""
    fields: str
    """The options that name what is read of a row."""
    text_documents: str
    tokenizer: str
    validation_fraction: float
    parts: int
    """How many parts there were to be when the first began."""
    sizes: tuple[int, ...]
    """Bytes of each file."""
    slices: tuple[Slice, ...]

    def part(self, number: int, parts: int) -> list[int]:
        """The slices of part 1, 2, ..., parts: neighbours, with about the same number of bytes in each part."""
        total = sum(piece.size for piece in self.slices)
        found, passed = [], 0
        for index, piece in enumerate(self.slices):
            if min(parts - 1, (2 * passed + piece.size) * parts // max(1, 2 * total)) == number - 1:
                found.append(index)
            passed += piece.size
        return found


def plan_for(work: Preparation, files: Sequence[File], *, parts: int, slice_bytes: int | None = None) -> Plan:
    """The division of a source. slice_bytes: about the size of a slice."""
    sizes = [file_size(file) for file in files]
    limit = slice_bytes or max(SMALLEST_SLICE, sum(sizes) // MOST_SLICES)
    return Plan(
        VERSION,
        work.fingerprint,
        options_of(work.text_field),
        work.text_documents,
        work.tokenizer.fingerprint,
        work.validation_fraction,
        parts,
        tuple(sizes),
        tuple(_slices(files, sizes, limit, work.text_field)),
    )


def write_plan(folder: Path, plan: Plan) -> None:
    write_whole(folder / PLAN, json.dumps(asdict(plan)))


def read_plan(folder: Path) -> Plan | None:
    """The plan in a folder; None if there is none of this version."""
    try:
        content = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            return None
        slices = tuple(Slice(*piece) for piece in content.pop("slices"))
        return Plan(**content | {"sizes": tuple(content["sizes"])}, slices=slices)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def require_same(folder: Path, plan: Plan, work: Preparation, files: Sequence[File]) -> None:
    """Raises UserError, naming the difference, if the parts in this folder were begun with something else."""
    begun = f"the parts in '{folder}' were begun with"
    otherwise = "give the same to all parts, or another folder"
    for option, there, here in (
        ("", plan.fields, options_of(work.text_field)),
        ("--text-documents ", plan.text_documents, work.text_documents),
        ("--validation-fraction ", plan.validation_fraction, work.validation_fraction),
    ):
        if there != here:
            raise UserError(f"{begun} {option}{there}, not {option}{here}; {otherwise}")
    if plan.tokenizer != work.tokenizer.fingerprint:
        raise UserError(f"{begun} another --tokenizer or --bos; {otherwise}")
    if len(files) != len(plan.sizes):
        raise UserError(f"{begun} {len(plan.sizes)} files, but {work.source!r} has {len(files)} here; {otherwise}")
    for file, size in zip(files, plan.sizes, strict=True):
        if (now := file_size(file)) != size:
            raise UserError(f"{begun} {size:,} bytes in '{file}', which has {now:,} now; {otherwise}")
    if plan.fingerprint != work.fingerprint:
        raise UserError(
            f"{begun} files of other names, contents or (beyond 1 GB) modification times than {work.source!r} has here;"
            f" copy them with their times (cp -p, rsync -t), or give another folder"
        )


def rows_of(
    piece: Slice, files: Sequence[File], sizes: Sequence[int], *, text_field: Fields, rule: TextRule
) -> Iterator[tuple[Row, Place]]:
    """The rows of a slice, each with the place after it, as one machine reads them, but for the numbers of rows in a
    stretch of lines. Raises TemporaryError for a file that cannot be read now: one machine would go on without it."""
    read = partial(read_file, text_field=text_field, rule=rule)
    if piece.files:
        for index in range(piece.file, piece.file + piece.files):
            for row, place in read(files[index], start=Place(index), size=sizes[index]):
                _require_readable(row, files)
                yield row, place
        return
    counted = _has_row_groups(files[piece.file])
    start = Place(piece.file, piece.begin) if counted else Place(piece.file, UNCOUNTED, piece.begin)
    start = start if piece.begin else Place(piece.file)
    for row, place in read(files[piece.file], start=start, size=sizes[piece.file]):
        _require_readable(row, files)
        if place.file != piece.file:
            raise UserError(
                f"data.source: '{files[piece.file]}': {row.problem}; repair it, leave it out, or prepare the source on"
                " one machine, which counts what is lost as bad rows"
            )
        at = place.number if counted else place.offset
        if at > piece.end:
            return
        yield (row, place) if counted or not piece.begin else _from_zero(row, place)
        if at == piece.end:
            return


def rows_before_the_next(piece: Slice, files: Sequence[File]) -> int:
    """The amount by which row numbers in the next stretch of the same file are higher than in this one."""
    if piece.files or _has_row_groups(files[piece.file]):
        return 0
    lines, left = 0, piece.end - piece.begin
    with files[piece.file].open("rb") as file:
        file.seek(piece.begin)
        while left and (data := file.read(min(left, PIECE))):
            lines += data.count(b"\n")
            left -= len(data)
    return lines


def _from_zero(row: Row, place: Place) -> tuple[Row, Place]:
    return row._replace(number=row.number - UNCOUNTED), place._replace(number=place.number - UNCOUNTED)


def _require_readable(row: Row, files: Sequence[File]) -> None:
    if row.kind == UNREADABLE:
        raise TemporaryError(f"data.source: '{files[row.file]}': {row.problem}; the same command continues")


def _slices(files: Sequence[File], sizes: Sequence[int], limit: int, text_field: Fields) -> Iterator[Slice]:
    first, size = 0, 0
    for index, (file, bytes_) in enumerate(zip(files, sizes, strict=True)):
        stretches = _stretches(index, file, bytes_, limit, text_field) if bytes_ >= 2 * limit else []
        if len(stretches) > 1:
            if first < index:
                yield Slice(first, index - first, 0, 0, size)
            yield from stretches
            first, size = index + 1, 0
        elif (size := size + bytes_) >= limit:
            yield Slice(first, index + 1 - first, 0, 0, size)
            first, size = index + 1, 0
    if first < len(files):
        yield Slice(first, len(files) - first, 0, 0, size)


def _stretches(index: int, file: File, size: int, limit: int, text_field: Fields) -> list[Slice]:
    """The stretches of a file; none if it cannot be divided."""
    try:
        if _has_row_groups(file):
            return list(_row_groups(index, file, size, limit, text_field))
        if file.name.lower().endswith(".jsonl"):
            ends = [*_line_starts(file, size, limit), size]
            return [Slice(index, 0, begin, end, end - begin) for begin, end in zip([0, *ends], ends, strict=False)]
    except BROKEN as error:  # stays whole: where it is broken is told when it is read
        if isinstance(error, MemoryError):
            raise
    return []


def _line_starts(file: File, size: int, limit: int) -> Iterator[int]:
    """The beginnings of lines, about so many bytes apart."""
    at = limit
    with file.open("rb") as lines:
        while at < size:
            lines.seek(at - 1)
            while (line := lines.readline(PIECE)) and not line.endswith(b"\n"):
                pass
            if lines.tell() >= size:
                return
            yield lines.tell()
            at = lines.tell() + limit


def _row_groups(index: int, file: File, size: int, limit: int, text_field: Fields) -> Iterator[Slice]:
    import pyarrow.parquet

    with file.open("rb") as content, pyarrow.parquet.ParquetFile(content) as table:
        total = table.metadata.num_rows
        if not {*names_of(text_field)} <= {*table.schema_arrow.names}:
            return
        begin = end = 0
        for group in range(table.num_row_groups):
            end += table.metadata.row_group(group).num_rows
            if end > begin and ((end - begin) * size >= limit * total or end == total):
                yield Slice(index, 0, begin, end, (end - begin) * size // total)
                begin = end


def _has_row_groups(file: File) -> bool:
    return file.name.lower().endswith(".parquet")
