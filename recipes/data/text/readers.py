"""The rows of one file in order, starting at any place; a bad row is a row with a problem. A reader yields each row
with the place after it. The rows depend only on the file's bytes, not on where reading starts. At most one row is held
in memory; of parquet, one batch of rows. Imports no torch."""

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from recipes.data.text.pairs import PairFormat
    from recipes.files.remote import RemoteFile

# What reading a broken file raises: the first three include pyarrow's errors, the next two are gzip's.
BROKEN = (OSError, ValueError, NotImplementedError, EOFError, zlib.error, MemoryError)
# A longer line is a bad row and is skipped in pieces: an endless one would fill the memory.
LONGEST_ROW = 64_000_000
PIECE = 1 << 20
# A tokenizer takes a second for a word of this length, and minutes and gigabytes for one as long as the longest row.
LONGEST_WORD = 1_000_000
WORDS = re.compile(r"\w+|[^\w\s]+|\s+")

# JSON nested deeper is a bad row. Python's parser itself would stop at 1000 minus the depth of the call stack.
DEEPEST_NESTING = 500

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
UTF_16 = "looks like UTF-16; convert the file: iconv -f UTF-16 -t UTF-8 OLD > NEW"
# The share of NUL bytes in UTF-16: half of English, and a line ending now and then of other scripts.
UTF_16_NULS = (0.02, 0.6)
ARRAY = "if it is one JSON array, write a line for each item: jq -c '.[]' OLD > NEW.jsonl"
NAMES_SHOWN = 20
UNREADABLE, BROKEN_FILE = "unreadable file", "broken file"
"""Unreachable, perhaps only for now; or with contents that can never be read."""
# About the length of a web page. Counted as one row, a lost file of a million rows would equal one broken line.
BYTES_PER_LOST_ROW = 4096


class Row(NamedTuple):
    """One row of a source."""

    text: str
    """Empty for an empty row and for a bad one."""
    file: int
    """Index into the source's files."""
    number: int
    """From 1: the line of .jsonl, the row of parquet or of a hub dataset's shard, or the document of plain text."""
    problem: str = ""
    """Why the row is bad, starting with the kind, which ends at the first colon or semicolon; "" = it is fine."""
    lost: int = 1
    """Of a bad row: how many rows are lost with it, if a part of the file or all of it cannot be read."""

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
    """Bytes before it, in formats that can seek."""


Rows = Iterator[tuple[Row, Place]]
File: TypeAlias = "Path | RemoteFile"
Fields: TypeAlias = "str | PairFormat"
"""What is read of a row: its text field, or those that make a pair."""


class TextRule(NamedTuple):
    """What a document of a .txt file is."""

    documents: str = "auto"
    """data.text_documents."""
    small_files: bool = False
    """Whether "auto" takes a small file for a document."""


AUTO = TextRule()


def read_file(path: File, *, text_field: Fields, start: Place, size: int, rule: TextRule = AUTO) -> Rows:
    """The rows of a file after `start`, each with the place after it. A file that breaks off ends in a bad row.

    text_field: of .jsonl, .parquet and .csv. size: bytes of the file when the source was opened, to estimate what is
    lost if it has disappeared since. rule: for .txt.
    """
    place = start
    try:
        for row, place in _reader(path, text_field=text_field, start=start, rule=rule):
            yield row, place
    except BROKEN as error:
        # The place after it is the next file, so that this row comes only once when reading resumes there.
        passing = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno)  # pyarrow's have none
        kind = UNREADABLE if passing else BROKEN_FILE
        problem = f"{kind}: {reason(error)}; the rest of the file is lost"
        yield Row("", start.file, place.number + 1, problem, _rows_after(path, place, size)), Place(start.file + 1)


def file_kind(path: Path) -> str:
    """What is at a path: "file", "folder", or something that is not read."""
    if path.is_file() or path.is_dir():
        return "file" if path.is_file() else "folder"
    if path.is_symlink():
        return "a broken link"
    return "a pipe or device" if path.exists() else "a missing file"


def is_compressed(path: File) -> bool:
    return path.name.lower().endswith((".gz", ".zst"))


def _open_text(path: File) -> IO[bytes]:
    """The text of a file, decompressed if need be. Opening and reading raise one of BROKEN."""
    if not is_compressed(path):
        return path.open("rb")
    from recipes.data.text.compressed import open_compressed

    return open_compressed(path)


def _rows_after(path: File, place: Place, size: int) -> int:
    """An estimate, at least 1, of the rows after a place where a file cannot be read further: as long as the rows
    before, or BYTES_PER_LOST_ROW if there are none."""
    if is_compressed(path):
        from recipes.data.text.compressed import COMPRESSION_RATIO, before_the_break

        lines, broken_at = before_the_break(path)
        if lines:
            return max(1, lines - place.number + (size - broken_at) * lines // broken_at)
        size *= COMPRESSION_RATIO
    if place.number and place.offset:
        return max(1, (size - place.offset) * place.number // place.offset)
    return max(1, size // BYTES_PER_LOST_ROW)


def unit(path: "File | str") -> str:
    """What a row number counts in this file: document, line or row."""
    name = str(path).lower()
    if name.endswith(".txt"):
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
            return "", f"invalid Unicode: half a surrogate pair at character {error.start + 1}"
    if "\0" in value and _is_share_of_utf_16(value.count("\0"), len(value)):
        return "", UTF_16
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


def _reader(path: File, *, text_field: Fields, start: Place, rule: TextRule) -> Rows:
    name = path.name.lower()
    if name.endswith(".parquet"):
        from recipes.data.text.parquet import parquet

        return parquet(path, text_field=text_field, start=start)
    if name.endswith(".csv"):
        from recipes.data.text.csv_rows import csv_rows

        return csv_rows(path, text_field=text_field, start=start)
    if name.endswith(".txt"):
        from recipes.data.text.plain_text import plain_text

        return plain_text(path, rule=rule, start=start)
    if name.endswith(".py"):
        assert isinstance(path, Path), "only the standard library's files are Python"
        return _python(path, start=start)
    return _json_lines(path, text_field=text_field, start=start)


def reason(error: Exception) -> str:
    """The error as one line, without the path that errors of the operating system repeat."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, MemoryError):
        text = f"not enough memory {text}"
    return " ".join(text.split())[:500] or type(error).__name__


def decoded_text(data: bytes | bytearray, *, offset: int = 0) -> tuple[str, str]:
    """(text, "") or ("", problem). Each line ending becomes a line feed. offset: bytes before `data`, added to the
    position of a bad byte."""
    if data.startswith(UTF_16_MARKS) or b"\0" in data:
        nuls = data.count(b"\0")
        if data.startswith(UTF_16_MARKS) or _is_share_of_utf_16(nuls, len(data)):
            return "", UTF_16
        return "", f"NUL bytes: {nuls}, the first at {offset + data.index(0) + 1}; the file is damaged or is not text"
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return "", f"invalid UTF-8: byte {data[error.start]:#04x} at {offset + error.start + 1}"
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text, ""


def _is_share_of_utf_16(nuls: int, size: int) -> bool:
    least, most = UTF_16_NULS
    return least * size < nuls < most * size


def _python(path: Path, *, start: Place) -> Rows:
    if start.number == 0:
        data = path.read_bytes()
        text, problem = decoded_text(data.removeprefix(BYTE_ORDER_MARK))
        yield Row(text, start.file, 1, problem), Place(start.file, 1, len(data))


def _json_lines(path: File, *, text_field: Fields, start: Place) -> Rows:
    file, number, offset = start
    with _open_text(path) as stream:
        lines = _lines(stream)
        if is_compressed(path):  # cannot seek: decompress again and skip
            next(islice(lines, number, number), None)
        else:
            stream.seek(offset)
        for line, size in lines:
            number += 1
            offset += size
            if line is None:
                problem = f"too long: a line of {size} bytes, more than {LONGEST_ROW}"
                yield Row("", file, number, problem), Place(file, number, offset)
            elif not line.isspace():
                text, problem = _text_of(line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line, text_field)
                lost = 1
                if problem.startswith("not JSON") and (returns := line.strip().count(b"\r")):
                    lost += returns
                    problem += "; if its lines end in CR alone, convert the file: tr '\\r' '\\n' < OLD > NEW"
                yield Row(text, file, number, problem, lost), Place(file, number, offset)


def is_array(path: File) -> bool:
    """Whether a JSON file is one array rather than one row per line, as far as it can be read."""
    try:
        with _open_text(path) as stream:
            return stream.read(PIECE).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")
    except BROKEN:
        return False


def _lines(stream: IO[bytes]) -> Iterator[tuple[bytes | bytearray | None, int]]:
    """Each line and its size in bytes; None for a line that is too long, which is read piece by piece."""
    while piece := stream.readline(PIECE):
        if len(piece) < PIECE or piece.endswith(b"\n"):
            yield piece, len(piece)
            continue
        line: bytearray | None = bytearray(piece)
        size = len(piece)
        while not piece.endswith(b"\n") and (piece := stream.readline(PIECE)):
            size += len(piece)
            if size > LONGEST_ROW:
                line = None
            elif line is not None:
                line += piece
        yield line, size


def _text_of(line: bytes | bytearray, text_field: Fields) -> tuple[str, str]:
    """(text, "") or ("", problem) of a line."""
    content, problem = decoded_text(line.rstrip())  # else an open string would be reported as a bad line ending
    if problem:
        return "", problem
    try:
        row = json.loads(content)
        if _is_nested_deeper(row):
            raise RecursionError
    except json.JSONDecodeError as error:
        hint = f"; {ARRAY}" if content.startswith("[") else ""
        return "", f"not JSON: {error.msg} (character {error.pos + 1}){hint}"
    except RecursionError:
        return "", f"not JSON: nested deeper than {DEEPEST_NESTING} levels"
    except ValueError as error:  # a number with thousands of digits
        return "", f"not JSON: {reason(error)}"
    if not isinstance(row, dict):
        hint = f"; {ARRAY}" if isinstance(row, list) else ""
        return "", f"not a JSON object: {type(row).__name__}{hint}"
    return text_of(row, text_field)


def _is_nested_deeper(value: Any) -> bool:
    level: list[Any] = [[value]]
    for _ in range(DEEPEST_NESTING + 1):
        values = chain.from_iterable(item.values() if isinstance(item, dict) else item for item in level)
        level = [item for item in values if isinstance(item, (dict, list))]
        if not level:
            return False
    return True
