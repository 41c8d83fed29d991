"""Tables of Markdown, and parts of a page that a program writes. Imports no torch."""

from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, align: str = "") -> list[str]:
    """The lines of a table. align: a letter for each column, l or r; "" = the first to the left, and numbers after it
    to the right."""
    rules = {"l": "---", "r": "---:"}
    lines = [_line(columns), "|" + "".join(f"{rules[letter]}|" for letter in align or "l" + "r" * (len(columns) - 1))]
    return lines + [_line(map(str, row)) for row in rows]


def between(text: str, begin: str, end: str, part: str) -> str:
    """The text with this part between the marks. Raises ValueError if it lacks one of them."""
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise ValueError(f"the page has lost {(end if begun else begin)!r}")
    return before + begin + part + end + after


def _line(cells: Iterable[str]) -> str:
    return "|" + "|".join(f" {cell} ".replace("|", "\\|") if cell else " " for cell in cells) + "|"
