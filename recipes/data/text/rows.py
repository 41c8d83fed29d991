"""Any source as a stream of rows, resumable at any row. Bad rows are values and do not end it. Imports no torch."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from parallel.errors import UserError
from recipes.data.text.plain_text import text_rule
from recipes.data.text.readers import read_file
from recipes.data.text.row import Fields, Place, Row, Rows, unit
from recipes.data.text.sources import file_size, find_files, is_hub, source_problem

# A source is refused if the first rows of its first files lack the text field.
PROBED_FILES, PROBED_ROWS = 16, 16

# A tokenizer is trained on at most this much of a source: a stream from the hub may be practically endless.
SAMPLED_CHARACTERS = 1_000_000_000
REASONS_SHOWN = 3
START = Place(0)


class RowStream(Iterator[Row]):
    """The rows of a source after a cursor. Iterating raises UserError for the hub, and for a .zst whose window is too
    wide."""

    def __init__(self, rows: Iterator[tuple[Row, Place]], *, files: Sequence[str], start: Place) -> None:
        self.files = files
        """What Row.file indexes: paths, or the shards of a hub dataset."""
        self._rows = rows
        self._place = start

    def __next__(self) -> Row:
        row, self._place = next(self._rows)
        return row

    @property
    def cursor(self) -> dict[str, Any]:
        """The place after the last returned row, for open_rows(); can be stored as JSON."""
        return self._place._asdict()

    def where(self, row: Row) -> str:
        """The file and number of a row, for messages."""
        file = self.files[row.file]
        if not file.isprintable():  # a name with a line feed, or that is not UTF-8
            file = file.encode("unicode_escape").decode()
        return f"'{file}', {unit(file)} {row.number}"


def open_rows(
    source: str,
    *,
    text_field: Fields,
    text_documents: str = "auto",
    cursor: dict[str, Any] | None = None,
    begin: Place = START,
    end: tuple[int, int] | None = None,
) -> RowStream:
    """The rows of a source, from `begin` or after the row at which `cursor` was taken; they depend only on the source's
    bytes. Raises UserError for a bad source and, without a cursor, if its first rows lack the text field.

    end: file, and in it the byte (of .parquet, the row), where the last row ends; of files only."""
    if problem := source_problem(source):
        raise UserError(f"data.source: {problem}")
    start = Place(**cursor) if cursor else begin
    if is_hub(source):
        from recipes.data.text.hub import HubReader

        dataset = HubReader(source, text_field=text_field)
        return RowStream(dataset.rows(start), files=dataset.files, start=start)
    files = find_files(source)
    names = [str(file) for file in files]
    sizes = [file_size(file) for file in files]
    if not isinstance(text_field, str):
        text_field.require_rows(names)
    rule = text_rule(files, text_documents)
    if cursor is None:
        beginnings = (
            islice(read_file(file, text_field=text_field, start=Place(index), size=size, rule=rule), PROBED_ROWS)
            for index, (file, size) in enumerate(zip(files[:PROBED_FILES], sizes, strict=False))
        )
        setting = ("data.text_field", "a text field") if isinstance(text_field, str) else (text_field.setting, "others")
        _refuse_wrong_field(RowStream(chain.from_iterable(beginnings), files=names, start=start), *setting)

    def rows() -> Iterator[tuple[Row, Place]]:
        limit = end or (len(files), 0)
        for index in range(start.file, limit[0] + bool(limit[1])):
            place = start if index == start.file else Place(index)
            found = read_file(files[index], text_field=text_field, start=place, size=sizes[index], rule=rule)
            yield from found if index < limit[0] else _until(limit[1], found)

    return RowStream(rows(), files=names, start=start)


def first_problem(source: str, *, text_field: Fields, text_documents: str) -> str:
    """What is wrong with the first row of a source of files; "" if nothing is. Raises UserError if it has no rows, or
    none with a text field at its beginning."""
    rows = open_rows(source, text_field=text_field, text_documents=text_documents)
    if (row := next(rows, None)) is None:
        raise UserError(f"data.source: {source!r} has no rows; give another source")
    return f"{rows.where(row)}: {row.problem}" if row.problem else ""


def _until(end: int, rows: Rows) -> Rows:
    """The rows up to this byte of their file (of .parquet, this row), and what is lost if it breaks off before."""
    for row, place in rows:
        at = place.offset or place.number
        if at > end and place.file == row.file:  # only blank lines were left before the end
            return
        yield row, place
        if at == end:
            return


def _refuse_wrong_field(rows: RowStream, setting: str, wanted: str) -> None:
    """Raise UserError with the first problem of the text field if none of these rows has text in it. setting: names the
    field in a recipe. wanted: what to name instead."""
    complaint = ""
    for row in rows:
        if not row.problem or row.kind == "null":
            return
        if row.kind.startswith(("no field", "not text", "not messages")):
            complaint = complaint or f"{setting}: {rows.where(row)}: {row.problem}; name {wanted}"
    if complaint:
        raise UserError(complaint)


def readable_documents(
    source: str, *, text_field: Fields, text_documents: str = "auto", characters: int = SAMPLED_CHARACTERS
) -> Iterator[str]:
    """The documents of a source, always in the same order, without bad and empty rows, until so many characters. Raises
    UserError for a bad source, and if there is no text at all."""
    found = 0
    problems: dict[str, str] = {}
    rows = open_rows(source, text_field=text_field, text_documents=text_documents)
    for row in rows:
        if row.has_text:
            found += len(row.text)
            yield row.text if isinstance(text_field, str) else text_field.words_of(row.text)
            if found >= characters:
                return
        elif row.problem and len(problems) < REASONS_SHOWN:
            problems.setdefault(row.kind, f"{rows.where(row)}: {row.problem}")
    if not found:
        why = " or bad: " + "; ".join(problems.values()) if problems else ""
        raise UserError(
            f"data.source: {source!r} holds no text: every document is empty{why}; repair it or give another source"
        )
