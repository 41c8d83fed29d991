"""A row of a source: its text, its place, and what can be wrong with it. Imports no torch."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from recipes.files.border import PLAIN

if TYPE_CHECKING:
    from recipes.files.remote import RemoteFile

# What reading a broken file raises: the first three include pyarrow's errors, the next two are gzip's.
BROKEN = (*PLAIN, MemoryError)
# A longer line is a bad row and is skipped in pieces: an endless one would fill the memory.
LONGEST_ROW = 64_000_000
PIECE = 1 << 20
# A tokenizer takes a second for a word of this length, and minutes and gigabytes for one as long as the longest row.
LONGEST_WORD = 1_000_000
WORDS = re.compile(r"\w+|[^\w\s]+|\s+")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
PLAIN_TEXT = (".txt", ".md", ".py", ".html")
"""Files without fields; all but .txt are one document each."""
ARRAY = "if it is one JSON array, write a line for each item: jq -c '.[]' OLD > NEW.jsonl"
LATIN_1 = "; if the file is Latin-1, convert it: iconv -f LATIN1 -t UTF-8 OLD > NEW"
UTF_16 = "looks like UTF-16; convert the file: iconv -f UTF-16 -t UTF-8 OLD > NEW"
NAMES_SHOWN = 20
UNREADABLE, BROKEN_FILE = "unreadable file", "broken file"
"""Unreachable, perhaps only for now; or with contents that can never be read."""


class Row(NamedTuple):
    """One row of a source."""

    text: str
    """Empty for an empty row and for a bad one."""
    file: int
    """Index into the source's files."""
    number: int
    """Number from 1 of a line of .jsonl, a row of parquet or of a hub dataset's shard, or a document of plain text."""
    problem: str = ""
    """Why the row is bad, starting with the kind, which ends at the first colon or semicolon; "" = it is fine."""
    lost: int = 1
    """How many rows are lost with a bad one, if a part of the file or all of it cannot be read."""

    @property
    def has_text(self) -> bool:
        """Whether the row is a document."""
        return not self.problem and bool(self.text) and not self.text.isspace()

    @property
    def kind(self) -> str:
        """The problem without the details of this row, for counting."""
        return self.problem.partition(":")[0].partition(";")[0]


class Place(NamedTuple):
    """A place between two rows."""

    file: int
    number: int = 0
    """Number of the last row before it; 0 = the start of the file."""
    offset: int = 0
    """Bytes of the file before it, in formats that have them; of compressed ones, about."""


Rows = Iterator[tuple[Row, Place]]

File: TypeAlias = "Path | RemoteFile"


class RowFormat(Protocol):
    """How several fields of a row become one text: PairFormat of pair_format.py."""

    @property
    def messages(self) -> str: ...
    @property
    def tokens(self) -> list[str]: ...
    @property
    def fields(self) -> tuple[str, ...]: ...
    @property
    def setting(self) -> str: ...
    def text_of(self, row: Mapping[str, Any]) -> tuple[str, str]: ...
    def require_rows(self, files: Sequence[str]) -> None: ...
    def words_of(self, text: str) -> str: ...


Fields: TypeAlias = "str | RowFormat"
"""What is read of a row: its text field, or several."""


class TextRule(NamedTuple):
    """What a document of a .txt file is."""

    documents: str = "auto"
    """data.text_documents."""
    small_files: bool = False
    """Whether "auto" takes a small file for a document."""


AUTO = TextRule()


def is_compressed(path: File) -> bool:
    return path.name.lower().endswith((".gz", ".zst"))


def unit(path: "File | str") -> str:
    """What a row number counts in this file: document, line or row."""
    name = str(path).lower()
    if name.endswith(PLAIN_TEXT):
        return "document"
    return "line" if name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")) else "row"


def text_or_problem(value: Any, *, text_field: str) -> tuple[str, str]:
    """(text, "") for a string that can be encoded as UTF-8, ("", problem) for any other value."""
    if not isinstance(value, str):
        return "", "null" if value is None else f"not text: field {text_field!r} holds {type(value).__name__}"
    if len(value) > LONGEST_ROW:
        return "", f"too long: {len(value)} characters, more than {LONGEST_ROW}"
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can escape one half of a surrogate pair
            latin_1 = LATIN_1 if 0xDCA0 <= ord(value[error.start]) <= 0xDCFF else ""  # such bytes of .csv become these
            return "", f"invalid Unicode: half a surrogate pair at character {error.start + 1}{latin_1}"
    if len(value) > LONGEST_WORD and (longest := _longest_word(value)) > LONGEST_WORD:
        return "", f"too long: a word of {longest} characters, more than {LONGEST_WORD}"
    return value, ""


def _longest_word(text: str) -> int:
    """The characters of the longest word if it is longer than LONGEST_WORD; else some smaller number."""
    step = LONGEST_WORD // 2
    ends = ((at, WORDS.match(text, at)) for at in range(0, len(text), step))
    if all(word is None or word.end() - at < step for at, word in ends):  # a longer one covers two such places
        return 0
    return max(word.end() - word.start() for word in WORDS.finditer(text))


def names_of(text_field: Fields) -> tuple[str, ...]:
    """The fields that are read of a row."""
    return (text_field,) if isinstance(text_field, str) else text_field.fields


def text_of(row: Mapping[str, Any], text_field: Fields) -> tuple[str, str]:
    """(text, "") or ("", problem) of a row's fields."""
    if not isinstance(text_field, str):
        return text_field.text_of(row)
    if text_field not in row:
        return "", no_such_field(text_field, row)
    return text_or_problem(row[text_field], text_field=text_field)


def no_such_field(text_field: str, fields: Any) -> str:
    """The problem of a row that has only these `fields`."""
    names = [repr(str(name)[:50]) for name in islice(fields, NAMES_SHOWN)]
    return f"no field {text_field!r}; it has {', '.join(names) or '(none)'}"


def decoded_text(data: bytes | bytearray, *, offset: int = 0) -> tuple[str, str]:
    """(text, "") or ("", problem). Each line ending becomes a line feed. offset: bytes before `data`, added to the
    position of a bad byte."""
    if data.startswith(UTF_16_MARKS):
        return "", UTF_16
    if nuls := data.count(b"\0"):
        return "", f"NUL bytes: {nuls}, the first at {offset + data.index(0) + 1}; the file is damaged or is not text"
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        alone = data[error.start] >= 0xA0 and data[error.start + 1 : error.start + 2].isascii()
        where = f"byte {data[error.start]:#04x} at {offset + error.start + 1}"
        return "", f"invalid UTF-8: {where}{LATIN_1 if alone else ''}"
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text, ""
