"""A tokenized source on disk: a folder of shards, each readable while the next is being written.

    00000-train.npy        tokens of the training documents, uint16 or uint32, each document ended by its token
    00000-validation.npy   the same of the held-out documents
    00000-documents.npy    one record for each training document: where it ends, and the row of the source it was
    00000-bad.jsonl        rows that hold no usable text, with the reason; absent where there are none
    00000.json             counts, checksums, where the source goes on. Written last: without it there is no shard
    ...
    index.json             all of these in one file, once the source has come to its end
    tokenizer.json         what made the tokens
    owner.txt              fingerprint of the source, the tokenizer and the held-out share
    .lock, .part-*         who is at work here just now (recipes/data/tokens/workspace.py)
    problem-*.txt          why the process that tokenizes for a run ended

The tokens depend on the source, the tokenizer and the held-out share, and on nothing else; beside them stand the names
of the files as they were given. Imports no torch.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from parallel.errors import UserError
from recipes.data.text.readers import unit

# Part of every fingerprint: raise it when the same source begins to give other files.
FORMAT_VERSION = 2

TRAIN, VALIDATION, DOCUMENTS = "train", "validation", "documents"
ARRAYS = (TRAIN, VALIDATION, DOCUMENTS)
# Files that are mapped at a time: each takes a descriptor, of which a process usually has 1024.
MAPS = 256
# Bad rows that stand in a message.
LISTED = 5
INDEX, TOKENIZER, OWNER = "index.json", "tokenizer.json", "owner.txt"
PROBLEMS = "problem*.txt"
"""Files in which a process that tokenizes says why it ended. (problem.txt: of older versions)"""
# `end` counts tokens from the beginning of the shard; `file` and `row` are those of recipes/data/text/rows.py.
DOCUMENT = np.dtype([("end", "<u8"), ("file", "<u4"), ("row", "<u8")])


@dataclass(frozen=True)
class Shard:
    """What one shard holds."""

    train: int
    """Tokens."""
    validation: int
    documents: int
    """Training documents."""
    held_out: int
    """Validation documents."""
    empty: int
    """Rows without text."""
    bad: int
    """Rows that are not what they should be, and those lost with a part of a file that cannot be read."""
    lowest: float
    """Smallest hash of a document, as a share of all hashes; below the held-out share it is held out."""
    highest: float
    cursor: Any
    """Where the source goes on behind this shard."""
    last: bool
    """Whether the source ends here."""
    unread: bool = False
    """Whether a file could not be read: perhaps it can be another time."""
    checksums: dict[str, str] = field(default_factory=dict)
    """xxh3 of each array's bytes, in hexadecimal."""

    @property
    def rows(self) -> int:
        """Rows read from the source."""
        return self.documents + self.held_out + self.empty + self.bad


def array_path(folder: Path, number: int, kind: str) -> Path:
    return folder / f"{number:05d}-{kind}.npy"


def bad_rows_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}-bad.jsonl"


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.json"


def problem_path(folder: Path, run: str) -> Path:
    """Where the process that tokenizes for this run says why it ended: what others came to is no matter of the run."""
    return folder / f"problem-{run}.txt"


def tokens_fingerprint(source: str, tokenizer: str, validation_fraction: float) -> str:
    """Equal for equal shards. source, tokenizer: their fingerprints."""
    return xxhash.xxh3_128_hexdigest(repr((FORMAT_VERSION, source, tokenizer, validation_fraction)).encode())


def token_type(vocabulary: int) -> np.dtype:
    """The narrowest type that holds every id."""
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


def read_shard(folder: Path, number: int) -> Shard | None:
    """What a shard holds; None where it is not there, or not whole."""
    try:
        return Shard(**json.loads(shard_path(folder, number).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@dataclass(frozen=True)
class Index:
    """index.json: a source that was tokenized to its end."""

    format: int
    source: str
    source_fingerprint: str
    tokenizer_fingerprint: str
    validation_fraction: float
    files: tuple[str, ...]
    """Names of the source's files, in the order that documents refer to them by."""
    shards: tuple[Shard, ...]

    @property
    def fingerprint(self) -> str:
        """Names what the shards hold, as Preparation.fingerprint does; another one where a file could not be read."""
        found = tokens_fingerprint(self.source_fingerprint, self.tokenizer_fingerprint, self.validation_fraction)
        if lacking := [(number, shard.checksums) for number, shard in enumerate(self.shards) if shard.unread]:
            return xxhash.xxh3_128_hexdigest(repr((found, lacking)).encode())
        return found

    def json(self) -> str:
        return json.dumps(asdict(self))


def read_index(folder: Path) -> Index | None:
    """None where the folder has no whole index of this version."""
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if content["format"] != FORMAT_VERSION:
            return None
        shards = tuple(Shard(**shard) for shard in content.pop("shards"))
        return Index(**content | {"files": tuple(content["files"])}, shards=shards)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def open_index(folder: str) -> Index:
    """As read_index(). Raises UserError where there is none that can be used."""
    index = read_index(Path(folder).expanduser())
    if index is None:
        raise UserError(
            f"data.source: '{Path(folder, INDEX)}' is damaged or of another version than {FORMAT_VERSION}; prepare the"
            " folder again with scripts/prepare_data.py"
        )
    return index


def bad_rows(folder: Path, shards: Sequence[Shard], *, first: int = 0) -> Iterator[dict[str, Any]]:
    """File, row and reason of each bad row in these shards, from number `first` on.

    Raises UserError where a list of them is damaged.
    """
    for number, shard in enumerate(shards[first:], start=first):
        if shard.bad:
            file = bad_rows_path(folder, number)
            try:
                yield from _bad_rows(file)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"data.source: the list of bad rows '{file}' cannot be read ({error}); remove"
                    f" '{shard_path(folder, number)}', and the same command (or prepare_data.py) makes both again"
                ) from None


def _bad_rows(file: Path) -> list[dict[str, Any]]:
    """Raises ValueError where they are not what they should be."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if not rows or not all(isinstance(row, dict) and {"file", "row", "reason"} <= row.keys() for row in rows):
        raise ValueError("not what it should be")
    return rows


class BadRowBudget:
    """Keeps count of the bad rows of one source, shard by shard."""

    def __init__(self, folder: Path, *, source: str, budget: float, setting: str = "data.bad_row_budget") -> None:
        """source: what the user calls it. budget: share of the rows that may be bad. setting: what it is called."""
        self._folder, self._source, self._budget, self._setting = folder, source, budget, setting
        self._bad = self._rows = self._shards = 0

    def count(self, shards: Sequence[Shard]) -> None:
        """Take in the shards behind those counted already. Raises UserError where too many rows are bad."""
        for shard in shards[self._shards :]:
            self._bad, self._rows, self._shards = self._bad + shard.bad, self._rows + shard.rows, self._shards + 1
            if self._bad > self._budget * self._rows:
                raise UserError(self._complaint(shards[: self._shards]))

    def _complaint(self, shards: Sequence[Shard]) -> str:
        listed = "".join(
            f"\n  {row['file']}, {unit(row['file'])} {row['row']}: {row['reason']}"
            for row in islice(bad_rows(self._folder, shards), LISTED)
        )
        lists = [bad_rows_path(self._folder, number) for number, shard in enumerate(shards) if shard.bad]
        where = f"'{lists[0]}'" if len(lists) == 1 else f"'{lists[0]}' to '{lists[-1].name}'"
        return (
            f"{self._setting}: {self._bad} of the first {self._rows} rows of {self._source!r} hold no usable text,"
            f" a share of {self._bad / self._rows:.3g}, more than {self._budget}; repair the source or raise the"
            f" budget. All of them are listed in {where}. The first:{listed}"
        )


def damage(folder: Path, number: int, shard: Shard) -> str | None:
    """What is wrong with the files of a shard, or None. Reads all of them."""
    for kind in ARRAYS:
        file = array_path(folder, number, kind)
        try:
            content = np.load(file, mmap_mode="r")  # refuses a file shorter than its header says
        except (OSError, ValueError) as error:
            return f"{file.name} cannot be read: {error}"
        if xxhash.xxh3_64_hexdigest(content.data) != shard.checksums[kind]:
            return f"{file.name} does not have the checksum that {shard_path(folder, number).name} says"
    if shard.bad:
        try:
            _bad_rows(bad_rows_path(folder, number))
        except (OSError, ValueError) as error:
            return f"{bad_rows_path(folder, number).name} cannot be read: {error}"
    return None


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
        """numpy's headers leave room for the length to be written in place. Returns the checksum of the contents."""
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


class Shards:
    """The tokens of one kind in a folder, one row over all shards, as far as they are there.

    Tokens are mapped, not read: what stays in memory is for the operating system to decide.
    """

    def __init__(self, folder: Path, kind: str = TRAIN, *, only: Sequence[Shard] | None = None) -> None:
        """kind: TRAIN or VALIDATION. only: these first shards of the folder, as if the source ended with them."""
        self.folder = folder
        self.kind = kind
        self.shards: list[Shard] = []
        self._closed = only is not None
        self._ends = np.zeros(1, dtype=np.int64)  # (shards + 1,): tokens before each shard, and in all
        self._maps: OrderedDict[int, np.ndarray] = OrderedDict()  # the one used last at the end
        if only is not None:
            self._take(only)
        elif index := read_index(folder):
            self._take(index.shards)
        self.refresh()

    @property
    def tokens(self) -> int:
        """Tokens that are there."""
        return int(self._ends[-1])

    @property
    def complete(self) -> bool:
        """Whether the whole source is there."""
        return self._closed or (bool(self.shards) and self.shards[-1].last)

    def refresh(self) -> bool:
        """Look for further shards; returns whether there were any."""
        found: list[Shard] = []
        while not (found and found[-1].last) and not self.complete:
            shard = read_shard(self.folder, len(self.shards) + len(found))
            if shard is None:
                break
            found.append(shard)
        self._take(found)
        return bool(found)

    def covering(self, tokens: int) -> int:
        """How many shards it takes to hold the first so many tokens; all there are where there are fewer tokens."""
        return min(int(np.searchsorted(self._ends, tokens, side="left")), len(self.shards))

    def checksum(self, tokens: int | None) -> str:
        """Of the first so many tokens; of all there are where there are fewer, or for None."""
        count = len(self.shards) if tokens is None else self.covering(tokens)
        parts = [shard.checksums[self.kind] for shard in self.shards[:count]]
        if tokens is not None and tokens < self._ends[count]:
            # Mapped here and not by _array(), which belongs to the thread that reads ahead.
            last = np.load(array_path(self.folder, count - 1, self.kind), mmap_mode="r")
            parts[-1] = xxhash.xxh3_64_hexdigest(last[: tokens - int(self._ends[count - 1])].data)
        return xxhash.xxh3_128_hexdigest(" ".join(parts).encode())

    def read(self, start: int, out: np.ndarray) -> None:
        """Copy tokens start .. start + len(out) - 1 into `out`, any integer type. The first follows the last."""
        filled = 0
        while filled < len(out):
            position = (start + filled) % self.tokens
            number = int(np.searchsorted(self._ends, position, side="right")) - 1
            offset = position - int(self._ends[number])
            piece = self._array(number)[offset : offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)

    def documents(self, start: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """The training documents in tokens start .. start + count - 1, in their order: (file, row, begin, end) of each.

        Its tokens begin .. end - 1 are meant; the last of a document is its end-of-document token.
        """
        while count > 0:
            start %= self.tokens
            number = int(np.searchsorted(self._ends, start, side="right")) - 1
            records = np.load(array_path(self.folder, number, DOCUMENTS), mmap_mode="r")
            offset = start - int(self._ends[number])
            stop = min(offset + count, int(self._ends[number + 1] - self._ends[number]))
            first = int(np.searchsorted(records["end"], offset, side="right"))
            last = int(np.searchsorted(records["end"], stop - 1, side="right"))
            beginning = int(records["end"][first - 1]) if first else 0
            for record in records[first : last + 1]:
                ending = int(record["end"])
                yield (
                    int(record["file"]),
                    int(record["row"]),
                    max(offset, beginning) - beginning,
                    min(stop, ending) - beginning,
                )
                beginning = ending
            start += stop - offset
            count -= stop - offset

    def _take(self, shards: Sequence[Shard]) -> None:
        if shards:
            self.shards += shards
            self._ends = np.cumsum([0, *(getattr(shard, self.kind) for shard in self.shards)], dtype=np.int64)

    def _array(self, number: int) -> np.ndarray:
        if number in self._maps:
            self._maps.move_to_end(number)
        else:
            file = array_path(self.folder, number, self.kind)
            try:
                # As a plain array: numpy's class for maps makes each slice twenty times slower.
                self._maps[number] = np.asarray(np.load(file, mmap_mode="r"))
            except (OSError, ValueError) as error:
                raise UserError(f"data.source: cannot read the tokens in '{file}': {error}") from error
            if self._maps[number].shape != (int(self._ends[number + 1] - self._ends[number]),):
                raise UserError(f"data.source: '{file}' holds other tokens than its index says; remove {self.folder}")
            if len(self._maps) > MAPS:
                self._maps.popitem(last=False)
        return self._maps[number]
