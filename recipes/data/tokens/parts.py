"""A part of a source, tokenized by one of many machines. Each slice of the part becomes a few files beside the folder
of shards, which recipes/data/tokens/join.py then cuts as one machine would have:

    plan.json              the slices, and what all parts must agree on
    00000-tokens.npy       the tokens of all documents of the slice, each with its end-of-document token
    00000-sizes.npy        of each row: characters, tokens, and how many rows it stands for
    00000-rows.npy         of each row: where it is from, the place after it, the hash of its text, and what it is
    00000-bad.jsonl        rows without usable text, with the reason; absent if there are none
    00000.json             counts and checksums. Written last: without it there is no slice

Imports no torch."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallel.errors import UserError
from recipes.data.text.plain_text import text_rule
from recipes.data.text.row import File, Place, Row
from recipes.data.text.rows import open_rows
from recipes.data.text.sources import document_hash, find_files, require_unchanged
from recipes.data.text.tokenizer import parallel_tokenizers
from recipes.data.tokens.prepare import Batch, encoder, tokenized
from recipes.data.tokens.shard_writer import ArrayWriter, token_type_of
from recipes.data.tokens.shards import array_path, bad_rows_path, shard_path
from recipes.data.tokens.slices import (
    Plan,
    plan_for,
    read_plan,
    require_same,
    rows_before_the_next,
    rows_of,
    write_plan,
)
from recipes.data.tokens.workspace import Pieces, Preparation, alone, claimed, publish

TOKENS, SIZES, ROWS = "tokens", "sizes", "rows"
SIZE = np.dtype([("characters", "<u4"), ("tokens", "<u4"), ("rows", "<u4")])
ROW = np.dtype(
    [
        ("file", "<u4"),
        ("number", "<u8"),
        ("place_file", "<u4"),
        ("place_number", "<u8"),
        ("offset", "<u8"),
        ("hash", "<u8"),
        ("kind", "u1"),
    ]
)
TEXT, EMPTY, BAD = range(3)


@dataclass(frozen=True)
class Tokenized:
    """What is known of a slice that is tokenized."""

    rows: int
    tokens: int
    bad: int
    """Bad rows, and rows lost with a part of a file."""
    rows_before_the_next: int
    """Added to the numbers of rows in later stretches of the same file."""
    checksums: dict[str, str] = field(default_factory=dict)


class Source(NamedTuple):
    """The files of a source, as they were when the work began."""

    files: Sequence[File]
    where: Callable[[Row], str]
    """The file and number of a row, for messages."""

    @property
    def names(self) -> list[str]:
        return [str(file) for file in self.files]


def parts_folder(folder: Path) -> Path:
    """The folder of the parts of the shards in a folder, until they are joined."""
    return folder.with_name(f"{folder.name}.parts")


def begin(folder: Path, work: Preparation, *, parts: int, slice_bytes: int | None = None) -> tuple[Plan, Source]:
    """The plan that all parts in this folder have, made by the first of them, and the source. Raises UserError if they
    were begun with something else."""
    rows = open_rows(work.source, text_field=work.text_field, text_documents=work.text_documents)
    files = find_files(work.source)
    if not list(rows.files) == list(map(str, files)) == list(work.states):
        raise UserError(f"data.source: files of {work.source!r} appeared or disappeared just now; start again")
    if (plan := read_plan(folder)) is None:
        with claimed(folder, fingerprint=work.fingerprint, tokenizer=work.tokenizer.json), alone(folder):
            if (plan := read_plan(folder)) is None:
                plan = plan_for(work, files, parts=parts, slice_bytes=slice_bytes)
                write_plan(folder, plan)
    require_same(folder, plan, work, files)
    return plan, Source(files, rows.where)


def write_slices(
    folder: Path,
    numbers: Sequence[int],
    plan: Plan,
    work: Preparation,
    *,
    source: Source,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Iterator[Tokenized]:
    """Tokenize these slices, except those that are there, yielding each when it is whole. Any number of processes may
    do so, also with the same numbers.

    Args:
        folder: from parts_folder().
        numbers: of the plan's slices.
        plan, source: from begin().
        progress: called after each batch with the number of tokens so far.
    """
    files = source.files
    encode = encoder(work, where=source.where)
    rule, done = text_rule(files, work.text_documents), 0
    with claimed(folder, fingerprint=work.fingerprint, tokenizer=work.tokenizer.json) as part, parallel_tokenizers():
        for number in numbers:
            if read_tokenized(folder, number) is not None:
                continue
            piece = plan.slices[number]
            rows = rows_of(piece, files, plan.sizes, text_field=work.text_field, rule=rule)
            with (
                closing(tokenized(_batches(rows, work.pieces), encode, work.pieces)) as batches,
                closing(_SliceWriter(part, work)) as writer,
            ):
                for batch in batches:
                    writer.add(batch)
                    progress(done + writer.tokens)
                last = piece.file + max(1, piece.files)
                found = writer.finish(rows_before_the_next(piece, files))
                require_unchanged([str(file) for file in files[piece.file : last]], work.states)
            _publish(folder, number, found, part)
            done += found.tokens
            yield found


def read_tokenized(folder: Path, number: int) -> Tokenized | None:
    """What is known of a slice; None if it is missing, or its files are not as long as they should be."""
    try:
        found = Tokenized(**json.loads(shard_path(folder, number).read_text(encoding="utf-8")))
        lengths = {TOKENS: found.tokens, SIZES: found.rows, ROWS: found.rows}
        if any(SliceFile(array_path(folder, number, kind)).length != length for kind, length in lengths.items()):
            return None
        return found if not found.bad or bad_rows_path(folder, number).exists() else None
    except (FileNotFoundError, ValueError, TypeError):
        return None


class SliceFile:
    """An array in a file. Not mapped: a file system of many machines may take a mapped file away, which kills."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if the file is damaged."""
        self.path = path
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            (self.length,), _, self.dtype = np.lib.format.read_array_header_1_0(file)
            self._header = file.tell()
        if path.stat().st_size != self._header + self.length * self.dtype.itemsize:
            raise ValueError(f"'{path}' is damaged")

    def read(self, begin: int, end: int) -> np.ndarray:
        offset = self._header + begin * self.dtype.itemsize
        return np.fromfile(self.path, dtype=self.dtype, count=end - begin, offset=offset)


def _batches(rows: Iterator[tuple[Row, Place]], pieces: Pieces) -> Iterator[tuple[list[Row], Any]]:
    """Rows that are worth a call of the tokenizer, and of each its characters and the place after it."""
    batch: list[Row] = []
    places: list[tuple[int, Place]] = []
    size = 0
    for row, place in rows:
        batch.append(row)
        places.append((len(row.text), place))
        size += len(row.text)
        if size >= pieces.batch_characters or len(batch) >= pieces.batch_rows:
            yield batch, places
            batch, places, size = [], [], 0
    yield batch, places


class _SliceWriter:
    """The files of one slice while it is tokenized."""

    def __init__(self, part: Path, work: Preparation) -> None:
        types = {TOKENS: token_type_of(work), SIZES: SIZE, ROWS: ROW}
        self._files = {kind: ArrayWriter((part / kind).open("wb"), dtype) for kind, dtype in types.items()}
        self._bad_file = (part / "bad").open("w", encoding="utf-8")
        self._bad = 0

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._bad_file.close()

    @property
    def tokens(self) -> int:
        return self._files[TOKENS].length

    def add(self, batch: Batch) -> None:
        sizes, rows = [], []
        documents = iter(batch.documents)
        for row, (characters, place) in zip(batch.rows, batch.cursor, strict=True):
            tokens = number = 0
            if row.problem:
                self._bad += row.lost
                self._bad_file.write(json.dumps([row.problem, row.lost]) + "\n")
            elif row.has_text:
                tokens, number = len(next(documents)), document_hash(row.text)
            kind = BAD if row.problem else TEXT if tokens else EMPTY
            sizes.append((characters, tokens, row.lost if row.problem else 1))
            rows.append((row.file, row.number, *place, number, kind))
        self._files[TOKENS].extend(batch.documents)
        self._files[SIZES].extend([np.array(sizes, dtype=SIZE)])
        self._files[ROWS].extend([np.array(rows, dtype=ROW)])

    def finish(self, rows_before_the_next: int) -> Tokenized:
        checksums = {kind: file.finish() for kind, file in self._files.items()}
        return Tokenized(self._files[ROWS].length, self.tokens, self._bad, rows_before_the_next, checksums)


def _publish(folder: Path, number: int, found: Tokenized, part: Path) -> None:
    """Move the files of a slice to their place; a faster process may have, and its files are the same."""
    with alone(folder):
        if read_tokenized(folder, number) is None:
            for kind in (TOKENS, SIZES, ROWS):
                (part / kind).replace(array_path(folder, number, kind))
            if found.bad:
                (part / "bad").replace(bad_rows_path(folder, number))
            publish(part, shard_path(folder, number), json.dumps(asdict(found)))
