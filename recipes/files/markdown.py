"""Tables of Markdown. Imports no torch."""

from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, align: str = "") -> list[str]:
    """The lines of a table.

    Args:
        columns: the head.
        rows: a cell for each column.
        align: a letter for each column, l or r; "" = the first to the left, and numbers after it to the right.
    """
    rules = {"l": "---", "r": "---:"}
    lines = [_line(columns), "|" + "".join(f"{rules[letter]}|" for letter in align or "l" + "r" * (len(columns) - 1))]
    return lines + [_line(map(str, row)) for row in rows]


def _line(cells: Iterable[str]) -> str:
    return "|" + "|".join(f" {cell} ".replace("|", "\\|") if cell else " " for cell in cells) + "|"
