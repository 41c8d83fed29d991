"""From documents to sequences of tokens: prepared once into two files, then read in an order that is computed.

The order of the training sequences is a function of the seed and of how many sequences were consumed, and of nothing
else: not of the number of processes, the batch size or the library versions. Imports no torch.

Shapes: S sequence length; a row holds S + 1 tokens, S inputs and S targets that overlap.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from parallel.errors import UserError
from recipes.data.rows import documents
from recipes.data.sources import document_hash
from recipes.data.sources import fingerprint as source_fingerprint
from recipes.tokenizer import Tokenizer, load_tokenizer, parallel_tokenizers

# Characters tokenized in one call: enough to keep all cores busy, little enough to hold as lists of ids.
BATCH_CHARACTERS = 2_000_000
SECONDS_BETWEEN_REPORTS = 10.0
# Files up to this size are compared with their checksums at every start (a fraction of a second).
VERIFY_UP_TO_BYTES = 1_000_000_000
# Part of the cache key: raise it when the same documents begin to give other files.
FORMAT_VERSION = 1

TRAIN, VALIDATION, INDEX = "train.npy", "validation.npy", "index.json"
HASHES = 2**64
# Four would do for large sizes; for halves of a few bits each round adds little.
FEISTEL_ROUNDS = 8


@dataclass(frozen=True)
class Prepared:
    """A corpus as tokens: two .npy files of uint16 or uint32, every document ended by the end-of-document token."""

    tokenizer: Tokenizer
    train: Path
    validation: Path
    fingerprint: str
    """Depends on the corpus, the tokenizer and the held-out share; equal fingerprints mean equal tokens."""


def prepare(
    *,
    source: str,
    text_field: str,
    tokenizer: str | Tokenizer,
    validation_fraction: float,
    cache: Path,
    report: Callable[[str], None],
) -> Prepared:
    """Tokenize a corpus into `cache`, or find it there. Any number of processes may do so at once.

    Arguments are the fields of the recipe's [data] section, the tokenizer also as one that is there already; `report`
    gets one line of text for each thing done. Raises UserError for whatever is wrong with them.
    """
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer, source=source, text_field=text_field, cache=cache, report=report)
    identity = (
        FORMAT_VERSION,
        source_fingerprint(source, text_field=text_field),
        tokenizer.fingerprint,
        validation_fraction,
    )
    fingerprint = xxhash.xxh3_128_hexdigest(repr(identity).encode())
    folder = cache.expanduser() / "tokens" / fingerprint
    prepared = Prepared(tokenizer, folder / TRAIN, folder / VALIDATION, fingerprint)
    if _is_complete(folder):
        report(f"tokens found in {folder}")
        return prepared

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with parallel_tokenizers(), tempfile.TemporaryDirectory(dir=folder.parent, prefix="part-") as name:
            part = Path(name)
            index = _tokenize(
                documents(source, text_field=text_field),
                tokenizer=tokenizer,
                validation_fraction=validation_fraction,
                folder=part,
                report=report,
            )
            (part / INDEX).write_text(json.dumps(index))
            # Each file appears as a whole, and the index, without which nothing is complete, last. Another process
            # doing the same writes the same bytes, so either's files serve.
            folder.mkdir(exist_ok=True)
            for file in (TRAIN, VALIDATION, INDEX):
                (part / file).replace(folder / file)
    except OSError as error:  # trouble with reading the source is a UserError already
        raise UserError(f"data.cache: cannot write below '{folder.parent}': {error}; give another folder") from error
    return prepared


def _is_complete(folder: Path) -> bool:
    """Whether everything is there and undamaged."""
    try:
        index = json.loads((folder / INDEX).read_text())
        for file in (TRAIN, VALIDATION):
            expected = index[file]
            tokens = np.load(folder / file, mmap_mode="r")  # refuses a file shorter than its header says
            if tokens.shape != (expected["tokens"],):
                return False
            if tokens.nbytes <= VERIFY_UP_TO_BYTES and xxhash.xxh3_64_hexdigest(tokens.data) != expected["checksum"]:
                return False
    except (OSError, ValueError, KeyError, TypeError):  # missing, cut short, or not ours
        return False
    return True


def _tokenize(
    documents: Iterable[str],
    *,
    tokenizer: Tokenizer,
    validation_fraction: float,
    folder: Path,
    report: Callable[[str], None],
) -> dict[str, dict[str, object]]:
    """Write train.npy and validation.npy; returns the index: what is in each."""
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 2**16 else "<u4")
    held_out_below = int(validation_fraction * HASHES)
    smallest, largest = HASHES, -1
    size = 0
    started = reported = time.perf_counter()
    with (folder / TRAIN).open("wb") as train_file, (folder / VALIDATION).open("wb") as validation_file:
        train, validation = _TokenWriter(train_file, dtype), _TokenWriter(validation_file, dtype)
        for texts in text_batches(documents):
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                # By its contents a document is held out or not whatever stands beside it, and so are its copies.
                number = document_hash(text)
                smallest, largest = min(smallest, number), max(largest, number)
                writer = validation if number < held_out_below else train
                writer.append(np.array([*ids, tokenizer.end_of_document], dtype=dtype))
                size += len(text)
            if time.perf_counter() - reported > SECONDS_BETWEEN_REPORTS:
                reported = time.perf_counter()
                report(f"tokenized {size / 1e6:.0f} MB, {size / 1e6 / (reported - started):.1f} MB/s, going on")
        train.finish()
        validation.finish()
    if not train.documents or not validation.documents:
        raise UserError(_empty_split(validation_fraction, smallest, largest, train.documents + validation.documents))
    tokens = train.tokens + validation.tokens
    seconds = time.perf_counter() - started
    report(
        f"tokenized {size / 1e6:.1f} MB into {tokens / 1e6:.1f} M tokens in {seconds:.1f} s, "
        f"{validation.tokens / 1e6:.3f} M of them held out"
    )
    return {TRAIN: train.facts(), VALIDATION: validation.facts()}


def text_batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """The documents in lists that are worth a call of the tokenizer each."""
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _empty_split(fraction: float, smallest: int, largest: int, documents: int) -> str:
    message = f"data.validation_fraction: too little text for a share of {fraction}: of {documents} documents "
    if smallest == largest:
        return message + "no two differ, so none can be held out; give more text"
    if smallest >= fraction * HASHES:
        needed = math.floor(smallest / HASHES * 1e4 + 1) / 1e4
        return message + f"none would be held out; write {needed:.4f} or more, or give more text"
    allowed = math.floor(largest / HASHES * 1e4) / 1e4
    return message + f"all would be held out; write {allowed:.4f} or less, or give more text"


class _TokenWriter:
    """A one-dimensional .npy file that grows."""

    def __init__(self, file: BinaryIO, dtype: np.dtype) -> None:
        self.tokens = self.documents = 0
        self._file = file
        self._dtype = dtype
        self._checksum = xxhash.xxh3_64()
        self._header_size = self._write_header()

    def append(self, document: np.ndarray) -> None:
        self._file.write(document.data)
        self._checksum.update(document.data)
        self.tokens += len(document)
        self.documents += 1

    def finish(self) -> None:
        """numpy's headers leave room for the length to be written in place."""
        self._file.seek(0)
        assert self._write_header() == self._header_size

    def facts(self) -> dict[str, object]:
        return {"tokens": self.tokens, "documents": self.documents, "checksum": self._checksum.hexdigest()}

    def _write_header(self) -> int:
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.tokens,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()


class TokenSequences:
    """An endless stream of rows over one token file, any part of it readable at once.

    Sequence i of a file covers its tokens i*S .. i*S + S: its last token, only a target here, is the first input of
    sequence i + 1, so that an epoch predicts every token but the first and the tail that fills no sequence. With
    `shuffle` each epoch has its own permutation of the sequences, computed from the seed and never stored.
    """

    def __init__(self, tokens: Path | np.ndarray, *, sequence_length: int, seed: int = 0, shuffle: bool = True) -> None:
        self._tokens = np.asarray(np.load(tokens, mmap_mode="r")) if isinstance(tokens, Path) else tokens
        self._sequence_length = sequence_length
        self._seed = seed
        self._shuffle = shuffle
        if len(self) < 1:
            name = f"the {tokens.stem} text" if isinstance(tokens, Path) else "the text"
            more = "raise data.validation_fraction" if name == "the validation text" else "give more text"
            raise UserError(
                f"batch.sequence_length: {name} has {len(self._tokens)} tokens, a single sequence of "
                f"{sequence_length} and its last target need {sequence_length + 1}; write at most "
                f"{max(len(self._tokens) - 1, 1)}, or {more}"
            )

    def __len__(self) -> int:
        """Sequences in one epoch."""
        return (len(self._tokens) - 1) // self._sequence_length

    def rows(self, first: int, count: int) -> np.ndarray:
        """Sequences number first .. first + count - 1 of the stream: (count, S + 1) int64."""
        length = self._sequence_length
        numbers = np.arange(first, first + count, dtype=np.int64)
        epochs, sequences = np.divmod(numbers, len(self))  # (count,), (count,)
        if self._shuffle:
            sequences = permuted(sequences, epochs, size=len(self), seed=self._seed)
        rows = np.empty((count, length + 1), dtype=np.int64)
        for row, sequence in zip(rows, sequences.tolist(), strict=True):
            row[:] = self._tokens[sequence * length : sequence * length + length + 1]
        return rows


def permuted(positions: np.ndarray, epochs: np.ndarray, *, size: int, seed: int) -> np.ndarray:
    """Where each position of 0 .. size-1 goes under its epoch's permutation: (count,), (count,) -> (count,) int64.

    A Feistel network permutes the numbers of 2 * half bits whatever its round function is. There are at most 4 * size
    of them; a result outside 0 .. size-1 goes through again until it falls inside, which leaves a permutation of
    0 .. size-1 (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low_bits = (np.uint64(1) << half) - np.uint64(1)
    key = np.uint64(xxhash.xxh3_64_intdigest(str(seed).encode()))  # of seeds of any size, and far apart
    keys = _mixed(key + epochs.astype(np.uint64))  # (count,)
    values = positions.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & low_bits
        round_keys = keys[outside]
        for _ in range(FEISTEL_ROUNDS):
            round_keys = _mixed(round_keys)
            left, right = right, left ^ (_mixed(right ^ round_keys) & low_bits)
        values[outside] = (left << half) | right
        outside &= values >= np.uint64(size)
    return values.astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """splitmix64's next(): every bit of the result depends on every bit of the value. Steele, Lea, Flood 2014."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
