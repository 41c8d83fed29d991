"""The documents of an evaluation, its bad rows, and the line that shows how far it is. Imports no torch."""

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from parallel.errors import UserError
from recipes.data.text.rows import open_rows

if TYPE_CHECKING:
    from recipes.data.text.pair_format import PairFields

# Bad rows are judged after so many rows, so that a bad source is refused early and one bad row of the first ten is not.
JUDGED_ROWS = 10_000
LISTED = 5


class CountedDocuments:
    """The documents of a source, in the order of its rows. Iterating raises UserError for a source that is bad.

    As in training, a row without usable text is skipped and counted; beyond the budget, the source is refused.
    """

    def __init__(self, source: str, *, text_field: "PairFields", limit: int = 0, budget: float = 0.01) -> None:
        """text_field: or the fields of a pair. limit: so many documents at most; 0 = all. budget: share of bad rows."""
        self._source, self._text_field, self._limit, self._budget = source, text_field, limit, budget
        self.rows = self.bad_rows = 0
        self._first: list[str] = []

    def __iter__(self) -> Iterator[str]:
        rows, documents, judged = open_rows(self._source, text_field=self._text_field), 0, 0
        for row in rows:
            self.rows += row.lost if row.problem else 1
            if row.problem:
                self.bad_rows += row.lost
                if len(self._first) < LISTED:
                    self._first.append(f"\n  {rows.where(row)}: {row.problem}")
            elif row.has_text:
                documents += 1
                yield row.text
                if documents == self._limit:
                    break
            if self.rows - judged >= JUDGED_ROWS:
                judged = self.rows
                self._judge()
        self._judge()
        if not documents:
            raise UserError(f"{self._source!r} holds no text: every document is empty; give another source")

    def _judge(self) -> None:
        if self.bad_rows > self._budget * self.rows:
            raise UserError(
                f"--bad-row-budget: {self.bad_rows:,} of the first {self.rows:,} rows of {self._source!r} hold no"
                f" usable text, a share of {self.bad_rows / self.rows:.3g}, more than {self._budget}; repair the source"
                f" or raise the budget. The first:{''.join(self._first)}"
            )


class ProgressLine:
    """A live line on a terminal, a plain line now and then elsewhere. A stream that cannot be written ends nothing."""

    def __init__(self, stream: TextIO, *, every: float = 30.0) -> None:
        """every: seconds between plain lines."""
        self._stream, self._live = stream, stream.isatty()
        self._every = 0.2 if self._live else every
        self._began = self._shown = time.monotonic()
        self._visible = False

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def show(self, text: str) -> None:
        if time.monotonic() - self._shown < self._every:
            return
        self._shown, self._visible = time.monotonic(), self._live
        self._write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}" if self._live else f"{text}\n")

    def end(self) -> None:
        """Wipe the live line."""
        if self._visible:
            self._write("\r\x1b[K")
            self._visible = False

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # ValueError: closed
            self._stream.write(text)
            self._stream.flush()
