"""What to write instead of a source that does not exist. Imports no torch."""

import difflib
import os
import re
from pathlib import Path

STDLIB = "python-stdlib"
"""Python's standard library; "python-stdlib/asyncio" is one of its packages."""


def instead_of(path: Path, *, supported: str) -> str:
    """The most similar name next to a path that does not exist, or the nearest existing folder above it."""
    parent = path.parent
    if path.is_symlink():
        return f": it is a link to '{path.readlink()}', which is not there; mount that, or mend the link"
    if not parent.is_dir() and not path.suffix and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(path)):
        return f"; write 'hf:{path}' for the dataset of this name on the hub"
    if not parent.is_dir():
        existing = next(folder for folder in parent.absolute().parents if folder.is_dir())
        return f" (there is no folder '{parent}'; the nearest existing one is '{existing}')"
    try:
        siblings = {entry.name: str(parent / entry.name) for entry in os.scandir(parent)}
    except OSError:  # may not be listed
        siblings = {}
    close = difflib.get_close_matches(path.name, [*siblings, STDLIB], n=1)
    if close:
        return f"; did you mean {siblings.get(close[0], STDLIB)!r}?"
    return f"; write {STDLIB!r}, 'hf:ID' for a dataset on the hub, or a file, folder or glob of {supported}"
