"""The rows of a .csv file with a header, as spreadsheets write it: commas, double quotes, line feeds inside quotes.
Imports no torch."""

import csv
from collections.abc import Iterator
from typing import IO

from recipes.data.text.row import (
    BYTE_ORDER_MARK,
    LONGEST_ROW,
    UTF_16,
    UTF_16_MARKS,
    Fields,
    File,
    Place,
    Row,
    Rows,
    text_of,
)


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """The lines of a file as text. A byte that is not UTF-8 becomes half a surrogate pair, which makes its row a bad
    one."""
    while line := stream.readline(LONGEST_ROW):
        yield line.decode(errors="surrogateescape")


def csv_rows(path: File, *, text_field: Fields, start: Place) -> Rows:
    csv.field_size_limit(LONGEST_ROW)  # process-wide; its default would refuse a long article
    file, number, offset = start
    with path.open("rb") as stream:
        if stream.read(2) in UTF_16_MARKS:
            raise ValueError(UTF_16)
        stream.seek(0)
        if stream.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
            stream.seek(0)
        header = next(csv.reader(_lines(stream), strict=True), [])
        if len({*header}) < len(header):
            raise ValueError("two columns of the header have the same name")
        if offset:
            stream.seek(offset)
        rows = csv.reader(_lines(stream), strict=True)
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
