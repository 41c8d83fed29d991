"""The rows of .parquet files, decoded a few at a time, of .csv files with a header, as spreadsheets write them (commas,
or tabs in .tsv; double quotes, line feeds inside quotes), of JSON arrays, and whole files. Imports no torch."""

import csv
import html
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from recipes.data.text.row import (
    ARRAY,
    BYTE_ORDER_MARK,
    LONGEST_ROW,
    PIECE,
    UNREADABLE,
    UTF_16,
    UTF_16_MARKS,
    Fields,
    File,
    Place,
    Row,
    Rows,
    decoded_text,
    names_of,
    no_such_field,
    text_of,
    text_or_problem,
)
from recipes.files.border import reason

# Parquet is decoded in batches of about this size, by the mean row size, and of at most this many rows: sizes may vary.
BATCH_BYTES = 1 << 22
BATCH_ROWS = 128
LARGEST_ARRAY = 2_000_000_000
"""Bytes of a JSON array, which is held in memory."""
UNSEEN = re.compile(r"<!--.*?-->|<(head|script|style|template)\b.*?</\1\s*>", re.DOTALL | re.IGNORECASE)
INLINE = re.compile(r"</?(?:a|abbr|b|cite|code|em|i|kbd|mark|q|s|small|span|strong|su[bp]|u)\b[^>]*>", re.IGNORECASE)
TAG = re.compile(r"</?[a-z!][^>]*>", re.IGNORECASE)


def parquet(path: File, *, text_field: Fields, start: Place) -> Rows:
    import pyarrow.parquet

    # Read a column of a row group page by page, not whole.
    options = {"buffer_size": PIECE, "pre_buffer": False, "page_checksum_verification": True}
    with ExitStack() as stack:
        place = path if isinstance(path, Path) else stack.enter_context(path.open("rb"))
        table = stack.enter_context(pyarrow.parquet.ParquetFile(place, **options))
        fields, rows = table.schema_arrow.names, table.metadata.num_rows
        missing = [name for name in names_of(text_field) if name not in fields]
        if missing and rows > start.number:
            problem = f"{no_such_field(missing[0], fields)}; {rows} rows are lost"
            yield Row("", start.file, start.number + 1, problem, rows - start.number), Place(start.file, rows)
            return
        first = 0
        for group in range(table.num_row_groups):
            end = first + table.metadata.row_group(group).num_rows
            if start.number < end:
                yield from _row_group(table, group, text_field=text_field, start=start, first=first, end=end)
            first = end


def _row_group(table: Any, group: int, *, text_field: Fields, start: Place, first: int, end: int) -> Rows:
    """Rows first + 1 .. end of the file that are after `start`. Always decodes from the first, in the same batches."""
    number = first
    try:
        # The size of all columns: asking a damaged file for the size of one crashes the process (pyarrow 26).
        size = max(1, table.metadata.row_group(group).total_byte_size)
        rows, columns = max(1, min(BATCH_BYTES * (end - first) // size, BATCH_ROWS)), [*names_of(text_field)]
        for batch in table.iter_batches(batch_size=rows, row_groups=[group], columns=columns, use_threads=False):
            if number + len(batch) <= start.number:
                number += len(batch)
                continue
            for values in _values(batch, text_field):
                if number >= start.number:
                    text, problem = values if isinstance(values, tuple) else text_of(values, text_field)
                    yield Row(text, start.file, number + 1, problem), Place(start.file, number + 1)
                number += 1
    except (OSError, ValueError, NotImplementedError, MemoryError) as error:
        kind = UNREADABLE if isinstance(error, MemoryError) else "broken row group"  # with more memory, later
        problem = f"{kind}: rows {number + 1} to {end} are lost: {reason(error)}"
        yield Row("", start.file, number + 1, problem, end - number), Place(start.file, end)


def _values(batch: Any, text_field: Fields) -> Iterator[dict[str, Any] | tuple[str, str]]:
    """The fields of each row, or ("", problem)."""
    names, chat = names_of(text_field), not isinstance(text_field, str) and bool(text_field.messages)
    columns = [_column(batch.column(batch.schema.names.index(name)), name, nested=chat) for name in names]
    for values in zip(*columns, strict=True):
        problem = next((problem for _, problem in values if problem), "")
        yield ("", problem) if problem else {name: value for name, (value, _) in zip(names, values, strict=True)}


def _column(column: Any, text_field: str, *, nested: bool) -> Iterator[tuple[Any, str]]:
    """(value, problem) of each value. Values of other types are not converted: some do not exist in Python. nested:
    lists are."""
    import pyarrow

    kind = getattr(column.type, "storage_type", column.type)
    texts = pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()
    if getattr(kind, "value_type", kind) not in texts and not (nested and "list" in str(kind)):
        for valid in column.is_valid().to_pylist():
            yield (None, f"not text: field {text_field!r} holds {column.type}"[:500]) if valid else (None, "null")
        return
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:  # Arrow does not guarantee that its strings are UTF-8
        for scalar in column:
            try:
                yield scalar.as_py(), ""
            except UnicodeDecodeError as error:
                yield None, f"invalid UTF-8: byte {error.object[error.start]:#04x} at {error.start + 1}"
        return
    for value in values:
        yield value, ""


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """The lines of a file as text. A byte that is not UTF-8 becomes half a surrogate pair, which makes its row a bad
    one."""
    while line := stream.readline(LONGEST_ROW):
        yield line.decode(errors="surrogateescape")


def csv_rows(path: File, *, text_field: Fields, start: Place) -> Rows:
    csv.field_size_limit(LONGEST_ROW)  # process-wide; its default would refuse a long article
    file, number, offset = start
    options: Any = {"strict": True, "delimiter": "\t" if path.name.lower().endswith(".tsv") else ","}
    with path.open("rb") as stream:
        if stream.read(2) in UTF_16_MARKS:
            raise ValueError(UTF_16)
        stream.seek(0)
        if stream.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
            stream.seek(0)
        header = next(csv.reader(_lines(stream), **options), [])
        if len({*header}) < len(header):
            raise ValueError("two columns of the header have the same name")
        if offset:
            stream.seek(offset)
        rows = csv.reader(_lines(stream), **options)
        while True:
            number += 1
            try:
                values = next(rows, None)
            except csv.Error as error:  # it cannot be told where the next row begins
                raise ValueError(f"row {number} is not CSV: {error}; is a quote left open?") from None
            if values is None:
                return
            if not values:  # a blank line
                text, problem = "", ""
            elif len(values) != len(header):
                text, problem = "", f"not a row: {len(values)} values for the {len(header)} columns of the header"
            else:
                text, problem = text_of(dict(zip(header, values, strict=True)), text_field)
            yield Row(text, file, number, problem), Place(file, number, stream.tell())


def one_document(path: File, *, text_field: Fields, start: Place) -> Rows:
    if start.number == 0:
        with path.open("rb") as stream:
            data = stream.read(LONGEST_ROW + 1)
        text, problem = decoded_text(data.removeprefix(BYTE_ORDER_MARK))
        text = _seen(text) if path.name.lower().endswith(".html") else text
        if len(data) > LONGEST_ROW:
            problem = f"too long: more than {LONGEST_ROW} bytes"
        text, problem = ("", problem) if problem else text_or_problem(text, text_field="")
        yield Row(text, start.file, 1, problem), Place(start.file, 1, len(data))


def _seen(page: str) -> str:
    """The text of a page of HTML, a line for each block. Not by html.parser, which differs between Pythons."""
    text = TAG.sub("\n", INLINE.sub("", UNSEEN.sub("\n", page)))
    return "\n".join(filter(None, (" ".join(line.split()) for line in html.unescape(text).splitlines())))


def array(path: File, *, text_field: Fields, start: Place) -> Rows:
    with path.open("rb") as stream:
        data = stream.read(LARGEST_ARRAY + 1)
    if len(data) > LARGEST_ARRAY:
        raise ValueError(f"larger than {LARGEST_ARRAY:,} bytes; {ARRAY}")
    try:
        rows = json.loads(data.removeprefix(BYTE_ORDER_MARK))
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    for number, row in enumerate(rows, 1):
        if number > start.number:
            is_row = isinstance(row, Mapping)
            text, problem = text_of(row, text_field) if is_row else text_or_problem(row, text_field="text")
            yield Row(text, start.file, number, problem), Place(start.file, number)
