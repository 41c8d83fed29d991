"""From rows of text to token shards, with all cores. Imports no torch.

The tokenizers library does the work in its own threads while the next batch is being read and the one before is being
written. Batches and shards end where the text alone says, so that the bytes are the same for any number of cores and
however often the work was interrupted: it goes on behind the last whole shard.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from parallel.errors import UserError
from recipes.data.text.hub import is_hub
from recipes.data.text.readers import UNREADABLE
from recipes.data.text.rows import Row, RowStream, open_rows
from recipes.data.text.sources import document_hash, file_states, fingerprint, require_unchanged, takes_in
from recipes.data.text.tokenizer import BATCH_CHARACTERS, Tokenizer, parallel_tokenizers
from recipes.data.tokens.shards import (
    ARRAYS,
    DOCUMENT,
    DOCUMENTS,
    FORMAT_VERSION,
    INDEX,
    TRAIN,
    VALIDATION,
    ArrayWriter,
    Index,
    Shard,
    array_path,
    bad_rows_path,
    damage,
    read_index,
    read_shard,
    shard_path,
    token_type,
    tokens_fingerprint,
)
from recipes.data.tokens.workspace import alone, claimed, publish, remove_left

# Batches given to the tokenizer at a time: the second keeps the cores busy while the first runs out of documents.
IN_FLIGHT = 2
# Up to this size what is found is compared with its checksums at every start (a fraction of a second).
VERIFY_UP_TO_BYTES = 1_000_000_000
HASHES = 2**64
# What a folder of shards holds that a source would take for text.
TEXTS = ("owner.txt", "problem-of-a-run.txt", "00000-bad.jsonl", "quarantine.jsonl")


@dataclass(frozen=True)
class Pieces:
    """How the work is cut. Shards of one folder must all be cut alike."""

    smallest_shard: int = 2**22
    """Tokens in the first shard, so that training can begin soon; each further one has twice as many ..."""
    largest_shard: int = 2**26
    """... up to this, so that a trillion tokens are some thousand files."""
    shard_rows: int = 2**22
    """Rows that end a shard though they hold hardly any text."""
    batch_characters: int = BATCH_CHARACTERS
    """Text that the tokenizer gets in one call ..."""
    batch_rows: int = 2**16
    """... or rows, where they hold hardly any."""

    def shard_tokens(self, number: int) -> int:
        """Tokens after which shard `number` ends with the next batch."""
        return min(self.largest_shard, self.smallest_shard << min(number, 40))


@dataclass(frozen=True)
class Preparation:
    """A source, and what makes tokens of it. Equal fingerprints mean equal shards."""

    source: str
    text_field: str
    tokenizer: Tokenizer
    validation_fraction: float
    source_fingerprint: str
    states: dict[str, tuple[int, int]]
    """Size and time of change of each file that the fingerprint was taken of, from before that; of datasets on the hub,
    whose commit does not change, none."""
    pieces: Pieces

    @property
    def fingerprint(self) -> str:
        """Names the folder of the shards in the cache."""
        return tokens_fingerprint(self.source_fingerprint, self.tokenizer.fingerprint, self.validation_fraction)


def preparation(
    source: str, *, text_field: str, tokenizer: Tokenizer, validation_fraction: float, pieces: Pieces
) -> Preparation:
    """Looks at the source's files. Raises UserError where something is wrong with them."""
    states = file_states(source)  # first: what changes while the contents are read is noticed when it is tokenized
    found = fingerprint(source, text_field=text_field)
    return Preparation(source, text_field, tokenizer, validation_fraction, found, states, pieces)


def would_read_itself(source: str, folder: Path) -> bool:
    """Whether shards in this folder would be a part of the source."""
    return any(takes_in(source, folder / name) for name in TEXTS)


def whole_shards(folder: Path, *, keep_unread: bool = True) -> list[Shard]:
    """The shards that are there without a gap. Damaged ones, and those behind them, are taken away to be made again.

    keep_unread: also those that miss a file which could not be read then, since a run was trained on them.
    """
    remove_left(folder)
    shards: list[Shard] = []
    size = 0
    while (shard := read_shard(folder, len(shards))) is not None:
        size += sum(
            array_path(folder, len(shards), kind).stat().st_size
            for kind in ARRAYS
            if array_path(folder, len(shards), kind).exists()
        )
        lacks = shard.unread and not keep_unread
        if lacks or (size <= VERIFY_UP_TO_BYTES and damage(folder, len(shards), shard)):
            (folder / INDEX).unlink(missing_ok=True)
            number = len(shards)
            while shard_path(folder, number).exists():
                shard_path(folder, number).unlink()
                number += 1
            break
        shards.append(shard)
        if shard.last:
            break
    if read_index(folder) is None or not (shards and shards[-1].last):
        (folder / INDEX).unlink(missing_ok=True)
    return shards


def write_shards(
    folder: Path, work: Preparation, *, progress: Callable[[int], None] = lambda tokens: None
) -> Iterator[Shard]:
    """Write the shards that are not there yet, yielding each when it is whole; at the end the index.

    progress: called with the number of tokens after each batch.

    Any number of processes may write the same tokens to the same folder. Raises UserError for a source that cannot be
    read any further or has changed, and for a folder that holds something else; OSError where it cannot be written.
    """
    with claimed(folder, fingerprint=work.fingerprint, tokenizer=work.tokenizer.json) as part:
        shards = whole_shards(folder)
        if read_index(folder) is None:
            yield from _write_missing(folder, shards, work, part=part, progress=progress)


def _write_missing(
    folder: Path, shards: list[Shard], work: Preparation, *, part: Path, progress: Callable[[int], None]
) -> Iterator[Shard]:
    """The shards behind these, and the index. part: where unfinished files go."""
    rows = open_rows(work.source, text_field=work.text_field, cursor=shards[-1].cursor if shards else None)
    if not is_hub(work.source) and list(rows.files) != list(work.states):
        raise UserError(f"data.source: files of {work.source!r} came or went just now; start again")
    if not (shards and shards[-1].last):
        with parallel_tokenizers():
            batches = _counted(_tokenized(rows, work.tokenizer, work.pieces), progress)
            while not (shards and shards[-1].last):
                begin = shards[-1].cursor["file"] if shards else 0
                shards.append(
                    _write_shard(folder, len(shards), batches, work, files=rows.files, begin=begin, part=part)
                )
                yield shards[-1]
    index = Index(
        FORMAT_VERSION,
        work.source,
        work.source_fingerprint,
        work.tokenizer.fingerprint,
        work.validation_fraction,
        tuple(rows.files),
        tuple(shards),
    )
    publish(part, folder / INDEX, index.json())


@dataclass(frozen=True)
class _Batch:
    rows: list[Row]
    documents: list[np.ndarray]
    """The tokens of the rows that have text, in their order, each with its end-of-document token."""
    cursor: Any
    """Where the source goes on behind them."""
    last: bool


def _tokenized(rows: RowStream, tokenizer: Tokenizer, pieces: Pieces) -> Iterator[_Batch]:
    """Batches of rows with their tokens, in order; reading and tokenizing run ahead of who asks for them."""
    waiting: deque[tuple[list[Row], Any, Future[list[np.ndarray]]]] = deque()
    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="tokenizer") as pool:
        for batch, cursor in _batches(rows, pieces):
            documents = [row for row in batch if has_text(row)]
            waiting.append((batch, cursor, pool.submit(_documents, documents, tokenizer, where=rows.where)))
            if len(waiting) > IN_FLIGHT:
                first, behind, found = waiting.popleft()
                yield _Batch(first, found.result(), behind, last=False)
        while waiting:
            first, behind, found = waiting.popleft()
            yield _Batch(first, found.result(), behind, last=not waiting)


def _documents(rows: Sequence[Row], tokenizer: Tokenizer, *, where: Callable[[Row], str]) -> list[np.ndarray]:
    """The tokens of each row, and the end of the document. A list of numbers is gone before the next is made.

    Raises UserError for a text that the tokenizer cannot encode, which `where` it is.
    """
    dtype, end = token_type(tokenizer.vocabulary), tokenizer.end_of_document
    try:
        found = tokenizer.encode_batch([row.text for row in rows])
    except Exception:  # the library raises nothing more specific, and does not say for which text
        for row in rows:
            try:
                tokenizer.encode(row.text)
            except Exception as error:
                raise UserError(
                    f"data.tokenizer: {where(row)} cannot be encoded: {error}; give a tokenizer that encodes every"
                    " text, as one of bytes or with a token for unknown words"
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
    """Rows that are worth a call of the tokenizer, and the cursor behind them; at least one batch, maybe empty."""
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


def has_text(row: Row) -> bool:
    """Whether the row is a document."""
    return not row.problem and bool(row.text) and not row.text.isspace()


def _write_shard(
    folder: Path,
    number: int,
    batches: Iterator[_Batch],
    work: Preparation,
    *,
    files: Sequence[str],
    begin: int,
    part: Path,
) -> Shard:
    """Write the next shard from as many batches as it takes.

    files: names of the source's files. begin: which of them the shard begins in. part: where it grows.
    """
    target = work.pieces.shard_tokens(number)
    with _ShardWriter(part, work, files) as writer:
        for batch in batches:
            writer.add(batch)
            if batch.last or writer.tokens >= target or writer.rows >= work.pieces.shard_rows:
                break
        shard = writer.finish(batch)
    # Its rows were read by now. Of a dataset that is a folder any file may have been; at the end, empty ones count too.
    read = list(work.states) if is_hub(work.source) else files[begin : None if shard.last else shard.cursor["file"] + 1]
    require_unchanged(read, work.states)
    with alone(folder):
        if (there := read_shard(folder, number)) is not None:  # of another process, and perhaps trained on already
            if there.checksums != shard.checksums:
                raise UserError(
                    f"data.source: another process made other tokens of {work.source!r}: a file could not be read by"
                    " one of the two; start again"
                )
            return there
        # The arrays first, and the description, without which there is no shard, last.
        for kind in ARRAYS:
            (part / kind).replace(array_path(folder, number, kind))
        if shard.bad:
            (part / "bad").replace(bad_rows_path(folder, number))
        publish(part, shard_path(folder, number), json.dumps(shard.__dict__))
    return shard


class _ShardWriter:
    """The files of one shard while they grow."""

    def __init__(self, part: Path, work: Preparation, files: Sequence[str]) -> None:
        tokens = token_type(work.tokenizer.vocabulary)
        types = {TRAIN: tokens, VALIDATION: tokens, DOCUMENTS: DOCUMENT}
        self._files = {kind: ArrayWriter((part / kind).open("wb"), dtype) for kind, dtype in types.items()}
        self._bad_file: TextIO = (part / "bad").open("w", encoding="utf-8")
        self._held_out_below = int(work.validation_fraction * HASHES)
        self._names = files
        self._held_out = self._empty = self._bad = 0
        self._unread = False
        self._lowest, self._highest = 1.0, 0.0

    def __enter__(self) -> "_ShardWriter":
        return self

    def __exit__(self, *exception: object) -> None:
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
            elif not has_text(row):
                self._empty += 1
            else:
                tokens = next(documents)
                # By its contents a document is held out or not whatever stands beside it, and so are its copies.
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
        """What the shard holds; `batch` is its last."""
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
