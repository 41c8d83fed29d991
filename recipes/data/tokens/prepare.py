"""Makes token shards of rows of text, on all cores. The tokenizers library works in its own threads while the next
batch is read and the previous written. Where batches and shards end depends only on the text, so the bytes are the same
for any number of cores and interruptions. Interrupted work continues after the last whole shard. Imports no torch."""

import json
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeAlias

import numpy as np
import xxhash

from parallel.errors import UserError
from recipes.data.text.row import UNREADABLE, Row
from recipes.data.text.rows import START, RowStream, open_rows
from recipes.data.text.sources import document_hash, is_hub, require_unchanged
from recipes.data.text.tokenizer import CANNOT_ENCODE, Tokenizer, batches_of, parallel_tokenizers
from recipes.data.tokens.parts import ALL, Part, ends_of, place_of, require_intact, require_same_files, whole_parts
from recipes.data.tokens.shards import (
    ARRAYS,
    DOCUMENT,
    DOCUMENTS,
    FORMAT_VERSION,
    INDEX,
    TRAIN,
    VALIDATION,
    Index,
    Shard,
    array_path,
    bad_rows_path,
    read_index,
    read_shard,
    shard_path,
    token_type,
)
from recipes.data.tokens.workspace import Pieces, Preparation, alone, claimed, publish, whole_shards
from recipes.files.border import ForeignError

# Batches tokenized at a time: the second keeps the cores busy while the first runs out of documents.
IN_FLIGHT = 2
HASHES = 2**64
"""Documents have hashes below this; those below the held-out share of it are held out."""
# More characters than this many batches hold are tokenized alone: a token takes about a hundred bytes meanwhile.
LARGE_BATCHES = 4

Encoder: TypeAlias = Callable[[list[Row]], tuple[list[Row], list[np.ndarray]]]
"""Rows -> the rows, with the problems that show only now, and the tokens of each that has text."""


def write_shards(
    folder: Path,
    work: Preparation,
    *,
    part: Part = ALL,
    keep_unread: bool = True,
    check: Callable[[Sequence[Shard]], None] = lambda shards: None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Iterator[Shard]:
    """Write the missing shards, yielding each when it is whole, and finally the index. Any number of processes may do
    so there, also for the same part. Raises UserError if the source cannot be read further or has changed, or the
    folder holds something else; OSError if it cannot be written.

    Args:
        part: write only its shards, and the index if all other parts are whole.
        keep_unread: as in whole_shards().
        check: called with all shards so far, before the index is written; if there are parts, only then.
        progress: called after each batch with the number of tokens so far.
    """
    with claimed(folder, fingerprint=work.fingerprint, tokenizer=work.tokenizer.json) as unfinished:
        begins, ends = ends_of(folder, work, part=part, unfinished=unfinished)
        shards = whole_shards(folder, first=part.first, keep_unread=keep_unread)
        if shards and shards[-1].last and (whole := read_index(folder)) is not None:
            check(whole.shards)
            return
        there = len(shards)
        rows = open_rows(
            work.source,
            text_field=work.text_field,
            text_documents=work.text_documents,
            cursor=shards[-1].cursor if shards else None,
            begin=START if shards else place_of(begins, work),
            end=(ends.file, ends.at),
        )
        if not is_hub(work.source):
            require_same_files(rows.files, work)
        # Closed here: left to the garbage collector, its threads may be joined from inside the start of another thread.
        encode = encoder(work, where=rows.where)
        with parallel_tokenizers(), closing(tokenized(_batches(rows, work.pieces), encode, work.pieces)) as found:
            batches = _counted(found, progress)
            while not (shards and shards[-1].last):
                if part == ALL:
                    check(shards)
                read = slice(shards[-1].cursor["file"] if shards else begins.file, ends.file + 1)
                number = part.first + len(shards)
                shards.append(_write_shard(folder, number, batches, work, files=rows.files, read=read, into=unfinished))
                yield shards[-1]
        require_intact(folder, besides={shard.number for shard in shards[there:]})
        with alone(folder):  # else two parts that end at once may both miss the other
            if (everything := shards if part == ALL else whole_parts(folder)) is not None:
                check(everything)
                publish(unfinished, folder / INDEX, _index(work, rows.files, everything).json())


def _index(work: Preparation, files: Sequence[str], shards: Sequence[Shard]) -> Index:
    pairs = "" if isinstance(work.text_field, str) else work.text_field.summary
    fingerprints = work.source_fingerprint, work.tokenizer.fingerprint
    return Index(
        FORMAT_VERSION, work.source, *fingerprints, work.validation_fraction, tuple(files), tuple(shards), pairs
    )


@dataclass(frozen=True)
class Batch:
    """Rows that were tokenized in one call."""

    rows: list[Row]
    documents: list[np.ndarray]
    """The tokens of each row with text, in order, each with its end-of-document token."""
    cursor: Any
    """The place where the source continues after them."""
    last: bool


def tokenized(
    batches: Iterator[tuple[list[Row], Any]], encode: Encoder, pieces: Pieces
) -> Generator[Batch, None, None]:
    """Batches of rows with their tokens, in order. Reading and tokenizing run ahead of the caller.

    batches: each with its cursor. encode: from encoder()."""
    waiting: deque[tuple[list[Row], Any, Future[tuple[list[Row], list[np.ndarray]]]]] = deque()
    most = LARGE_BATCHES * pieces.batch_characters

    def first() -> Batch:
        _, after, encoded = waiting.popleft()
        return Batch(*encoded.result(), after, last=False)

    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="tokenizer") as pool:
        for batch, cursor in batches:
            while waiting and sum(_characters(group) for group in (batch, *(group for group, *_ in waiting))) > most:
                yield first()
            waiting.append((batch, cursor, pool.submit(encode, batch)))
            if len(waiting) > IN_FLIGHT:
                yield first()
        while len(waiting) > 1:
            yield first()
        if waiting:
            yield replace(first(), last=True)


def encoder(work: Preparation, *, where: Callable[[Row], str]) -> Encoder:
    """What gives rows, with the problems that show only now, and the tokens of each that has text."""
    if not isinstance(work.text_field, str):
        from recipes.data.text.pair_format import PairEncoder

        return PairEncoder(work.text_field, work.tokenizer).encode
    return lambda batch: _documents(batch, work.tokenizer, where=where)


def _characters(rows: Sequence[Row]) -> int:
    return sum(len(row.text) for row in rows)


def _documents(
    rows: list[Row], tokenizer: Tokenizer, *, where: Callable[[Row], str]
) -> tuple[list[Row], list[np.ndarray]]:
    """What an Encoder returns; each document with its end-of-document token. Only one list of Python integers exists at
    a time. Raises UserError for a text that the tokenizer cannot encode, naming `where` it is."""
    dtype, end = token_type(tokenizer.vocabulary), tokenizer.end_of_document
    try:
        found = tokenizer.encode_batch([row.text for row in rows if row.has_text])
        return rows, [np.array([*ids, end], dtype=dtype) for ids in found]
    except ForeignError as error:
        if len(rows) > 1:  # the library does not say for which text
            alone = [_documents([row], tokenizer, where=where) for row in rows]
            return [row for group, _ in alone for row in group], [ids for _, documents in alone for ids in documents]
        why = f"cannot be encoded: {str(error).removeprefix(f'{CANNOT_ENCODE}: ')}"
        if isinstance(error.__cause__, Exception):
            raise UserError(f"data.tokenizer: {where(rows[0])} {why}") from None
        # A panic of the library, as of a pattern that would search for hours, is of this text alone.
        return [rows[0]._replace(text="", problem=why)], []


def _counted(batches: Iterator[Batch], progress: Callable[[int], None]) -> Iterator[Batch]:
    tokens = 0
    for batch in batches:
        tokens += sum(map(len, batch.documents))
        progress(tokens)
        yield batch


def _batches(rows: RowStream, pieces: Pieces) -> Iterator[tuple[list[Row], Any]]:
    """Rows that are worth a call of the tokenizer, and the cursor after them. At least one batch, maybe empty."""
    batch: list[Row] | None = None
    limits = {"characters": pieces.batch_characters, "most": pieces.batch_rows}
    for batch in batches_of(rows, size=lambda row: len(row.text), **limits):
        yield batch, rows.cursor
    if batch is None:
        yield [], rows.cursor


def _write_shard(
    folder: Path,
    number: int,
    batches: Iterator[Batch],
    work: Preparation,
    *,
    files: Sequence[str],
    read: slice,
    into: Path,
) -> Shard:
    """Write the next shard, from as many batches as it takes. Returns the one that is there: a faster process may have
    made it. Raises UserError if that holds other tokens.

    files: names of the source's files. read: those from which it and the later ones come. into: folder for the shard's
    unfinished files."""
    target = min(work.pieces.largest_shard, work.pieces.smallest_shard << min(number, 40))  # a batch reaches it
    with closing(ShardWriter(into, work, files)) as writer:
        for batch in batches:
            writer.add(batch)
            if batch.last or writer.tokens >= target or writer.rows >= work.pieces.shard_rows:
                break
        shard = writer.finish(number, cursor=batch.cursor, last=batch.last)
    # The files that its rows came from. For a dataset in a folder that may be any; the last shard includes empty files.
    behind = read.stop if shard.last else shard.cursor["file"] + 1
    require_unchanged([*work.states] if is_hub(work.source) else files[read.start : behind], work.states)
    with alone(folder):
        if (there := read_shard(folder, number)) is not None:  # of a faster process; a run may use it
            if there.checksums != shard.checksums:
                raise UserError(
                    f"data.source: another process made different tokens of {work.source!r}: one of the two could"
                    " not read a file; start again"
                )
            return there
        # The arrays first, and last the description, without which the shard does not exist.
        for kind in ARRAYS:
            (into / kind).replace(array_path(folder, number, kind))
        if shard.bad:
            (into / "bad").replace(bad_rows_path(folder, number))
        publish(into, shard_path(folder, number), json.dumps(shard.stored))
    return shard


class ShardWriter:
    """The files of one shard while it is written."""

    def __init__(self, part: Path, work: Preparation, files: Sequence[str]) -> None:
        """part: folder for unfinished files. files: names of the source's files."""
        tokens = token_type(work.tokenizer.vocabulary if isinstance(work.text_field, str) else 2**32)  # pairs have bits
        types = {TRAIN: tokens, VALIDATION: tokens, DOCUMENTS: DOCUMENT}
        self._files = {kind: ArrayWriter((part / kind).open("wb"), dtype) for kind, dtype in types.items()}
        self._bad_file: TextIO = (part / "bad").open("w", encoding="utf-8")
        self._names, self._held_out_below = files, int(work.validation_fraction * HASHES)
        self._counts = Counter(held_out=0, empty=0, bad=0)
        self._unread = False
        self._lowest, self._highest = 1.0, 0.0

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._bad_file.close()

    @property
    def tokens(self) -> int:
        return self._files[TRAIN].length + self._files[VALIDATION].length

    @property
    def rows(self) -> int:
        return self._files[DOCUMENTS].length + self._counts.total()

    def add(self, batch: Batch) -> None:
        """Append rows, the bad ones to the list."""
        train, validation, records, end = [], [], [], self._files[TRAIN].length
        documents = iter(batch.documents)
        for row in batch.rows:
            if row.problem:
                self._counts["bad"] += row.lost
                self._unread |= row.kind == UNREADABLE
                where = {"file": self._names[row.file], "row": row.number, "reason": row.problem}
                self._bad_file.write(json.dumps(where) + "\n")
            elif not row.has_text:
                self._counts["empty"] += 1
            else:
                tokens, number = next(documents), document_hash(row.text)
                self._lowest, self._highest = min(self._lowest, number / HASHES), max(self._highest, number / HASHES)
                # A document's text alone decides whether it is held out, so its copies are treated alike.
                if number < self._held_out_below:
                    validation.append(tokens)
                else:
                    train.append(tokens)
                    end += len(tokens)
                    records.append((end, row.file, row.number))
        self._counts["held_out"] += len(validation)
        arrays = {TRAIN: train, VALIDATION: validation, DOCUMENTS: [np.array(records, dtype=DOCUMENT)]}
        for kind, of_kind in arrays.items():
            self._files[kind].extend(of_kind)

    def finish(self, number: int, *, cursor: Any, last: bool) -> Shard:
        """Finish the files. Returns what the shard holds. cursor, last: where the source continues, if it does."""
        checksums = {kind: file.finish() for kind, file in self._files.items()}
        return Shard(
            **{kind: file.length for kind, file in self._files.items()},
            **self._counts,
            lowest=self._lowest,
            highest=self._highest,
            cursor=cursor,
            last=last,
            unread=self._unread,
            checksums=checksums,
            number=number,
        )


class ArrayWriter:
    """A one-dimensional .npy file that grows."""

    def __init__(self, file: BinaryIO, dtype: np.dtype) -> None:
        self.length = 0
        self._file = file
        self._dtype = dtype
        self._checksum = xxhash.xxh3_64()
        self._header_size = self._write_header()

    def extend(self, arrays: Sequence[np.ndarray]) -> None:
        if arrays:
            joined = np.concatenate(arrays)
            self._file.write(joined.data)
            self._checksum.update(joined.data)
            self.length += len(joined)

    def finish(self) -> str:
        """Write the length into the header, which numpy pads for this. Returns the checksum of the contents."""
        self._file.seek(0)
        if self._write_header() != self._header_size:
            raise UserError("a token shard has grown too long for its header")
        return self._checksum.hexdigest()

    def close(self) -> None:
        self._file.close()

    def _write_header(self) -> int:
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()
