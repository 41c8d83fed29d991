"""The rows of one file in order, starting at any place; a bad row is a row with a problem. A reader yields each row
with the place after it. The rows depend only on the file's bytes, not on where reading starts. At most one row is held
in memory; of parquet, one batch of rows. Imports no torch."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO

from recipes.data.text.plain_text import plain_text
from recipes.data.text.row import (
    ARRAY,
    AUTO,
    BROKEN,
    BROKEN_FILE,
    BYTE_ORDER_MARK,
    LONGEST_ROW,
    PIECE,
    PLAIN_TEXT,
    UNREADABLE,
    Fields,
    File,
    Place,
    Row,
    Rows,
    TextRule,
    decoded_text,
    is_compressed,
    text_of,
    text_or_problem,
)
from recipes.files.added import Adding, added_to
from recipes.files.border import foreign, reason

# About the length of a web page. Counted as one row, a lost file of a million rows would equal one broken line.
BYTES_PER_LOST_ROW = 4096
# Bytes of text per compressed byte of gzip or zstd: C4's English part is 806 GB of text in 305 GB of .json.gz.
COMPRESSION_RATIO = 3


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
        if is_compressed(path):
            from recipes.data.text.compressed import require_narrow

            require_narrow(path, error)
        # The place after it is the next file, so that this row comes only once when reading resumes there.
        passing = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno)  # pyarrow's have none
        kind = UNREADABLE if passing else BROKEN_FILE
        problem = f"{kind}: {reason(error)}; the rest of the file is lost"
        yield Row("", start.file, place.number + 1, problem, _rows_after(path, place, size)), Place(start.file + 1)


def file_kind(path: File) -> str:
    """What is at a path: "file", "folder", or something that is not read."""
    if not isinstance(path, Path) or path.is_file():
        return "file"
    if path.is_dir():
        return "folder"
    if path.is_symlink():
        return "a broken link"
    return "a pipe or device" if path.exists() else "a missing file"


def _open_text(path: File) -> IO[bytes]:
    """The text of a file, decompressed if need be. Opening and reading raise one of BROKEN."""
    if not is_compressed(path):
        return path.open("rb")
    from recipes.data.text.compressed import CompressedText

    return CompressedText(path)


def _rows_after(path: File, place: Place, size: int) -> int:
    """An estimate, at least 1, of the rows after a place where a file cannot be read further: as long as the rows
    before, or BYTES_PER_LOST_ROW if there are none."""
    if place.number and place.offset:
        return max(1, (size - place.offset) * place.number // place.offset)
    return max(1, size * (COMPRESSION_RATIO if is_compressed(path) else 1) // BYTES_PER_LOST_ROW)


def _reader(path: File, *, text_field: Fields, start: Place, rule: TextRule) -> Rows:
    name = path.name.lower()
    if (added := added_to(name)) and isinstance(path, Path):
        return _of_plugin(path, added, text_field=text_field, start=start)
    if name.endswith(".txt"):
        return plain_text(path, rule=rule, start=start)
    if name.endswith((".parquet", ".csv", ".tsv", *PLAIN_TEXT)) or (name.endswith(".json") and is_array(path)):
        from recipes.data.text.tables import array, csv_rows, one_document, parquet

        kinds = {"parquet": parquet, "csv": csv_rows, "tsv": csv_rows, "json": array}
        return kinds.get(name.rpartition(".")[2], one_document)(path, text_field=text_field, start=start)
    return _json_lines(path, text_field=text_field, start=start)


def _of_plugin(path: Path, added: Adding, *, text_field: Fields, start: Place) -> Rows:
    rows, number = iter(added.work(path)), 0
    while True:
        with foreign(f"data.source: '{path}', row {number + 1}: plug-in {added.version}"):
            if (row := next(rows, None)) is None:
                return
        number += 1
        if number > start.number:
            found = text_of(row, text_field) if isinstance(row, Mapping) else text_or_problem(row, text_field="text")
            yield Row(found[0], start.file, number, found[1]), Place(start.file, number)


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
            offset = getattr(stream, "place", offset + size)  # compressed bytes, if it is compressed
            if line is None:
                problem = f"too long: a line of {size} bytes, more than {LONGEST_ROW}"
                yield Row("", file, number, problem), Place(file, number, offset)
            elif not line.isspace():
                text, problem = _text_of(line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line, text_field)
                yield Row(text, file, number, problem), Place(file, number, offset)


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
    except json.JSONDecodeError as error:
        hint = f"; {ARRAY}" if content.startswith("[") else ""
        return "", f"not JSON: {error.msg} (character {error.pos + 1}){hint}"
    except RecursionError:
        return "", "not JSON: nested too deeply"
    except ValueError as error:  # a number with thousands of digits
        return "", f"not JSON: {reason(error)}"
    if not isinstance(row, dict):
        hint = f"; {ARRAY}" if isinstance(row, list) else ""
        return "", f"not a JSON object: {type(row).__name__}{hint}"
    return text_of(row, text_field)
