"""Files of tokens that other trainers wrote, read where they are. Each is a shard, all of it for training.

    NAME.ds    datatrove and nanotron: uint16 or uint32; the ends of documents, uint64, in NAME.ds.index
    NAME.bin   Megatron-LM: the type of the tokens, and where sequences and documents end, in NAME.idx;
               without that file llm.c, whose header names the type, or else what the source says ("uint16:NAME.bin")
    NAME.npy   one row of integers, of numpy

Imports no torch.
"""

import glob
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from parallel.errors import UserError, listed
from recipes.data.text.sources import STATED_TYPE, file_state, identity, require_unchanged
from recipes.data.text.tokenizer import Tokenizer
from recipes.data.tokens.shards import DOCUMENT, TRAIN, Shard, Shards
from recipes.data.tokens.workspace import VERIFY_UP_TO_BYTES
from recipes.files.reading import read_patiently, user_path, whole_text

# Part of every fingerprint: raise it when the same files start to give different tokens.
READER_VERSION = 1
BLOCK = 2**22
"""Tokens that are looked at together."""
LOOKED_AT = 64
"""Files, and documents of each, whose ends are looked at before a run; fewer than twice as many, evenly spread."""
LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""Magic number and version -> type, as in dev/data/data_common.py of llm.c."""
MEGATRON = np.dtype([("magic", "S9"), ("version", "<u8"), ("type", "u1"), ("sequences", "<i8"), ("ends", "<i8")])
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
Result = TypeVar("Result")


@dataclass(frozen=True)
class TokenFile:
    """Where the tokens of one file lie. Raises ValueError if its size is another."""

    path: Path
    dtype: np.dtype
    offset: int
    """Bytes before the first token."""
    tokens: int
    index: Path | None = None
    """Says where documents end; None = the end-of-document token does."""
    documents: int = 1
    indexed: Callable[[], np.ndarray] = lambda: np.empty(0)
    """Reads the end of each document from the index, in tokens from the start of the file."""

    def __post_init__(self) -> None:
        size, whole = self.path.stat().st_size, self.offset + self.tokens * self.dtype.itemsize
        if size != whole:
            raise ValueError(
                f"it has {size:,} bytes, but {self.tokens:,} tokens of {self.dtype.itemsize} bytes make {whole:,}: it"
                " is cut off, of another type, or not the file of its index"
            )

    def array(self) -> np.ndarray:
        """The tokens, memory-mapped."""
        return _read(self.path, lambda: _map(self.path, self.dtype, self.offset, self.tokens))

    def ends(self, token: int) -> np.ndarray:
        """The end of each document: int64. token: ends them in a file without an index, which is read for this."""
        if self.index is None:
            array, starts = self.array(), range(0, self.tokens, BLOCK)
            found = (start + np.flatnonzero(array[start : start + BLOCK] == token) + 1 for start in starts)
            return np.unique(np.concatenate([*found, [self.tokens]]).astype(np.int64))
        ends = _read(self.index, self.indexed)
        if (ends[-1] if len(ends) else 0) != self.tokens or np.any(ends[1:] < ends[:-1]):
            raise UserError(f"data.source: the documents in '{self.index}' are not those of '{self.path}'")
        return ends


def token_files(source: str) -> list[TokenFile]:
    """The files of a source, sorted by path. Raises UserError for one that is not what its name says."""
    stated = match[1] if (match := STATED_TYPE.match(source)) else ""
    path = user_path(source.removeprefix(f"{stated}:"))
    paths = [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))
    if wrong := next((file for file in paths if file.suffix != paths[0].suffix or not file.is_file()), None):
        found = listed(dict.fromkeys((paths[0], wrong)))
        raise UserError(f"data.source: '{path}' takes in {found}; write what names regular files of one type alone")
    files = [_read(path, partial(_opened, path, stated)) for path in paths]
    if not any(file.tokens for file in files):
        raise UserError(f"data.source: '{path}' {'holds no tokens' if paths else 'does not exist'}")
    return files


def _read(path: Path, read: Callable[[], Result]) -> Result:
    """What `read` returns. Raises UserError for what cannot be read, TemporaryError if it may be later."""
    try:
        return read_patiently(read, what=f"data.source: '{path}'")
    except (OSError, ValueError) as error:
        raise UserError(f"data.source: '{path}' cannot be read as tokens: {error}") from error


def _map(path: Path, dtype: "np.dtype | str", offset: int, count: int) -> np.ndarray:
    # As a plain array, because slicing a numpy.memmap is twenty times slower.
    return np.asarray(np.memmap(path, dtype, "r", offset, (count,))) if count else np.empty(0, dtype)


def _opened(path: Path, stated: str) -> TokenFile:
    """Raises OSError, and ValueError for what is not of the format that the name says."""
    index, suffix = path.with_suffix(".idx"), path.suffix.lower()
    with path.open("rb") as content:
        magic, version, tokens = (int.from_bytes(content.read(4), "little") for _ in range(3))
    known = {".ds": _datatrove, ".npy": _npy}.get(suffix) or (
        partial(_megatron, index=index) if index.exists() else None
    )
    header = None if known else LLM_C.get((magic, version))
    if stated and (known or header):
        raise ValueError(f"the type of its tokens stands in the files; remove '{stated}:' before the name")
    if known:
        return known(path)
    if header:
        return TokenFile(path, np.dtype(header), 256 * 4, tokens)
    if not stated:
        raise ValueError(f"nothing says of which type its tokens are; write it, as in 'uint16:{path}' (or uint32, ...)")
    dtype = np.dtype(stated).newbyteorder("<")
    file = TokenFile(path, dtype, 0, path.stat().st_size // dtype.itemsize)
    first = file.array()[:BLOCK]
    if len(first) > 1 and first[::2].any() and not first[1::2].any():
        raise ValueError(f"every second of its first tokens is 0, as where a wider type is read as {stated}")
    return file


def _npy(path: Path) -> TokenFile:
    with path.open("rb") as content:
        old = np.lib.format.read_magic(content) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(content)
        if len(shape) != 1 or dtype.kind not in "iu" or dtype.newbyteorder("<") != dtype:
            raise ValueError(f"it holds {dtype.str} of shape {shape}, not one row of little-endian integers")
        return TokenFile(path, dtype, content.tell(), shape[0])


def _datatrove(path: Path) -> TokenFile:
    """What TokenizedFile of datatrove writes: src/datatrove/pipeline/tokens/tokenizer.py."""
    index, about = Path(f"{path}.index"), Path(f"{path}.metadata")
    if Path(f"{path}.loss").exists():
        raise ValueError(f"'{path}.loss' leaves tokens out of the loss, which is not supported; remove it to learn all")
    count = index.stat().st_size // 8
    tokens = int(_map(index, "<i8", 8 * (count - 1), 1)[0]) if count else 0
    if about.exists() and whole_text(about).splitlines()[1:2] != [str(tokens)]:  # tokenizer, tokens, the same in words
        raise ValueError(f"'{about}' does not tell of the {tokens} tokens at the end of '{index}'")
    dtype = np.dtype("<u4" if path.stat().st_size == 4 * tokens else "<u2")
    return TokenFile(path, dtype, 0, tokens, index, count, partial(_map, index, "<i8", 0, count))


def _megatron(path: Path, *, index: Path) -> TokenFile:
    """What _IndexWriter of Megatron-LM writes: megatron/core/datasets/indexed_dataset.py."""
    size, header = index.stat().st_size, np.fromfile(index, MEGATRON, 1)
    magic, version, code, sequences, count = header[0].tolist() if len(header) else (b"", 0, 0, 0, 0)
    if (magic, version) != (b"MMIDIDX", 1) or code not in MEGATRON_TYPES:
        raise ValueError(f"'{index}' does not begin as an index of Megatron-LM of version 1 for integers does")
    places, dtype = MEGATRON.itemsize + 4 * sequences, np.dtype(MEGATRON_TYPES[code])
    if size != (whole := places + 8 * sequences + 8 * count):
        raise ValueError(f"'{index}' has {size:,} bytes, not {whole:,}: it is cut off, or not of text alone")

    def ends() -> np.ndarray:
        lengths, starts = _map(index, "<i4", MEGATRON.itemsize, sequences), _map(index, "<i8", places, sequences)
        following = np.cumsum(np.concatenate(([0], lengths)), dtype=np.int64)
        documents = _map(index, "<i8", places + 8 * sequences, count)
        if documents[:1].tolist() != [0] or np.any(starts != following[:-1] * dtype.itemsize):
            raise ValueError("the sequences of the tokens do not follow each other")
        return following.take(documents[1:], mode="clip")

    tokens = 0
    if sequences:
        (start,), (length,) = _map(index, "<i8", places + 8 * sequences - 8, 1), _map(index, "<i4", places - 4, 1)
        tokens = int(start) // dtype.itemsize + int(length)
    return TokenFile(path, dtype, 0, tokens, index, max(0, count - 1), ends)


class TokenFiles(Shards):
    """The tokens of such files as one row. Ids are checked where they are read."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, maps: int = 64, fingerprint: str = "") -> None:
        """tokenizer: that of the tokens. maps: files at a time. fingerprint: of the files, if it is known. Raises
        UserError as token_files() does."""
        self.files, self._end = token_files(source), tokenizer.end_of_document
        counts = ((file.tokens, 0, file.documents, 0, 0, 0) for file in self.files)
        shards = [Shard(*each, 0.0, 1.0, None, last=True, number=number) for number, each in enumerate(counts)]
        super().__init__(self.files[0].path.parent, TRAIN, only=shards, maps=maps)
        self._map = lru_cache(maxsize=maps)(self._mapped)
        self._ends_in = lru_cache(maxsize=maps)(lambda number: self.files[number].ends(self._end))
        self._limit = min(tokenizer.vocabulary, tokenizer.rows or tokenizer.vocabulary)
        paths = [path for file in self.files for path in (file.path, file.index) if path]
        self._states = {str(path): state for path in paths if (state := file_state(path))}
        self.fingerprint = fingerprint or identity((READER_VERSION, self.files[0].dtype.str), paths)
        """Identifies the files, as fingerprint() does those of text."""

    def _mapped(self, number: int) -> np.ndarray:  # for the first time, perhaps, hours after the start
        require_unchanged([str(self.files[number].path)], self._states)
        return self.files[number].array()

    def checksum(self, tokens: int | None) -> str:
        """The fingerprint: the files may be too large to be read for this."""
        return self.fingerprint

    def read(self, start: int, out: np.ndarray) -> None:
        """As Shards.read(). Raises UserError for a token that the tokenizer or the model does not have."""
        super().read(start, out)
        if out.min() < 0 or out.max() >= self._limit:
            place = int(np.flatnonzero((out < 0) | (out >= self._limit))[0])
            position = (start + place) % self.tokens
            number = int(np.searchsorted(self._ends, position, side="right")) - 1
            raise UserError(
                f"data.source: '{self.files[number].path}' holds {out[place]} at {position - int(self._ends[number]):,}"
                f" (counted from 0), but data.tokenizer and the model end with {self._limit - 1:,}; name the tokenizer"
                " that made the tokens, or the type that they have"
            )

    def verify(self, *, document_mask: bool, log: Callable[[str], None]) -> None:
        """Look at all tokens if there are few, at the indexes, and at the ends of some documents. Raises UserError for
        ids out of range and, with document_mask, for documents without an end; without, logs that."""
        if sum(file.path.stat().st_size for file in self.files) <= VERIFY_UP_TO_BYTES:
            for start in range(0, self.tokens, BLOCK):
                self.read(start, np.empty(min(BLOCK, self.tokens - start), np.int64))
        problem = ""
        for number in range(0, len(self.files), max(1, len(self.files) // LOOKED_AT)):
            file, array = self.files[number], self.files[number].array()
            if not file.index and not np.any(array[: 4 * BLOCK] == self._end):
                problem = f"no document ends in the first {4 * BLOCK:,} tokens of '{file.path}'"
            ends = self._ends_in(number) if file.index else np.empty(0, np.int64)
            for end in ends[:: max(1, len(ends) // LOOKED_AT)].tolist():
                if end and array[end - 1] != self._end:
                    problem = f"the document before token {end:,} of '{file.path}' ends with {array[end - 1]}"
        if problem:
            problem += f", but data.tokenizer ends documents with {self._end}"
            if document_mask:
                raise UserError(f"data.document_mask: {problem}; write false, or the tokenizer that made the tokens")
            log(f"WARNING: {problem}; is it the one that made the tokens?")

    def _records(self, place: int, offset: int, stop: int) -> np.ndarray:
        ends = self._ends_in(place)
        first = max(0, int(np.searchsorted(ends, offset, side="right")) - 1)
        last = int(np.searchsorted(ends, stop - 1, side="right"))
        records = np.empty(last + 1 - first, DOCUMENT)
        records["end"], records["file"], records["row"] = ends[first : last + 1], place, np.arange(first, last + 1) + 1
        return records
