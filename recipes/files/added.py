"""The formats and sources of text that plug-ins have added to this process. Imports no torch."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Adding(NamedTuple):
    """What a plug-in adds under one name."""

    work: Callable[[Any], Any]
    """Yields the rows of a file, or lists the files of a source."""
    version: str
    """The plug-in's name and version."""


FORMATS: dict[str, Adding] = {}
"""By the end of a file's name. recipes/plugins/loading.py alone changes these."""
SOURCES: dict[str, Adding] = {}
"""By the beginning of a source, such as "mine://"."""

AGAIN: list[Callable[[], None]] = []
"""What fills them in another process, to which it can be sent."""


def added_to(text: str) -> Adding | None:
    """What was added for this source, or for a file of this name; None if nothing was."""
    begins = (one for begin, one in SOURCES.items() if text.startswith(begin))
    return next(begins, None) or next((one for end, one in FORMATS.items() if text.lower().endswith(end)), None)


def is_added_source(source: str) -> bool:
    return source.startswith(tuple(SOURCES))
