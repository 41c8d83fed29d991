"""The rows of a .parquet file, decoded a few at a time. Imports no torch."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from recipes.data.text.row import (
    PIECE,
    UNREADABLE,
    Fields,
    File,
    Place,
    Row,
    Rows,
    names_of,
    no_such_field,
    reason,
    text_of,
)

# Parquet is decoded in batches of about this size, by the mean row size, and of at most this many rows: sizes may vary.
BATCH_BYTES = 1 << 22
BATCH_ROWS = 128
# No batch can take more than this, or one row: a value that is stored once may be in every row.
LARGEST_BATCH_BYTES = 1 << 27
# A larger row group that is compressed further than this is not decoded: text is not, and a page is decoded at once.
LARGEST_RATIO = 100


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
                yield from _row_group(table, group, path, text_field=text_field, start=start, first=first, end=end)
            first = end


def _row_group(table: Any, group: int, path: File, *, text_field: Fields, start: Place, first: int, end: int) -> Rows:
    """Rows first + 1 .. end of the file that are after `start`. Always decodes from the first, in the same batches."""
    number = first
    try:
        for batch in _batches(table, group, path, text_field):
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


def _batches(table: Any, group: int, path: File, text_field: Fields) -> Iterator[Any]:
    """The batches of a row group. Raises ValueError instead of filling the memory."""
    # The sizes of all columns: asking a damaged file for the size of one crashes the process (pyarrow 26).
    meta = table.metadata.row_group(group)
    rows, size = meta.num_rows, max(1, meta.total_byte_size)
    if size > max(LARGEST_BATCH_BYTES, LARGEST_RATIO * path.stat().st_size):
        raise ValueError(
            f"too large: {size} bytes of a file of {path.stat().st_size}; write it with smaller row groups"
        )
    mean, largest = BATCH_BYTES * rows // size, LARGEST_BATCH_BYTES // size
    batch_size = max(1, min(mean, largest, BATCH_ROWS))
    yield from table.iter_batches(
        batch_size=batch_size, row_groups=[group], columns=[*names_of(text_field)], use_threads=False
    )


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
