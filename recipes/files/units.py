"""Formats numbers with their units. Imports no torch."""


def size(count: int) -> str:
    """A number of bytes with its unit, such as "1.23 GB"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"


def counted(number: int) -> str:
    """A number of things, in millions where there are many, such as "12,345" or "1,234.5 M"."""
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:,.1f} M"
