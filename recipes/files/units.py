"""Formats numbers with their units. Imports no torch."""


def size(count: int) -> str:
    """A number of bytes with its unit, such as "1.23 GB"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"
