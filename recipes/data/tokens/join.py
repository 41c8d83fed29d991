"""Joins the tokenized slices of a source to its shards: the same bytes as from one machine, by copying. Where shards
end follows from the characters and tokens of the rows alone, so any number of processes can write them at once. Imports
no torch."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import numpy as np

from parallel.errors import UserError
from recipes.data.text.row import Place, Row
from recipes.data.tokens.parts import BAD, EMPTY, ROWS, SIZES, TEXT, TOKENS, SliceFile, read_tokenized
from recipes.data.tokens.shard_writer import ShardWriter, held_out_below, publish_index, publish_shard
from recipes.data.tokens.shards import (
    DOCUMENT,
    DOCUMENTS,
    TRAIN,
    VALIDATION,
    BadRowBudget,
    Shard,
    array_path,
    bad_rows_path,
    read_shard,
)
from recipes.data.tokens.slices import Plan
from recipes.data.tokens.workspace import Pieces, Preparation, claimed, whole_shards

ROWS_AT_A_TIME = 1 << 12
"""Some tens of megabytes of tokens."""


def missing(parts: Path, plan: Plan) -> list[int]:
    """The slices that are not tokenized yet."""
    return [number for number in range(len(plan.slices)) if read_tokenized(parts, number) is None]


def state(parts: Path, plan: Plan) -> tuple[list[str], list[str]]:
    """How much of each part is there, in words, and the names of those that are not whole."""
    lacking = {*missing(parts, plan)}
    whole = len(plan.slices) - len(lacking)
    lines = [f"{whole} of {len(plan.slices)} slices are whole" + ("" if lacking else ": --join is next")]
    unfinished = []
    for number in range(1, plan.parts + 1):
        mine = {*plan.part(number, plan.parts)}
        size, there = (sum(plan.slices[index].size for index in some) for some in (mine, mine - lacking))
        name = f"{number}/{plan.parts}"
        lines.append(f"part {name}: {len(mine - lacking)} of {len(mine)} slices, {there / max(1, size):.0%}")
        if mine & lacking:
            unfinished.append(name)
    return lines, unfinished


def join(
    folder: Path,
    parts: Path,
    plan: Plan,
    work: Preparation,
    *,
    files: Sequence[str],
    budget: BadRowBudget,
    threads: int = 1,
    share: tuple[int, int] = (1, 1),
    progress: Callable[[int, int], None] = lambda done, shards: None,
) -> int:
    """Write the shards of a source whose slices are all tokenized, and the index if no shard is missing then. Returns
    the number of shards that other processes have still to write. Raises UserError if too many rows are bad.

    Args:
        folder: that of the shards.
        parts: the folder of the slices.
        plan: from parts.begin().
        files: names of the source's files.
        budget: counts bad rows when all shards are there.
        threads: how many shards to write at once.
        share: number and count of the processes that share the shards.
        progress: called after each shard with how many are there, and how many there will be.
    """
    source = _Slices(parts, plan)
    ends = shard_ends((source.sizes(number) for number in range(len(plan.slices))), work.pieces)
    with claimed(folder, fingerprint=work.fingerprint, tokenizer=work.tokenizer.json) as part:
        whole = len(whole_shards(folder))
        mine = [number for number in range(len(ends)) if number % share[1] == share[0] - 1]

        def write(number: int) -> None:
            if number >= whole and read_shard(folder, number) is None:
                begin, last = ends[number - 1] if number else 0, number == len(ends) - 1
                unfinished = part / f"{number:05d}"
                unfinished.mkdir()
                shard = _shard(source, begin, ends[number], work, names=files, part=unfinished, last=last)
                publish_shard(folder, number, shard, unfinished, source=work.source)
                shutil.rmtree(unfinished)

        with ThreadPoolExecutor(threads, thread_name_prefix="join") as pool:
            for done, _ in enumerate(pool.map(write, mine), start=1):
                progress(done, len(mine))
        shards = whole_shards(folder)
        if len(shards) == len(ends):
            budget.count(shards)
            publish_index(folder, work, files=files, shards=shards, part=part)
        return sum(read_shard(folder, number) is None for number in range(len(ends)))


def remove_parts(parts: Path) -> None:
    """Delete the tokenized slices: the shards hold all that they hold."""
    with suppress(FileNotFoundError):
        shutil.rmtree(parts)


def shard_ends(slices: Iterable[np.ndarray], pieces: Pieces) -> list[int]:
    """The rows before the end of each shard, counted over all slices. slices: the SIZES of each. One machine ends a
    batch with the row that fills it, and a shard with the batch that fills it (Pieces)."""
    ends: list[int] = []
    passed = characters = batch_rows = tokens = rows = 0
    for sizes in slices:
        sums = {name: np.concatenate([[0], np.cumsum(sizes[name], dtype=np.int64)]) for name in sizes.dtype.names or ()}
        at = 0
        while at < len(sizes):
            full = np.searchsorted(sums["characters"], sums["characters"][at] + pieces.batch_characters - characters)
            stop = min(int(full), at + pieces.batch_rows - batch_rows)
            is_full, stop = stop <= len(sizes), min(stop, len(sizes))
            found = {name: int(sums_[stop] - sums_[at]) for name, sums_ in sums.items()}
            characters, batch_rows = characters + found["characters"], batch_rows + stop - at
            tokens, rows = tokens + found["tokens"], rows + found["rows"]
            at = stop
            if is_full:
                characters = batch_rows = 0
                if tokens >= pieces.shard_tokens(len(ends)) or rows >= pieces.shard_rows:
                    ends.append(passed + at)
                    tokens = rows = 0
        passed += len(sizes)
    return ends if ends and ends[-1] == passed else [*ends, passed]


class _Slices:
    """All slices of a source as one row of rows."""

    def __init__(self, parts: Path, plan: Plan) -> None:
        self._parts = parts
        found = []
        for number in range(len(plan.slices)):
            if (one := read_tokenized(parts, number)) is None:
                raise UserError(f"'{array_path(parts, number, TOKENS)}' is gone or damaged; run its part again")
            found.append(one)
        self._ends = np.cumsum([0, *(one.rows for one in found)], dtype=np.int64)
        self._before: list[int] = []  # rows of the same file before each slice, where its rows are not numbered so
        for number, piece in enumerate(plan.slices):
            follows = piece.files == 0 and piece.begin > 0
            before = self._before[-1] + found[number - 1].rows_before_the_next if follows else 0
            self._before.append(before)

    def sizes(self, number: int) -> np.ndarray:
        return self._file(number, SIZES).read(0, int(self._ends[number + 1] - self._ends[number]))

    def rows(self, begin: int, end: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, list[Row]]]:
        """(ROWS with final numbers, SIZES, tokens, bad rows) of the rows begin .. end - 1, some at a time."""
        while begin < end:
            number = int(np.searchsorted(self._ends, begin, side="right")) - 1
            first, stop = (
                begin - int(self._ends[number]),
                min(end, int(self._ends[number + 1])) - int(self._ends[number]),
            )
            yield from self._of_slice(number, first, stop)
            begin += stop - first

    def place(self, row: int) -> Place:
        """The place after a row."""
        rows, *_ = next(self.rows(row, row + 1))
        return Place(int(rows["place_file"][0]), int(rows["place_number"][0]), int(rows["offset"][0]))

    def _of_slice(
        self, number: int, begin: int, end: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, list[Row]]]:
        rows_file, sizes_file, tokens_file = (self._file(number, kind) for kind in (ROWS, SIZES, TOKENS))
        at = int(sizes_file.read(0, begin)["tokens"].sum(dtype=np.int64))
        bad = self._bad(number, int((rows_file.read(0, begin)["kind"] == BAD).sum()))
        for first in range(begin, end, ROWS_AT_A_TIME):
            stop = min(end, first + ROWS_AT_A_TIME)
            rows, sizes = rows_file.read(first, stop), sizes_file.read(first, stop)
            same_file = rows["place_file"] == rows["file"]  # not after the last row of a file that breaks off
            rows["number"] += np.uint64(self._before[number])
            rows["place_number"][same_file] += np.uint64(self._before[number])
            length = int(sizes["tokens"].sum(dtype=np.int64))
            tokens = tokens_file.read(at, at + length)
            if (len(rows), len(sizes), len(tokens)) != (stop - first, stop - first, length):
                raise UserError(f"'{tokens_file.path}' and the files beside it became shorter; run its part again")
            found = [Row("", int(row["file"]), int(row["number"]), *next(bad)) for row in rows[rows["kind"] == BAD]]
            yield rows, sizes, tokens, found
            at += length

    def _file(self, number: int, kind: str) -> SliceFile:
        return SliceFile(array_path(self._parts, number, kind))

    def _bad(self, number: int, skip: int) -> Iterator[tuple[str, int]]:
        """The reason of each bad row in a slice, and how many rows are lost with it, after so many of them."""
        if not bad_rows_path(self._parts, number).exists():
            return
        with bad_rows_path(self._parts, number).open(encoding="utf-8") as lines:
            for index, line in enumerate(lines):
                if index >= skip:
                    problem, lost = json.loads(line)
                    yield problem, lost


def _shard(
    source: _Slices, begin: int, end: int, work: Preparation, *, names: Sequence[str], part: Path, last: bool
) -> Shard:
    """Write the files of the shard of the rows begin .. end - 1."""
    below = np.uint64(held_out_below(work.validation_fraction))
    with closing(ShardWriter(part, work, names)) as writer:
        for rows, sizes, tokens, bad in source.rows(begin, end):
            has_text = rows["kind"] == TEXT
            held_out = has_text & (rows["hash"] < below)
            train = has_text & ~held_out
            records = np.empty(int(train.sum()), dtype=DOCUMENT)
            records["end"] = writer.train + np.cumsum(sizes["tokens"][train], dtype=np.int64)
            records["file"], records["row"] = rows["file"][train], rows["number"][train]
            arrays = {TRAIN: [tokens], VALIDATION: [], DOCUMENTS: [records]}
            if held_out.any():
                of_validation = np.repeat(held_out, sizes["tokens"])
                arrays |= {TRAIN: [tokens[~of_validation]], VALIDATION: [tokens[of_validation]]}
            hashes = rows["hash"][has_text]
            writer.extend(
                arrays,
                held_out=int(held_out.sum()),
                empty=int((rows["kind"] == EMPTY).sum()),
                hashes=[int(hashes.min()), int(hashes.max())] if len(hashes) else [],
            )
            for row in bad:
                writer.note(row)
        return writer.finish(cursor=(source.place(end - 1) if end else Place(0))._asdict(), last=last)
