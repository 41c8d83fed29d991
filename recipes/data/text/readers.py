"""The rows of one file, in order, from any place in it: what is wrong with a row is a part of it. Imports no torch.

A reader yields each row with the place behind it. The rows are a function of the file's bytes alone, whatever the
place it was entered by. At most one row is held, of parquet one batch of rows.
"""

import io
import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from recipes.data.text.compressed import BROKEN, COMPRESSION_RATIO, before_the_break, is_compressed, open_text

# A longer line is a bad row, passed over in pieces: one without end would fill the memory.
LONGEST_ROW = 64_000_000
PIECE = 1 << 20

# Plain text has no documents of its own, and as one document a whole file would be either training or held-out text.
# So it is cut at the first blank line after this many bytes: small enough that one per cent of a 1 MB file is several
# documents, large enough to hold some context. Text without blank lines is cut at the longer length.
CHUNK_BYTES = 2_048
LONGEST_CHUNK_BYTES = 65_536

# Parquet is decoded in batches of about this size by the mean of all rows, but never more rows: their sizes may differ.
BATCH_BYTES = 1 << 22
BATCH_ROWS = 128

# JSON nested deeper is a bad row. How deep Python's parser gets depends on who calls it: 1000 less the calls it is in.
DEEPEST_NESTING = 500

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NAMES_SHOWN = 20
UNREADABLE, BROKEN_FILE = "unreadable file", "broken file"
"""Out of reach, which may pass; or with contents that cannot be read, which stay."""
# A page of the web is about as long. Else a lost file of a million rows would weigh no more than a broken line.
BYTES_PER_LOST_ROW = 4096


class Row(NamedTuple):
    """One row of a source."""

    text: str
    """Empty for an empty row and for a bad one."""
    file: int
    """Index into the source's files."""
    number: int
    """From 1: the line of .jsonl, the row of parquet or of a hub dataset's shard, the document of plain text."""
    problem: str = ""
    """Why the row is bad, beginning with the kind, which ends at the first colon or semicolon; "" = it is fine."""
    lost: int = 1
    """Of a bad row: how many rows are lost with it, where a part of a file or all of it cannot be read."""

    @property
    def kind(self) -> str:
        """The problem without what differs from row to row, to count by."""
        return self.problem.partition(":")[0].partition(";")[0]


class Place(NamedTuple):
    """A place between two rows."""

    file: int
    number: int = 0
    """Of the last row before it: 0 = the file's beginning."""
    offset: int = 0
    """Bytes before it, where that is of use."""


Rows = Iterator[tuple[Row, Place]]


def read_file(path: Path, *, text_field: str, start: Place, size: int) -> Rows:
    """The rows of a file behind `start`, each with the place behind it. A file that breaks off ends in a bad row.

    size: of the file in bytes when the source was opened; how much is lost where the file is gone since.
    """
    place = start
    try:
        for row, place in _reader(path, text_field=text_field, start=start):
            yield row, place
    except BROKEN as error:
        # The place behind it is the next file: entered there, this row comes once.
        kind = UNREADABLE if isinstance(error, OSError) and error.errno else BROKEN_FILE  # pyarrow's have none of that
        problem = f"{kind}: {reason(error)}; the rest of it is lost"
        yield Row("", start.file, place.number + 1, problem, _rows_behind(path, place, size)), Place(start.file + 1)


def file_size(path: Path) -> int:
    """Bytes; 0 where the file is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _rows_behind(path: Path, place: Place, size: int) -> int:
    """About how many rows there are behind a place in a file that cannot be read there: at least one.

    They are taken to be as long as those before them, or else BYTES_PER_LOST_ROW.
    """
    if is_compressed(path):
        lines, broken_at = before_the_break(path)
        if lines:
            return max(1, lines - place.number + (size - broken_at) * lines // broken_at)
        size *= COMPRESSION_RATIO
    if place.number and place.offset:
        return max(1, (size - place.offset) * place.number // place.offset)
    return max(1, size // BYTES_PER_LOST_ROW)


def unit(path: Path | str) -> str:
    """What a row's number counts in this file."""
    name = str(path).lower()
    if name.endswith(".txt"):
        return "document"
    return "line" if name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")) else "row"


def text_or_problem(value: Any, *, text_field: str) -> tuple[str, str]:
    """(text, "") for a value that is a text which can be encoded, ("", problem) for any other."""
    if not isinstance(value, str):
        return "", "null" if value is None else f"not text: field {text_field!r} holds {type(value).__name__}"
    if len(value) > LONGEST_ROW:
        return "", f"too long: {len(value)} characters, more than {LONGEST_ROW}"
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can escape one half of a surrogate pair
            return "", f"invalid Unicode: half a surrogate pair at character {error.start + 1}"
    return value, ""


def no_such_field(text_field: str, fields: Any) -> str:
    """The problem of a row without the field; `fields` it has."""
    names = [repr(str(name)[:50]) for name in islice(fields, NAMES_SHOWN)]
    return f"no field {text_field!r}; it has {', '.join(names) or '(none)'}"


def _reader(path: Path, *, text_field: str, start: Place) -> Rows:
    name = path.name.lower()
    if name.endswith(".parquet"):
        return _parquet(path, text_field=text_field, start=start)
    if name.endswith(".txt"):
        return _plain_text(path, start=start)
    if name.endswith(".py"):
        return _python(path, start=start)
    return _json_lines(path, text_field=text_field, start=start)


def reason(error: Exception) -> str:
    """One line, without the path that the operating system's errors repeat."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:500] or type(error).__name__


def _decoded(data: bytes | bytearray, *, offset: int = 0) -> tuple[str, str]:
    """(text, "") or ("", problem); `offset` is added to the place of a bad byte."""
    try:
        return data.decode(), ""
    except UnicodeDecodeError as error:
        return "", f"invalid UTF-8: byte {data[error.start]:#04x} at {offset + error.start + 1}"


# ------------------------------------------------------------------------------------------------------- text and code


def _python(path: Path, *, start: Place) -> Rows:
    if start.number == 0:
        data = path.read_bytes()
        text, problem = _decoded(data.removeprefix(BYTE_ORDER_MARK))
        yield Row(_with_line_feeds(text), start.file, 1, problem), Place(start.file, 1, len(data))


def _plain_text(path: Path, *, start: Place) -> Rows:
    file, number, offset = start
    with path.open("rb") as stream:
        stream.seek(offset)
        while chunk := _chunk(stream):
            text, problem = _decoded(chunk.removeprefix(BYTE_ORDER_MARK) if offset == 0 else chunk, offset=offset)
            number += 1
            offset += len(chunk)
            yield Row(_with_line_feeds(text), file, number, problem), Place(file, number, offset)


def _chunk(stream: IO[bytes]) -> bytes:
    """The bytes of the next document: a function of those that follow alone, so that any cut is a place to enter."""
    lines: list[bytes] = []
    size = 0
    while size < LONGEST_CHUNK_BYTES and (line := stream.readline(LONGEST_CHUNK_BYTES - size)):
        lines.append(line)
        size += len(line)
        if size >= CHUNK_BYTES and line.isspace() and line.endswith(b"\n"):
            break
    chunk = b"".join(lines)
    if size < LONGEST_CHUNK_BYTES or chunk.endswith(b"\n"):
        return chunk
    torn = _torn(chunk)
    stream.seek(-torn, io.SEEK_CUR)
    return chunk[: size - torn]


def _torn(chunk: bytes) -> int:
    """How many bytes at the end begin a character, or a line end, that the next bytes would complete."""
    if chunk.endswith(b"\r"):
        return 1
    for back in (1, 2, 3):
        byte = chunk[-back]
        if byte >= 0xC0:  # the first of two, three or four bytes
            return back if back < 2 + (byte >= 0xE0) + (byte >= 0xF0) else 0
        if byte < 0x80:
            break
    return 0


def _with_line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


# ---------------------------------------------------------------------------------------------------------- JSON lines


def _json_lines(path: Path, *, text_field: str, start: Place) -> Rows:
    file, number, offset = start
    with open_text(path) as stream:
        lines = _lines(stream)
        if is_compressed(path):  # no seeking: decompressed again and passed over unread
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
                yield Row(text, file, number, problem), Place(file, number, offset)


def is_array(path: Path) -> bool:
    """Whether a file of JSON is one array rather than a row on each line, as far as it can be read."""
    try:
        with open_text(path) as stream:
            return stream.read(PIECE).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")
    except BROKEN:
        return False


def _lines(stream: IO[bytes]) -> Iterator[tuple[bytes | bytearray | None, int]]:
    """Each line and its size in bytes; None for a line that is too long, of which one piece is held at a time."""
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


def _text_of(line: bytes | bytearray, text_field: str) -> tuple[str, str]:
    """(text, "") or ("", problem) of a line."""
    content, problem = _decoded(line.rstrip())  # a line end inside an open string would be blamed
    if problem:
        return "", problem
    try:
        row = json.loads(content)
        if _is_nested_deeper(row):
            raise RecursionError
    except json.JSONDecodeError as error:
        return "", f"not JSON: {error.msg} (character {error.pos + 1})"
    except RecursionError:
        return "", f"not JSON: nested deeper than {DEEPEST_NESTING} levels"
    except ValueError as error:  # a number of thousands of digits
        return "", f"not JSON: {reason(error)}"
    if not isinstance(row, dict):
        return "", f"not a JSON object: {type(row).__name__}"
    if text_field not in row:
        return "", no_such_field(text_field, row)
    return text_or_problem(row[text_field], text_field=text_field)


def _is_nested_deeper(value: Any) -> bool:
    level: list[Any] = [[value]]
    for _ in range(DEEPEST_NESTING + 1):
        values = chain.from_iterable(item.values() if isinstance(item, dict) else item for item in level)
        level = [item for item in values if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


# ------------------------------------------------------------------------------------------------------------- parquet


def _parquet(path: Path, *, text_field: str, start: Place) -> Rows:
    import pyarrow.parquet

    # A column of a row group is read page by page, not whole.
    options = {"buffer_size": PIECE, "pre_buffer": False, "page_checksum_verification": True}
    with pyarrow.parquet.ParquetFile(path, **options) as table:
        fields, rows = table.schema_arrow.names, table.metadata.num_rows
        if text_field not in fields and rows > start.number:
            problem = f"{no_such_field(text_field, fields)}; {rows} rows are lost"
            yield Row("", start.file, start.number + 1, problem, rows - start.number), Place(start.file, rows)
            return
        first = 0
        for group in range(table.num_row_groups):
            end = first + table.metadata.row_group(group).num_rows
            if start.number < end:
                yield from _row_group(table, group, text_field=text_field, start=start, first=first, end=end)
            first = end


def _row_group(table: Any, group: int, *, text_field: str, start: Place, first: int, end: int) -> Rows:
    """Rows first + 1 .. end of the file, from behind `start`. Decoded from its beginning, so always in like batches."""
    number = first
    batches = table.iter_batches(
        batch_size=_batch_rows(table.metadata.row_group(group)),
        row_groups=[group],
        columns=[text_field],
        use_threads=False,
    )
    while True:
        try:
            batch = next(batches, None)
        except (OSError, ValueError, NotImplementedError) as error:
            problem = f"broken row group: rows {number + 1} to {end} are lost: {reason(error)}"
            yield Row("", start.file, number + 1, problem, end - number), Place(start.file, end)
            return
        if batch is None:
            return
        if number + len(batch) <= start.number:
            number += len(batch)
            continue
        for value, problem in _values(batch.column(0)):
            number += 1
            if number > start.number:
                if not problem:
                    value, problem = text_or_problem(value, text_field=text_field)
                yield Row(value, start.file, number, problem), Place(start.file, number)


def _batch_rows(group: Any) -> int:
    # By the size of all columns: asking a damaged file for that of one ends the process (pyarrow 26).
    return min(max(1, BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)), BATCH_ROWS)


def _values(column: Any) -> Iterator[tuple[Any, str]]:
    """(value, problem) of each: Arrow does not promise that its strings are UTF-8."""
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        for scalar in column:
            try:
                yield scalar.as_py(), ""
            except UnicodeDecodeError as error:
                yield "", f"invalid UTF-8: byte {error.object[error.start]:#04x} at {error.start + 1}"
        return
    for value in values:
        yield value, ""
