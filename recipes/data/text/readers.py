"""The rows of one file in order, starting at any place; a bad row is a row with a problem. A reader yields each row
with the place after it. The rows depend only on the file's bytes, not on where reading starts. At most one row is held
in memory; of parquet, one batch of rows. Imports no torch."""

import io
import json
import zlib
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

# What reading a broken file raises: the first three include pyarrow's errors, the others are gzip's.
BROKEN = (OSError, ValueError, NotImplementedError, EOFError, zlib.error)
# A longer line is a bad row and is skipped in pieces: an endless one would fill the memory.
LONGEST_ROW = 64_000_000
PIECE = 1 << 20

# Plain text has no document boundaries, and a file as one document would be all training or all held-out text. So it is
# cut at the first blank line after this many bytes: small enough that one percent of a 1 MB file is several documents,
# large enough for some context. Text without blank lines is cut at the longer length.
CHUNK_BYTES = 2_048
LONGEST_CHUNK_BYTES = 65_536

# Parquet is decoded in batches of about this size, by the mean row size, and of at most this many rows: sizes may vary.
BATCH_BYTES = 1 << 22
BATCH_ROWS = 128

# JSON nested deeper is a bad row. Python's parser itself would stop at 1000 minus the depth of the call stack.
DEEPEST_NESTING = 500

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
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


def read_file(path: Path, *, text_field: str, start: Place, size: int) -> Rows:
    """The rows of a file after `start`, each with the place after it. A file that breaks off ends in a bad row. size:
    its bytes when the source was opened, to estimate what is lost if it has disappeared since."""
    place = start
    try:
        for row, place in _reader(path, text_field=text_field, start=start):
            yield row, place
    except BROKEN as error:
        # The place after it is the next file, so that this row comes only once when reading resumes there.
        kind = UNREADABLE if isinstance(error, OSError) and error.errno else BROKEN_FILE  # pyarrow's have no errno
        problem = f"{kind}: {reason(error)}; the rest of the file is lost"
        yield Row("", start.file, place.number + 1, problem, _rows_after(path, place, size)), Place(start.file + 1)


def is_compressed(path: Path) -> bool:
    return path.name.lower().endswith((".gz", ".zst"))


def _open_text(path: Path) -> IO[bytes]:
    """The text of a file, decompressed if need be. Opening and reading raise one of BROKEN."""
    if not is_compressed(path):
        return path.open("rb")
    from recipes.data.text.compressed import open_compressed

    return open_compressed(path)


def _rows_after(path: Path, place: Place, size: int) -> int:
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


def unit(path: Path | str) -> str:
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
    return value, ""


def no_such_field(text_field: str, fields: Any) -> str:
    """The problem of a row that has only these `fields`."""
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
    """The error as one line, without the path that errors of the operating system repeat."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:500] or type(error).__name__


def _decoded(data: bytes | bytearray, *, offset: int = 0) -> tuple[str, str]:
    """(text, "") or ("", problem). offset: bytes before `data`, added to the position of a bad byte."""
    try:
        return data.decode(), ""
    except UnicodeDecodeError as error:
        return "", f"invalid UTF-8: byte {data[error.start]:#04x} at {offset + error.start + 1}"


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
    """The bytes of the next document. They depend only on the bytes that follow, so reading can resume at any cut."""
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
    partial = _partial_bytes(chunk)
    stream.seek(-partial, io.SEEK_CUR)
    return chunk[: size - partial]


def _partial_bytes(chunk: bytes) -> int:
    """How many bytes at the end start a character or a line ending that is cut off."""
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


def _json_lines(path: Path, *, text_field: str, start: Place) -> Rows:
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
                yield Row(text, file, number, problem), Place(file, number, offset)


def is_array(path: Path) -> bool:
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


def _text_of(line: bytes | bytearray, text_field: str) -> tuple[str, str]:
    """(text, "") or ("", problem) of a line."""
    content, problem = _decoded(line.rstrip())  # else an open string would be reported as a bad line ending
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
    except ValueError as error:  # a number with thousands of digits
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


def _parquet(path: Path, *, text_field: str, start: Place) -> Rows:
    import pyarrow.parquet

    # Read a column of a row group page by page, not whole.
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
    """Rows first + 1 .. end of the file that are after `start`. Always decodes from the first, in the same batches."""
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
    # The size of all columns: asking a damaged file for the size of one crashes the process (pyarrow 26).
    return min(max(1, BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)), BATCH_ROWS)


def _values(column: Any) -> Iterator[tuple[Any, str]]:
    """(value, problem) of each value: Arrow does not guarantee that its strings are UTF-8."""
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
