"""The sequences of a run, from one source or a mixture of several.

S sequence length; a row holds S + 1 tokens, S inputs and S targets that overlap. Imports no torch.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes.data.order import Mixture, SequenceOrder
from recipes.data.tokens.shards import BadRowBudget, Shards, bad_rows, read_problem
from recipes.files.atomic import Lines

if TYPE_CHECKING:
    from recipes.data.tokens.background import Background

SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_BETWEEN_REPORTS = 10.0


@dataclass(frozen=True)
class Piece:
    """Tokens begin .. end - 1 of the document in this row of a source."""

    source: str
    file: int
    row: int
    begin: int
    end: int


class Quarantine:
    """quarantine.jsonl: file, row and reason of every bad row in the text that a run has used so far."""

    def __init__(self, file: Path, *, log: Callable[[str], None] = print) -> None:
        """log: receives one line of text per message."""
        self.file = file
        self._lines = Lines(file, log=log)
        self._rows = 0
        self._noted: dict[str, int] = {}

    def note(self, sources: "Sequence[Source]") -> int:
        """Add new bad rows. Returns how many there are in total."""
        for source in sources:
            first, used = self._noted.get(source.name, 0), source.used_shards
            rows = [*bad_rows(source.shards.folder, source.shards.shards[:used], first=first), *source.left_out]
            self._noted[source.name] = used
            if rows:
                if not self._rows:  # a resumed run lists everything it used again, so the file is always complete
                    with suppress(OSError):  # then appending fails too, and is reported
                        self.file.unlink(missing_ok=True)
                self._lines.append(*(json.dumps({"source": source.name, **row}) for row in rows))
                self._rows += len(rows)
        return self._rows


class Source:
    """The shuffled sequences of one source. Waits for those that are not tokenized yet."""

    def __init__(
        self,
        name: str,
        shards: Shards,
        order: SequenceOrder,
        *,
        bad_row_budget: float = 1.0,
        problem: Path | None = None,
        read_once: bool = False,
    ) -> None:
        """Open a source.

        Args:
            name: of the source, as the recipe writes it.
            shards: its tokens.
            order: of its sequences.
            bad_row_budget: share of the rows that may be bad.
            problem: file that says why no more tokens will come.
            read_once: cut the row to whole sequences with their targets.
        """
        self.name = name
        self.shards = shards
        self.order = order
        self.background: Background | None = None
        """Writes the shards; only on the process that started it."""
        self.closed = False
        self._problem, self._read_once = problem, read_once
        self._budget = BadRowBudget(shards.folder, source=name, budget=bad_row_budget)
        self.used_shards = 0
        """How many shards were needed so far."""
        self.left_out: Iterator[dict[str, Any]] = iter(())
        """File, row and reason of further rows that are not used."""

    @property
    def tokens(self) -> int | None:
        """Length of the row of tokens that repeats; None while it is unknown."""
        if not self.shards.complete:
            return None
        length = self.order.sequence_length
        return (self.shards.tokens - 1) // length * length if self._read_once else self.shards.tokens

    @property
    def sequences(self) -> int:
        """Whole sequences, with their last target, in the existing shards."""
        return max(0, self.shards.tokens - 1) // self.order.sequence_length

    def require(self, number: int) -> None:
        """Wait until the tokens of sequence `number` are known. Raises UserError if they never will be, or if too many
        rows are bad."""
        needed = self.order.needs(number)
        if self.background is not None:
            window = (self.order.window or 0) * self.order.sequence_length
            self.background.want(None if needed is None else needed + window)
            if not self.shards.complete:
                self.background.check(needed=False)
        started = reported = time.monotonic()
        while not (self.closed or self.shards.complete or (needed is not None and self.shards.tokens >= needed)):
            if not self.shards.refresh():
                self._require_progress()
                if self.background is not None and time.monotonic() - reported > SECONDS_BETWEEN_REPORTS:
                    reported = time.monotonic()
                    self.background.report(self.name, waited=reported - started)
                time.sleep(SECONDS_BETWEEN_LOOKS)
        # Of the shards in use, not of all existing ones, so that a run stops at the same step on any machine.
        if (used := self.used(number)) > self.used_shards:
            self.used_shards = used
            self._budget.count(self.shards.shards[:used])

    def stop(self) -> None:
        """End all waiting, and stop tokenizing."""
        self.closed = True
        if self.background is not None:
            self.background.stop()

    def used(self, number: int) -> int:
        """How many shards determine sequence `number`, which must be known."""
        needed = self.order.needs(number)
        return len(self.shards.shards) if needed is None else self.shards.covering(needed)

    def _require_progress(self) -> None:
        """Raises UserError if tokenizing has ended with a problem."""
        if self.background is not None:
            self.background.check()
        elif self._problem is not None and (error := read_problem(self._problem)) is not None:
            raise error


class Sequences:
    """The sequences of all sources in the order of the run."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]) -> None:
        """weights: shares of the tokens, as for Mixture."""
        self.sources = list(sources)
        self.mixture = Mixture(weights)
        self.sequence_length = self.sources[0].order.sequence_length

    @property
    def available(self) -> int:
        """Sequences until all existing tokens are read; in a mixture, smaller sources repeat until then."""
        return self.mixture.available([source.sequences for source in self.sources])

    def require(self, first: int, count: int) -> None:
        """Wait until sequences first .. first + count - 1 are known."""
        places, numbers = self.mixture.place(np.arange(first, first + count))
        for index, source in enumerate(self.sources):
            if (own := numbers[places == index]).size:
                source.require(int(own.max()))

    def rows(self, first: int, count: int) -> np.ndarray:
        """Sequences first .. first + count - 1, which must be known: (count, S + 1) int64."""
        places, numbers = self.mixture.place(np.arange(first, first + count))
        rows = np.empty((count, self.sequence_length + 1), dtype=np.int64)
        for index, source in enumerate(self.sources):
            own = np.flatnonzero(places == index)
            starts = source.order.starts(numbers[own], total=source.tokens).tolist()
            for place, start in zip(own.tolist(), starts, strict=True):
                source.shards.read(start, rows[place])
        return rows

    def beginning(self, count: int) -> list[int]:
        """The first tokens, at most `count`."""
        return self.rows(0, 1)[0, :count].tolist()

    def tokens(self, consumed: int) -> None:
        """Nothing is padded. (PairSequences.tokens() counts.)"""

    def pieces(self, number: int) -> Iterator[Piece]:
        """The pieces of documents that the inputs of training sequence `number` consist of, in order."""
        (place,), own = self.mixture.place(np.array([number]))
        source = self.sources[place]
        (start,) = source.order.starts(own, total=source.tokens).tolist()
        for piece in source.shards.documents(start, self.sequence_length):
            yield Piece(source.name, *piece)

    def epochs(self, consumed: int) -> dict[str, float | None]:
        """How often each source is read in so many sequences; None while its length is unknown."""
        return {
            source.name: count * self.sequence_length / source.tokens if source.tokens else None
            for source, count in zip(self.sources, self.mixture.consumed(consumed), strict=True)
        }

    def checksums(self, consumed: int) -> dict[str, str]:
        """For each source, a checksum of the tokens that the first `consumed` sequences come from.

        Waits until they are tokenized. Reads only their part of the last shard.
        """
        found = {}
        for source, count in zip(self.sources, self.mixture.consumed(consumed), strict=True):
            if count:
                source.require(count - 1)
                found[source.name] = source.shards.checksum(source.order.needs(count - 1))
        return found

    def close(self) -> None:
        """End all waiting, and stop tokenizing."""
        for source in self.sources:
            source.stop()
