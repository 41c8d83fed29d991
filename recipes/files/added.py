"""The formats and sources of text that plug-ins have added to this process. Imports no torch."""

from collections.abc import Callable
from typing import Any


class Added:
    """What is found by the name of a file or a source alone. recipes/plugins/loading.py alone changes it."""

    def __init__(self) -> None:
        self.formats: dict[str, Any] = {}
        """End of a file's name -> what yields its rows."""
        self.sources: dict[str, Any] = {}
        """Beginning of a source, such as "mine://" -> what lists its files."""
        self.versions: dict[str, str] = {}
        """Either -> the plug-in's name and version."""
        self.again: Callable[[], None] | None = None
        """Does the same in another process, to which it can be sent."""

    def clear(self) -> None:
        for names in (self.formats, self.sources, self.versions):
            names.clear()
        self.again = None

    def put(self, kind: str, name: str, value: Any, *, version: str) -> None:
        {"format": self.formats, "source": self.sources}[kind][name] = value
        self.versions[name] = version

    def format_of(self, file: str) -> str:
        """The added end of this file's name; "" if it has none."""
        return next((end for end in self.formats if file.lower().endswith(end)), "")

    def source_of(self, source: str) -> str:
        """The added beginning of this source; "" if it has none."""
        return next((begin for begin in self.sources if source.startswith(begin)), "")


ADDED = Added()
