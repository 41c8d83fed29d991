"""The sequences of a run, from one source or a mixture of several.

S sequence length; a row holds S + 1 tokens, S inputs and S targets that overlap. Imports no torch.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parallel.errors import UserError
from recipes.data.history import (
    Continuation,
    History,
    Reading,
    Segment,
    Window,
    beginning,
    consumed_tokens,
    joined,
    readings,
)
from recipes.data.order import Mixture, SequenceOrder
from recipes.data.tokens.shards import BadRowBudget, Shard, Shards, bad_rows, read_problem
from recipes.files.atomic import Lines, keep_rows
from recipes.files.screen import say

if TYPE_CHECKING:
    from recipes.data.tokens.background import Background

OTHERWISE = (
    '; or validate on another text ([validation] source = "FILE"), or not at all (validation.every = 0 and'
    " validation.sample_tokens = 0)"
)
"""What to do about too little text to validate on."""
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

    def __init__(self, file: Path, *, log: Callable[[str], None] = say) -> None:
        """log: receives one line of text per message."""
        self.file = file
        self._lines = Lines(file, log=log)
        self._rows, self._begun = 0, False
        self._noted: dict[str, int] = {}

    def note(self, sources: "Sequence[Source]") -> int:
        """Add new bad rows. Returns how many there are in total."""
        if not self._begun:
            # A resumed run lists everything that it used again; what earlier stages read stays as it is.
            self._begun, again = True, {source.name for source in sources}
            with suppress(OSError):  # then appending fails too, and is reported
                self._rows = keep_rows(self.file, "source", lambda name: isinstance(name, str) and name not in again)
        for source in sources:
            first, used = self._noted.get(source.name, 0), source.used_shards
            rows = [*bad_rows(source.shards.folder, source.shards.shards[:used], first=first), *source.left_out]
            self._noted[source.name] = used
            if rows:
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
        prepared: bool = False,
        background: "Background | None" = None,
    ) -> None:
        """Open a source.

        Args:
            name: that of the source, as the recipe writes it.
            shards: its tokens.
            order: that of its sequences, if nothing was read of it before.
            bad_row_budget: share of the rows that may be bad.
            problem: file that says why no more tokens will come.
            read_once: cut the row to whole sequences with their targets.
            prepared: whether its tokens were prepared before the run.
            background: writes the shards; only on the process that started it.
        """
        self.name = name
        self.shards = shards
        self.order, self.prepared = order, prepared
        self.offset = 0
        """The number of the first sequence, where it continues those of an earlier segment."""
        self._earlier: list[Reading] = []
        self._position: Continuation | None = None
        self.background, self.closed, self.waits = background, False, True
        """waits: for tokens that are not there yet, instead of refusing what needs them."""
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

    @property
    def window(self) -> Window | None:
        """How much of it is shuffled at a time."""
        order = self.order
        return None if order.window is None else Window(order.window * order.sequence_length, order.every_epoch)

    def continue_after(self, earlier: Sequence[Reading]) -> None:
        """Go on where these sequences ended."""
        self._earlier, self._position, self.offset = list(earlier), None, 0
        if earlier and earlier[-1][:2] == (self.order.sequence_length, self.window):
            self.offset = self._earlier.pop().sequences

    @property
    def position(self) -> Continuation:
        """The sequences of the source that follow the earlier ones. Waits until those are known, see require()."""
        if self._position is None:
            lengths = [*((one.sequence_length, one.window) for one in self._earlier)]
            lengths.append((self.order.sequence_length, self.window))
            position = beginning(*lengths[0], seed=self.order.seed)
            for one, following in zip(self._earlier, lengths[1:], strict=True):
                self._wait(position.needs(one.sequences - 1))
                position = position.then(*following, after=one.sequences, total=self.tokens)
            self._position = position
        return self._position

    def require(self, number: int) -> None:
        """Wait until the tokens of sequence `number` are known. Raises UserError if they never will be, or if too many
        rows are bad."""
        self._wait(self.position.needs(number))
        # Count the shards in use, not all existing ones, so that a run stops at the same step on any machine.
        if (used := self.used(number)) > self.used_shards:
            self.used_shards = used
            self._budget.count(self.shards.shards[:used])

    def _wait(self, needed: int | None) -> None:
        """Wait until so many tokens exist, or all (None)."""
        if self.background is not None:
            window = (self.order.window or 0) * self.order.sequence_length
            self.background.want(None if needed is None else needed + window)
            if not self.shards.complete:
                self.background.check(needed=False)
        started = reported = time.monotonic()
        while not (self.closed or self.shards.complete or (needed is not None and self.shards.tokens >= needed)):
            if not self.shards.refresh():
                if not self.waits:
                    there = f"is tokenized up to token {self.shards.tokens:,} so far, and this needs more"
                    raise UserError(f"data.source: {self.name!r} {there}; scripts/prepare_data.py tokenizes all of it")
                self._require_progress()
                if self.background is not None and time.monotonic() - reported > SECONDS_BETWEEN_REPORTS:
                    reported = time.monotonic()
                    self.background.report(self.name, waited=reported - started)
                time.sleep(SECONDS_BETWEEN_LOOKS)

    def stop(self) -> None:
        """End all waiting, and stop tokenizing."""
        self.closed = True
        if self.background is not None:
            self.background.stop()

    def used(self, number: int) -> int:
        """How many shards determine sequence `number`, which must be known."""
        return self._covering(self.position.needs(number))

    @property
    def first_shards(self) -> Sequence[Shard]:
        """The shards that the first window of a new source needs; all if it was prepared, or has no windows."""
        return self.shards.shards[: self._covering(None if self.prepared else self.order.needs(0))]

    def checksum(self, count: int) -> str | None:
        """A checksum of the tokens that determine the first `count` sequences, and all earlier ones; None if there are
        none. Waits until they are tokenized."""
        if count:
            self.require(count - 1)
        needed = self.position.needs(count - 1) if count else self.position.needed
        return None if needed == 0 else self.shards.checksum(needed)

    def _covering(self, needed: int | None) -> int:
        return len(self.shards.shards) if needed is None else self.shards.covering(needed)

    def _require_progress(self) -> None:
        """Raises UserError if tokenizing has ended with a problem."""
        if self.background is not None:
            self.background.check()
        elif self._problem is not None and (error := read_problem(self._problem)) is not None:
            raise error


class Mixed:
    """Sequences of several sources: what those of text and those of pairs have in common."""

    def __init__(
        self, sources: Sequence[Source], weights: Sequence[float], length: int, windows: dict[str, Window]
    ) -> None:
        """weights: shares of the sequences, as for Mixture. windows: as in Segment."""
        self.sources = list(sources)
        self.mixture, self.sequence_length = Mixture(weights), length
        self.earlier: History = ()
        """The segments before the present one."""
        shares = {source.name: weight for source, weight in zip(self.sources, weights, strict=True)}
        self._segment = Segment(shares, length, 0, windows)

    def history(self, consumed: int) -> History:
        """All segments, when `consumed` sequences of the present one are consumed."""
        return joined((*self.earlier, replace(self._segment, sequences=consumed)))

    def require(self, first: int, count: int) -> None:
        """Wait until sequences first .. first + count - 1 are known."""
        counts = zip(self.sources, self._counts(first), self._counts(first + count), strict=True)
        for source, before, after in counts:
            if after > before:
                source.require(after - 1)  # of each source, they come in ascending order

    def checksums(self, consumed: int) -> dict[str, str]:
        """Source -> a checksum of the tokens that its sequences of all segments come from.

        Waits until they are tokenized. Reads only their part of the last shard.
        """
        by_source = {
            source.name: source.checksum(count)
            for source, count in zip(self.sources, self._counts(consumed), strict=True)
        }
        return {name: checksum for name, checksum in by_source.items() if checksum is not None}

    def sources_of(self, numbers: Sequence[int]) -> np.ndarray:
        """The source of each of these sequences, all of which is from one, by its index: (n,) int64."""
        return self.mixture.place(np.array(numbers, dtype=np.int64))[0]

    def close(self) -> None:
        """End all waiting, and stop tokenizing."""
        for source in self.sources:
            source.stop()

    def _places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sequence, and its number within that source."""
        places, own = self.mixture.place(numbers)
        return places, own + np.array([source.offset for source in self.sources])[places]

    def _counts(self, consumed: int) -> list[int]:
        """How many sequences of each source were consumed at the present length, when `consumed` are of the present
        segment."""
        return [
            source.offset + count for source, count in zip(self.sources, self.mixture.consumed(consumed), strict=True)
        ]


class Sequences(Mixed):
    """The sequences of all sources of text in the order of the run."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]) -> None:
        """weights: shares of the tokens."""
        windows = {source.name: source.window for source in sources if source.window is not None}
        super().__init__(sources, weights, sources[0].order.sequence_length, windows)

    def continue_after(self, history: History) -> int:
        """Go on after these segments. Returns the number of the next sequence in the present segment."""
        *earlier, present = joined((*history, self._segment)) or (self._segment,)
        if not present.continues(self._segment):
            earlier, present = [*earlier, present], self._segment
        self.earlier = tuple(earlier)
        for source in self.sources:
            source.continue_after(readings(self.earlier, source.name))
        return present.sequences

    @property
    def available(self) -> int:
        """Sequences until all existing tokens are read; in a mixture, smaller sources repeat until then."""
        return self.mixture.available([source.sequences for source in self.sources])

    def rows(self, first: int, count: int) -> np.ndarray:
        """Sequences first .. first + count - 1, which must be known: (count, S + 1) int64."""
        places, numbers = self._places(np.arange(first, first + count))
        rows = np.empty((count, self.sequence_length + 1), dtype=np.int64)
        for index, source in enumerate(self.sources):
            own = np.flatnonzero(places == index)
            found = source.position.pieces(numbers[own], total=source.tokens)
            for place, pieces in zip(own.tolist(), found, strict=True):
                filled = 0
                for start, length in pieces:  # each with the target of its last token, which the next piece replaces
                    source.shards.read(start, rows[place, filled : filled + length + 1])
                    filled += length
        return rows

    def beginning(self, count: int) -> list[int]:
        """The first tokens, at most `count`."""
        return self.rows(0, 1)[0, :count].tolist()

    def tokens(self, consumed: int) -> tuple[int, int]:
        """Input tokens of all segments, when `consumed` sequences of the present one are consumed: of an encoder (0),
        and of a decoder."""
        return 0, sum(segment.tokens for segment in self.history(consumed))

    def tokens_by_source(self, consumed: int) -> dict[str, int]:
        """Those of tokens(), of each source that was ever read."""
        return consumed_tokens(self.history(consumed))

    def pieces(self, number: int) -> Iterator[Piece]:
        """The pieces of documents that the inputs of training sequence `number` consist of, in order."""
        (place,), own = self._places(np.array([number]))
        source = self.sources[place]
        (pieces,) = source.position.pieces(own, total=source.tokens)
        for start, length in pieces:
            for piece in source.shards.documents(start, length):
                yield Piece(source.name, *piece)

    def epochs(self, consumed: int) -> dict[str, float | None]:
        """How often each source is read in all segments, when `consumed` sequences of the present one are consumed;
        None while its length is unknown."""
        read = consumed_tokens(self.history(consumed))
        return {
            source.name: read.get(source.name, 0) / source.tokens if source.tokens else None for source in self.sources
        }


def require_documents(source: Source, *, fraction: float, held_out: bool, setting: str = "data.source") -> None:
    """Raises UserError if the first window has no document to read. fraction: data.validation_fraction. held_out:
    whether held-out documents are needed too. setting: names the source in the recipe."""
    shards = source.first_shards
    documents, held = sum(shard.documents for shard in shards), sum(shard.held_out for shard in shards)
    if documents + held == 0:
        raise UserError(f"{setting}: {source.name!r} holds no text: every document is empty; give another source")
    if documents and (held or not held_out):
        return
    lowest, highest = min(shard.lowest for shard in shards), max(shard.highest for shard in shards)
    problem = f"data.validation_fraction: of the {documents + held} documents of {source.name!r} "
    if not documents:
        bound = f"{int(highest * 1e4) / 1e4:.4f} or less" if lowest < highest else "0"
        raise UserError(f"{problem}all would be held out with {fraction}; {_remedy(source, bound)}, or give more text")
    if lowest == highest:
        problem += "no two are different, so none can be held out; give more text"
    else:
        bound = f"{int(lowest * 1e4 + 1) / 1e4:.4f} or more"
        problem += f"none would be held out with {fraction}; {_remedy(source, bound)}, or give more text"
    raise UserError(problem + OTHERWISE)


def _remedy(source: Source, bound: str) -> str:
    """What to do to hold out another share of a source, in words. bound: the share."""
    if source.prepared:
        return f"prepare it again, in another folder, with --validation-fraction {bound}, and write that"
    return f"write {bound}"


def require_sequence(source: Source, *, what: str, more: str) -> None:
    """Raises UserError if there is less than one sequence of text. what: it is called. more: how to get more of it."""
    if source.sequences < 1:
        length, tokens = source.order.sequence_length, source.shards.tokens
        raise UserError(
            f"batch.sequence_length: {what} of {source.name!r} has {tokens} tokens, but one sequence of {length} and"
            f" its last target need {length + 1}; write at most {max(tokens - 1, 1)}, or {more}"
        )
