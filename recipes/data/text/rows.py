"""Every source as a stream of rows that can be left and entered again; bad rows are values, not ends.

Imports no torch.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from parallel.errors import UserError
from recipes.data.text.hub import HubReader, is_hub
from recipes.data.text.readers import Place, Row, file_size, read_file, unit
from recipes.data.text.sources import find_files, source_problem

__all__ = ["Row", "RowStream", "documents", "open_rows", "readable_documents"]

# A source is refused when its first rows have no such field: so many of so many files are looked at.
PROBED_FILES, PROBED_ROWS = 16, 16

# A tokenizer is trained on no more than this of a source: a stream from the hub may have no practical end.
SAMPLED_CHARACTERS = 1_000_000_000


class RowStream(Iterator[Row]):
    """The rows of a source behind a cursor. Raises what reading does raise: nothing for files, UserError for a hub."""

    def __init__(self, rows: Iterator[tuple[Row, Place]], *, files: Sequence[str], start: Place) -> None:
        self.files = files
        """What Row.file counts: paths, or the shards of a hub dataset."""
        self._rows = rows
        self._place = start

    def __next__(self) -> Row:
        row, self._place = next(self._rows)
        return row

    @property
    def cursor(self) -> dict[str, Any]:
        """The place behind the row that was returned last, to be given to open_rows(); JSON can hold it."""
        return self._place._asdict()

    def where(self, row: Row) -> str:
        """The file and number of a row, for a message."""
        file = self.files[row.file]
        return f"'{file}', {unit(file)} {row.number}"


def open_rows(source: str, *, text_field: str, cursor: dict[str, Any] | None = None) -> RowStream:
    """The rows of a source, from its beginning or from behind the row after which `cursor` was taken.

    The rows depend on the source's bytes alone, whatever the cursor. Raises UserError for a source with a problem, and
    without a cursor also for one whose first rows have no such field of text.
    """
    if problem := source_problem(source):
        raise UserError(f"data.source: {problem}")
    start = Place(**cursor) if cursor else Place(0)
    if is_hub(source):
        dataset = HubReader(source, text_field=text_field)
        return RowStream(dataset.rows(start), files=dataset.files, start=start)
    files = find_files(source)
    names = [str(file) for file in files]
    sizes = [file_size(file) for file in files]
    if cursor is None:
        _refuse_wrong_field(
            RowStream(
                islice(read_file(file, text_field=text_field, start=Place(index), size=size), PROBED_ROWS),
                files=names,
                start=start,
            )
            for index, (file, size) in enumerate(zip(files[:PROBED_FILES], sizes, strict=False))
        )

    def rows() -> Iterator[tuple[Row, Place]]:
        for index in range(start.file, len(files)):
            place = start if index == start.file else Place(index)
            yield from read_file(files[index], text_field=text_field, start=place, size=sizes[index])

    return RowStream(rows(), files=names, start=start)


def _refuse_wrong_field(beginnings: Iterator[RowStream]) -> None:
    """Raise the first row's complaint about the field where none of the files' first rows has a text in it."""
    complaint = ""
    for stream in beginnings:
        for row in stream:
            if not row.problem or row.kind == "null":
                return
            if row.kind.startswith(("no field", "not text")):
                complaint = complaint or f"data.text_field: {stream.where(row)}: {row.problem}; name a field of text"
    if complaint:
        raise UserError(complaint)


def documents(source: str, *, text_field: str) -> Iterator[str]:
    """The documents of a source, always in the same order; empty ones (a null in a row too) are left out.

    Raises UserError for a source with a problem, for the first bad row, and for text that is nowhere.
    """
    rows = open_rows(source, text_field=text_field)
    found = False
    for row in rows:
        if row.problem and row.kind != "null":
            setting = "data.text_field" if row.kind.startswith(("no field", "not text")) else "data.source"
            raise UserError(f"{setting}: {rows.where(row)}: {row.problem}; repair it or leave it out")
        if row.text and not row.text.isspace():
            found = True
            yield row.text
    if not found:
        raise UserError(f"data.source: {source!r} holds no text: every document is empty; give another source")


def readable_documents(source: str, *, text_field: str, characters: int = SAMPLED_CHARACTERS) -> Iterator[str]:
    """As documents(), but bad rows are passed over, and the source ends after so many characters."""
    found = 0
    for row in open_rows(source, text_field=text_field):
        if row.text and not row.text.isspace():
            found += len(row.text)
            yield row.text
            if found >= characters:
                return
    if not found:
        raise UserError(f"data.source: {source!r} holds no text: every document is empty or bad; give another source")
