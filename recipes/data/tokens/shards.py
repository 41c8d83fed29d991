"""A tokenized source on disk: a folder of shards, each readable while the next is being written.

    00000-train.npy        tokens of the training documents, uint16 or uint32, each with its end-of-document token
    00000-validation.npy   the same for the held-out documents
    00000-documents.npy    one record per training document: where it ends, and its row in the source
    00000-bad.jsonl        rows without usable text, with the reason; absent if there are none
    00000.json             counts, checksums, where the source continues. Written last: without it there is no shard
    ...
    index.json             all of these in one file, once the whole source is tokenized
    tokenizer.json         the tokenizer
    owner.txt              fingerprint of the source, the tokenizer and the held-out share
    parts.json             where the parts begin that several machines make (recipes/data/tokens/parts.py): part 1 has
                           the shards from 1000000 on, part 2 those from 2000000 on; the index lists them in order
    .lock, .part-*         processes that are working here now (recipes/data/tokens/workspace.py)
    problem-*.txt          why no more tokens will come for a run

The tokens depend only on the source, the tokenizer and the held-out share; file names are stored as they were given.
Imports no torch.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from parallel.errors import TemporaryError, UserError
from recipes.files.atomic import write_whole
from recipes.files.reading import is_remote, memory_map, read_patiently, user_path, whole_text

# Part of every fingerprint: raise it when the same source starts to give different files.
FORMAT_VERSION = 2

TRAIN, VALIDATION, DOCUMENTS = "train", "validation", "documents"
ARRAYS = (TRAIN, VALIDATION, DOCUMENTS)
LISTED = 5  # bad rows shown in a message
INDEX, TOKENIZER, OWNER, PARTS = "index.json", "tokenizer.json", "owner.txt", "parts.json"
PART_SHARDS = 1_000_000
"""Shards of a part have the numbers from this times the part's number on."""
PROBLEMS = "problem*.txt"
"""Files that say why no more tokens will come for a run. (older versions wrote problem.txt)"""
MAY_PASS = "may pass: "
"""How the text of a TemporaryError begins there."""
# `end` counts tokens from the start of the shard; `file` and `row` are those of recipes/data/text/readers.py.
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
    """Bad rows, and rows lost with a part of a file that cannot be read."""
    lowest: float
    """Smallest hash of a document, from 0 to 1; a document below the held-out share is held out."""
    highest: float
    cursor: Any
    """The place where the source continues after this shard."""
    last: bool
    """Whether the source, or its part, ends here."""
    unread: bool = False
    """Whether a file could not be read, perhaps only for a while."""
    checksums: dict[str, str] = field(default_factory=dict)
    """xxh3 of each array's bytes, in hexadecimal."""
    number: int = 0
    """Names its files."""

    @property
    def stored(self) -> dict[str, Any]:
        """What the description and the index hold: of a source without parts, the place in the index is the number."""
        return {name: value for name, value in vars(self).items() if name != "number" or value >= PART_SHARDS}

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
    """The file in which the first process of this run says why no more tokens will come. Each run has its own."""
    return folder / f"problem-{run}.txt"


def write_problem(file: Path, error: UserError) -> None:
    """Tell processes that follow why no more tokens will come."""
    write_whole(file, f"{MAY_PASS if isinstance(error, TemporaryError) else ''}{error}")


def read_problem(file: Path) -> UserError | None:
    """The error in this file; None if there is no such file."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return None
    return TemporaryError(text.removeprefix(MAY_PASS)) if text.startswith(MAY_PASS) else UserError(text)


def tokens_fingerprint(source: str, tokenizer: str, validation_fraction: float) -> str:
    """The fingerprint of shards. source, tokenizer: their fingerprints."""
    return xxhash.xxh3_128_hexdigest(repr((FORMAT_VERSION, source, tokenizer, validation_fraction)).encode())


def token_type(vocabulary: int) -> np.dtype:
    """The narrowest type that holds every id."""
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


def read_shard(folder: Path, number: int) -> Shard | None:
    """What a shard holds; None if it is missing or incomplete. Raises TemporaryError if that cannot be told now."""
    try:
        return _shard(json.loads(_text(shard_path(folder, number))) | {"number": number})
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def shards_from(folder: Path, number: int) -> Iterator[Shard]:
    """The shards from this number on, up to the first that is missing, or the end of the source or of its part."""
    while (shard := read_shard(folder, number)) is not None:
        yield shard
        if shard.last:
            return
        number += 1


def _shard(content: dict[str, Any]) -> Shard:
    """Raises ValueError or TypeError for what does not describe a shard."""
    shard = Shard(**content)
    numbers = (shard.train, shard.validation, shard.documents, shard.held_out, shard.empty, shard.bad, shard.number)
    is_checked = not shard.checksums or {*ARRAYS} <= {*shard.checksums}  # the first versions wrote none
    if not (is_checked and all(type(number) is int and number >= 0 for number in numbers)):
        raise ValueError("not the description of a shard")
    return shard


@dataclass(frozen=True)
class Index:
    """index.json of a source that is tokenized completely."""

    format: int
    source: str
    source_fingerprint: str
    tokenizer_fingerprint: str
    validation_fraction: float
    files: tuple[str, ...]
    """Names of the source's files; documents refer to them by index."""
    shards: tuple[Shard, ...]
    pairs: str = ""
    """How its rows became pairs (PairFormat.summary); "" = they are text."""

    @property
    def fingerprint(self) -> str:
        """Identifies what the shards hold, as Preparation.fingerprint does, unless a file could not be read."""
        found = tokens_fingerprint(self.source_fingerprint, self.tokenizer_fingerprint, self.validation_fraction)
        if lacking := [(number, shard.checksums) for number, shard in enumerate(self.shards) if shard.unread]:
            return xxhash.xxh3_128_hexdigest(repr((found, lacking)).encode())
        return found

    def json(self) -> str:
        return json.dumps(vars(self) | {"shards": [shard.stored for shard in self.shards]})


def read_index(folder: Path) -> Index | None:
    """The index of a folder; None if it has no complete index of this version. Raises TemporaryError."""
    try:
        content = json.loads(_text(folder / INDEX))
        if content["format"] != FORMAT_VERSION:
            return None
        shards = tuple(_shard({"number": place} | shard) for place, shard in enumerate(content.pop("shards")))
        return Index(**content | {"files": tuple(content["files"])}, shards=shards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def open_index(folder: str) -> Index:
    """The index of a folder, which may be at a server. Raises UserError if there is no usable one."""
    if is_remote(folder):
        from recipes.files.local_copy import local_copy

        folder = str(local_copy(folder, only=(INDEX, OWNER, TOKENIZER)))
    index = read_index(user_path(folder))
    if index is None:
        raise UserError(
            f"data.source: '{Path(folder, INDEX)}' is damaged or of another version than {FORMAT_VERSION}; prepare the"
            " folder again with scripts/prepare_data.py"
        )
    return index


def bad_rows(folder: Path, shards: Sequence[Shard], *, first: int = 0) -> Iterator[dict[str, Any]]:
    """File, row and reason of each bad row in these shards from `first` on. Raises UserError if a list is damaged."""
    for shard in shards[first:]:
        if shard.bad:
            file = bad_rows_path(folder, shard.number)
            try:
                yield from read_bad_rows(file)
            except (OSError, ValueError, RecursionError) as error:
                raise UserError(
                    f"data.source: the list of bad rows '{file}' cannot be read ({error}); remove"
                    f" '{shard_path(folder, shard.number)}' and run the same command (or prepare_data.py) again"
                ) from None


def read_bad_rows(file: Path) -> list[dict[str, Any]]:
    """Raises ValueError if the file does not hold bad rows."""
    rows = [json.loads(line) for line in _text(file).splitlines()]
    if not rows or not all(isinstance(row, dict) and {"file", "row", "reason"} <= row.keys() for row in rows):
        raise ValueError("not a list of bad rows")
    return rows


class BadRowBudget:
    """Counts the bad rows of one source, shard by shard."""

    def __init__(self, folder: Path, *, source: str, budget: float, setting: str = "data.bad_row_budget") -> None:
        """source: its name in messages. budget: share of the rows that may be bad. setting: name of the budget."""
        self._folder, self._source, self._budget, self._setting = folder, source, budget, setting
        self._bad = self._rows = self._shards = 0

    def count(self, shards: Sequence[Shard]) -> None:
        """Count the shards after those counted already. Raises UserError if too many rows are bad."""
        for shard in shards[self._shards :]:
            self._bad, self._rows, self._shards = self._bad + shard.bad, self._rows + shard.rows, self._shards + 1
            if self._bad > self._budget * self._rows:
                raise UserError(self._message(shards[: self._shards]))

    def _message(self, shards: Sequence[Shard]) -> str:
        from recipes.data.text.row import unit

        listed = "".join(
            f"\n  {row['file']}, {unit(row['file'])} {row['row']}: {row['reason']}"
            for row in islice(bad_rows(self._folder, shards), LISTED)
        )
        lists = [bad_rows_path(self._folder, shard.number) for shard in shards if shard.bad]
        where = f"'{lists[0]}'" if len(lists) == 1 else f"'{lists[0]}' to '{lists[-1].name}'"
        return (
            f"{self._setting}: {self._bad} of the first {self._rows} rows of {self._source!r} hold no usable text,"
            f" a share of {self._bad / self._rows:.3g}, more than {self._budget}; repair the source or raise the"
            f" budget. All of them are listed in {where}. The first:{listed}"
        )


def _text(file: Path) -> str:
    """The contents of a file. Raises OSError, and TemporaryError if that may pass."""
    return read_patiently(lambda: whole_text(file), what=f"data.source: '{file}'")


def _mapped(file: Path) -> np.ndarray:
    """The array in a file, memory-mapped. Raises UserError if it is damaged, TemporaryError if it may be read later."""
    try:  # as a plain array, because slicing a numpy.memmap is twenty times slower
        return np.asarray(read_patiently(lambda: memory_map(file), what=f"data.source: '{file}'"))
    except FileNotFoundError as error:
        raise TemporaryError(
            f"data.source: the tokens in '{file}' were removed while the run reads them; the same command makes those"
            " of data.cache again, and scripts/prepare_data.py those of a prepared folder"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"data.source: cannot read the tokens in '{file}': {error}") from error


class Shards:
    """The tokens of one kind in a folder, as one row over all existing shards. They are memory-mapped."""

    def __init__(self, folder: Path, kind: str = TRAIN, *, only: Sequence[Shard] | None = None, maps: int = 64) -> None:
        """kind: TRAIN or VALIDATION. only: these first shards, as if the source ended there. maps: files at a time."""
        self.folder, self.kind = folder, kind
        self._map = lru_cache(maxsize=maps)(lambda number: _mapped(array_path(folder, number, kind)))
        self.shards: list[Shard] = []
        self._closed = only is not None
        self._ends = np.zeros(1, dtype=np.int64)  # (shards + 1,): tokens before each shard, and in total
        if only is not None:
            self._take(only)
        elif index := read_index(folder):
            self._take(index.shards)
        self.refresh()

    @property
    def tokens(self) -> int:
        """Tokens in the existing shards."""
        return int(self._ends[-1])

    @property
    def complete(self) -> bool:
        """Whether the whole source is tokenized."""
        return self._closed or (bool(self.shards) and self.shards[-1].last)

    def refresh(self) -> bool:
        """Look for new shards. Returns whether there are any."""
        new = [] if self.complete else [*shards_from(self.folder, len(self.shards))]
        self._take(new)
        return bool(new)

    def covering(self, tokens: int) -> int:
        """How many shards hold the first `tokens` tokens; all existing shards if they hold fewer."""
        return min(int(np.searchsorted(self._ends, tokens, side="left")), len(self.shards))

    def checksum(self, tokens: int | None) -> str:
        """The checksum of the first `tokens` tokens; of all existing tokens for None, or if there are fewer."""
        count = len(self.shards) if tokens is None else self.covering(tokens)
        parts = [shard.checksums[self.kind] for shard in self.shards[:count]]
        if tokens is not None and tokens < self._ends[count]:
            # Not mapped by _array(), which belongs to the thread that reads ahead.
            last = _mapped(self._path(count - 1, self.kind))
            parts[-1] = xxhash.xxh3_64_hexdigest(last[: tokens - int(self._ends[count - 1])].data)
        return xxhash.xxh3_128_hexdigest(" ".join(parts).encode())

    def read(self, start: int, out: np.ndarray) -> None:
        """Copy tokens start .. start + len(out) - 1 into `out`, of any integer type. The row of tokens repeats."""
        filled = 0
        while filled < len(out):
            position = (start + filled) % self.tokens
            number = int(np.searchsorted(self._ends, position, side="right")) - 1
            offset = position - int(self._ends[number])
            piece = self._array(number)[offset : offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)

    def arrays(self) -> Iterator[np.ndarray]:
        """The tokens of each existing shard."""
        return map(self._array, range(len(self.shards)))

    def documents(self, start: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """The (file, row, begin, end) of each piece of a training document in tokens start .. start + count - 1: tokens
        begin .. end - 1 of the document, whose last token is its end-of-document token."""
        while count > 0:
            start %= self.tokens
            number = int(np.searchsorted(self._ends, start, side="right")) - 1
            offset = start - int(self._ends[number])
            stop = min(offset + count, int(self._ends[number + 1] - self._ends[number]))
            records = self._records(number, offset, stop)
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

    def _path(self, place: int, kind: str) -> Path:
        return array_path(self.folder, self.shards[place].number, kind)

    def _records(self, place: int, offset: int, stop: int) -> np.ndarray:
        """At least the documents with tokens in offset .. stop - 1 of a shard, and the one before."""
        return _mapped(self._path(place, DOCUMENTS))

    def _array(self, number: int) -> np.ndarray:
        array = self._map(self.shards[number].number)
        if array.shape != (int(self._ends[number + 1] - self._ends[number]),):
            file = self._path(number, self.kind)
            raise UserError(f"data.source: '{file}' does not match its index; remove {self.folder}")
        return array
