"""From rows of text to token shards, on all cores. The tokenizers library works in its own threads while the next batch
is read and the previous written. Where batches and shards end depends only on the text, so the bytes are the same for
any number of cores and interruptions. Interrupted work continues after the last whole shard. Imports no torch."""

import json
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
import xxhash

from parallel.errors import UserError
from recipes.data.text.readers import UNREADABLE, Row
from recipes.data.text.rows import RowStream, open_rows
from recipes.data.text.sources import document_hash, is_hub, require_unchanged
from recipes.data.text.tokenizer import Tokenizer, parallel_tokenizers
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

# Batches tokenized at a time: the second keeps the cores busy while the first runs out of documents.
IN_FLIGHT = 2
# More characters than this many batches hold are tokenized alone: a token takes about a hundred bytes meanwhile.
LARGE_BATCHES = 4
HASHES = 2**64


def write_shards(
    folder: Path, work: Preparation, *, progress: Callable[[int], None] = lambda tokens: None
) -> Iterator[Shard]:
    """Write the missing shards, yielding each when it is whole, and finally the index. Any number of processes may do
    so there. progress: called after each batch with the number of tokens so far. Raises UserError if the source cannot
    be read further or has changed, or the folder holds something else; OSError if it cannot be written."""
    with claimed(folder, fingerprint=work.fingerprint, tokenizer=work.tokenizer.json) as part:
        shards = whole_shards(folder)
        if read_index(folder) is not None:
            return
        cursor = shards[-1].cursor if shards else None
        rows = open_rows(work.source, text_field=work.text_field, text_documents=work.text_documents, cursor=cursor)
        if not is_hub(work.source) and list(rows.files) != list(work.states):
            raise UserError(f"data.source: files of {work.source!r} appeared or disappeared just now; start again")
        # Closed here: left to the garbage collector, its threads may be joined from inside the start of another thread.
        with parallel_tokenizers(), closing(_tokenized(rows, work)) as tokenized:
            batches = _counted(tokenized, progress)
            while not (shards and shards[-1].last):
                shards.append(_write_shard(folder, shards, batches, work, files=rows.files, part=part))
                yield shards[-1]
        index = Index(
            FORMAT_VERSION,
            work.source,
            work.source_fingerprint,
            work.tokenizer.fingerprint,
            work.validation_fraction,
            tuple(rows.files),
            tuple(shards),
            pairs="" if isinstance(work.text_field, str) else work.text_field.summary,
        )
        publish(part, folder / INDEX, index.json())


@dataclass(frozen=True)
class _Batch:
    rows: list[Row]
    documents: list[np.ndarray]
    """The tokens of each row with text, in order, each with its end-of-document token."""
    cursor: Any
    """Where the source continues after them."""
    last: bool


def _tokenized(rows: RowStream, work: Preparation) -> Generator[_Batch, None, None]:
    """Batches of rows with their tokens, in order. Reading and tokenizing run ahead of the caller."""
    waiting: deque[tuple[list[Row], Any, Future[tuple[list[Row], list[np.ndarray]]]]] = deque()
    most = LARGE_BATCHES * work.pieces.batch_characters
    encode = _encoder(work, where=rows.where)
    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="tokenizer") as pool:
        for batch, cursor in _batches(rows, work.pieces):
            while waiting and sum(_characters(group) for group in (batch, *(group for group, *_ in waiting))) > most:
                _, cursor_after, found = waiting.popleft()
                yield _Batch(*found.result(), cursor_after, last=False)
            waiting.append((batch, cursor, pool.submit(encode, batch)))
            if len(waiting) > IN_FLIGHT:
                _, cursor_after, found = waiting.popleft()
                yield _Batch(*found.result(), cursor_after, last=False)
        while waiting:
            _, cursor_after, found = waiting.popleft()
            yield _Batch(*found.result(), cursor_after, last=not waiting)


def _encoder(
    work: Preparation, *, where: Callable[[Row], str]
) -> Callable[[list[Row]], tuple[list[Row], list[np.ndarray]]]:
    """What gives rows, with the problems that show only now, and the tokens of each that has text."""
    if not isinstance(work.text_field, str):
        from recipes.data.text.pairs import PairEncoder

        return PairEncoder(work.text_field, work.tokenizer).encode
    return lambda batch: (batch, _documents([row for row in batch if row.has_text], work.tokenizer, where=where))


def _characters(rows: Sequence[Row]) -> int:
    return sum(len(row.text) for row in rows)


def _documents(rows: Sequence[Row], tokenizer: Tokenizer, *, where: Callable[[Row], str]) -> list[np.ndarray]:
    """The tokens of each row with its end-of-document token. Only one list of Python integers exists at a time. Raises
    UserError for a text that the tokenizer cannot encode, naming `where` it is."""
    dtype, end = token_type(tokenizer.vocabulary), tokenizer.end_of_document
    try:
        found = tokenizer.encode_batch([row.text for row in rows])
    except Exception:  # the library raises nothing more specific, and does not say for which text
        for row in rows:
            try:
                tokenizer.encode(row.text)
            except Exception as error:
                raise UserError(
                    f"data.tokenizer: {where(row)} cannot be encoded: {error}; give a tokenizer that encodes any"
                    " text: a byte-level one, or one with a token for unknown words"
                ) from None
        raise
    return [np.array([*ids, end], dtype=dtype) for ids in found]


def _counted(batches: Iterator[_Batch], progress: Callable[[int], None]) -> Iterator[_Batch]:
    tokens = 0
    for batch in batches:
        tokens += sum(map(len, batch.documents))
        progress(tokens)
        yield batch


def _batches(rows: RowStream, pieces: Pieces) -> Iterator[tuple[list[Row], Any]]:
    """Rows that are worth a call of the tokenizer, and the cursor after them. At least one batch, maybe empty."""
    batch: list[Row] = []
    size, any_yet = 0, False
    for row in rows:
        batch.append(row)
        size += len(row.text)
        if size >= pieces.batch_characters or len(batch) >= pieces.batch_rows:
            any_yet = True
            yield batch, rows.cursor
            batch, size = [], 0
    if batch or not any_yet:
        yield batch, rows.cursor


def _write_shard(
    folder: Path, before: list[Shard], batches: Iterator[_Batch], work: Preparation, *, files: Sequence[str], part: Path
) -> Shard:
    """Write the shard after those before, from as many batches as it takes. files: names of the source's files. part:
    folder for the shard's unfinished files."""
    number, begin = len(before), before[-1].cursor["file"] if before else 0
    target = work.pieces.shard_tokens(number)
    with closing(_ShardWriter(part, work, files)) as writer:
        for batch in batches:
            writer.add(batch)
            if batch.last or writer.tokens >= target or writer.rows >= work.pieces.shard_rows:
                break
        shard = writer.finish(batch)
    # The files that its rows came from. For a dataset in a folder that may be any; the last shard includes empty files.
    read = list(work.states) if is_hub(work.source) else files[begin : None if shard.last else shard.cursor["file"] + 1]
    require_unchanged(read, work.states)
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
            (part / kind).replace(array_path(folder, number, kind))
        if shard.bad:
            (part / "bad").replace(bad_rows_path(folder, number))
        publish(part, shard_path(folder, number), json.dumps(shard.__dict__))
    return shard


class _ShardWriter:
    """The files of one shard while it is written."""

    def __init__(self, part: Path, work: Preparation, files: Sequence[str]) -> None:
        tokens = token_type(work.tokenizer.vocabulary if isinstance(work.text_field, str) else 2**32)
        types = {TRAIN: tokens, VALIDATION: tokens, DOCUMENTS: DOCUMENT}
        self._files = {kind: ArrayWriter((part / kind).open("wb"), dtype) for kind, dtype in types.items()}
        self._bad_file: TextIO = (part / "bad").open("w", encoding="utf-8")
        self._held_out_below = int(work.validation_fraction * HASHES)
        self._names = files
        self._held_out = self._empty = self._bad = 0
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
        return self._files[DOCUMENTS].length + self._held_out + self._empty + self._bad

    def add(self, batch: _Batch) -> None:
        train, validation, records = [], [], []
        end = self._files[TRAIN].length
        documents = iter(batch.documents)
        for row in batch.rows:
            if row.problem:
                self._note(row)
            elif not row.has_text:
                self._empty += 1
            else:
                tokens = next(documents)
                # A document's text alone decides whether it is held out, so its copies are treated alike.
                number = document_hash(row.text)
                self._lowest, self._highest = min(self._lowest, number / HASHES), max(self._highest, number / HASHES)
                if number < self._held_out_below:
                    validation.append(tokens)
                else:
                    train.append(tokens)
                    end += len(tokens)
                    records.append((end, row.file, row.number))
        self._held_out += len(validation)
        self._files[TRAIN].extend(train)
        self._files[VALIDATION].extend(validation)
        self._files[DOCUMENTS].extend([np.array(records, dtype=DOCUMENT)])

    def finish(self, batch: _Batch) -> Shard:
        """Finish the files. Returns what the shard holds; `batch` is its last."""
        checksums = {kind: file.finish() for kind, file in self._files.items()}
        return Shard(
            train=self._files[TRAIN].length,
            validation=self._files[VALIDATION].length,
            documents=self._files[DOCUMENTS].length,
            held_out=self._held_out,
            empty=self._empty,
            bad=self._bad,
            lowest=self._lowest,
            highest=self._highest,
            cursor=batch.cursor,
            last=batch.last,
            unread=self._unread,
            checksums=checksums,
        )

    def _note(self, row: Row) -> None:
        self._bad += row.lost
        self._unread |= row.kind == UNREADABLE
        place = {"file": self._names[row.file], "row": row.number, "reason": row.problem}
        self._bad_file.write(json.dumps(place) + "\n")


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
