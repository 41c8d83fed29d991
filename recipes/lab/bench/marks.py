"""Parts of a page that a program writes, between two marks. Imports no torch."""


def between(text: str, begin: str, end: str, part: str) -> str:
    """The text with this part between the marks. Raises ValueError if it lacks one of them."""
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"the page has lost {(end if found else begin)!r}")
    return before + begin + part + end + after
