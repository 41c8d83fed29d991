"""What a run has read of its sources, at which lengths and shares, and how each source goes on from there.

A run that keeps its sources, shares and length has one segment, and its order is that of order.py. Where a stage or a
fork changes one of them, a source goes on where it was. At an unchanged length its numbers just continue. At another
length S', what is left of the window or epoch that is being read, in its shuffled order, is joined and cut into
sequences of S', the last of which takes its missing tokens from the part that nothing was read of; then that part is
cut anew. So every token is an input once per epoch, whatever the lengths. Positions follow from the segments alone, in
constant memory. Inside of a joined sequence, the target where two pieces meet is the first token of the next piece.
Imports no torch.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Ge, Gt, MinLen

from parallel.errors import listed
from recipes.data.order import Mixture, SequenceOrder

MOST_EPOCHS = 4
"""Text that was repeated more often taught much less than new text (Muennighoff et al., 2023)."""


class Window(NamedTuple):
    """How much of a source is shuffled at a time."""

    tokens: Annotated[int, Ge(1)]
    every_epoch: bool
    """False = only in the first epoch; later ones are shuffled as a whole."""


@dataclass(frozen=True)
class Segment:
    """Sequences that were consumed with unchanged sources, shares and length."""

    sources: Annotated[dict[str, Annotated[float, Gt(0)]], MinLen(1)]
    """Name -> share of the tokens; the order of the sequences follows their order."""
    sequence_length: Annotated[int, Ge(1)]
    sequences: Annotated[int, Ge(0)]
    windows: dict[str, Window] = field(default_factory=dict)
    """Name -> window of the sources that are shuffled by windows; the others are shuffled by epochs."""

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence_length

    def continues(self, other: "Segment") -> bool:
        """Whether both are parts of one segment."""
        mine, others = ([*one.sources.items()] for one in (self, other))
        return (mine, self.sequence_length, self.windows) == (others, other.sequence_length, other.windows)

    def consumed(self) -> dict[str, int]:
        """The number of its sequences from each source."""
        return dict(zip(self.sources, Mixture([*self.sources.values()]).consumed(self.sequences), strict=True))


History = tuple[Segment, ...]
"""The segments up to a checkpoint, oldest first."""


def joined(history: Iterable[Segment]) -> History:
    """The history with neighbours joined that are parts of one segment, and without empty ones."""
    segments: list[Segment] = []
    for segment in history:
        if segments and segment.continues(segments[-1]):
            segments[-1] = replace(segment, sequences=segments[-1].sequences + segment.sequences)
        elif segment.sequences:
            segments.append(segment)
    return tuple(segments)


def to_json(history: History) -> list[dict[str, Any]]:
    """The history as plain JSON, for the progress of a checkpoint."""
    return [asdict(segment) for segment in history]


def from_json(stored: Any) -> History:
    """The history that to_json() stored. Raises ValueError for anything else."""
    from pydantic import TypeAdapter

    return TypeAdapter(History).validate_json(json.dumps(stored))


class Reading(NamedTuple):
    """Sequences of one source that were consumed at one length."""

    sequence_length: int
    window: Window | None
    sequences: int


def readings(history: History, source: str) -> list[Reading]:
    """What was consumed of a source, oldest first; neighbours differ in length or window."""
    found: list[Reading] = []
    for segment in history:
        if count := segment.consumed().get(source, 0):
            now = Reading(segment.sequence_length, segment.windows.get(source), count)
            if found and found[-1][:2] == now[:2]:
                now = now._replace(sequences=found.pop().sequences + count)
            found.append(now)
    return found


def consumed_tokens(history: History) -> dict[str, int]:
    """The tokens consumed of each source that was ever read."""
    found: dict[str, int] = {}
    for segment in history:
        for source, count in segment.consumed().items():
            found[source] = found.get(source, 0) + count * segment.sequence_length
    return found


def epoch_lines(epochs: Mapping[str, float | None], *, by: str) -> Iterator[str]:
    """How often the sources whose length is known are read, and a warning of each that is read too often. by: when."""
    known = {name: times for name, times in epochs.items() if times is not None}
    if known:
        counts = (f"{name!r} {times:.{1 if times >= 0.1 else 4}f} times" for name, times in known.items())
        yield f"reads {listed(counts)} by {by}"
    for name, times in known.items():
        if times > MOST_EPOCHS:
            yield f"WARNING: {name!r} is read {times:.1f} times; more than {MOST_EPOCHS} teach little (docs/data.md)"


def order_of(sequence_length: int, window: Window | None, *, seed: int, origin: int = 0) -> SequenceOrder:
    """The order in which the part of a source from `origin` on is read."""
    if window is None:
        return SequenceOrder(sequence_length, seed, None, origin=origin)
    size = max(1, window.tokens // sequence_length)
    return SequenceOrder(sequence_length, seed, size, every_epoch=window.every_epoch, origin=origin)


@dataclass(frozen=True)
class Unread:
    """What an earlier length left of a window or epoch: sequences first .. first + count - 1 of its order, without the
    first `skip` tokens."""

    order: SequenceOrder
    first: int
    count: int
    skip: int = 0

    @property
    def tokens(self) -> int:
        return self.count * self.order.sequence_length - self.skip

    def after(self, tokens: int) -> "Unread":
        """What is left when so many of its tokens are consumed."""
        sequences, skip = divmod(self.skip + tokens, self.order.sequence_length)
        return replace(self, first=self.first + sequences, count=self.count - sequences, skip=skip)

    def pieces(self, begin: int, end: int, *, total: int | None) -> Iterator[tuple[int, int]]:
        """The pieces of the source that hold tokens begin .. end - 1 of this: start and length of each."""
        length, begin, end = self.order.sequence_length, self.skip + begin, self.skip + end
        numbers = np.arange(begin // length, (end - 1) // length + 1)
        starts = self.order.starts(self.first + numbers, total=total)
        for number, start in zip(numbers.tolist(), starts.tolist(), strict=True):
            offset = max(0, begin - number * length)
            yield start + offset, min(length, end - number * length) - offset


@dataclass(frozen=True)
class Continuation:
    """The sequences of a source at one length: what earlier lengths left, joined, and then the fresh part."""

    fresh: SequenceOrder
    unread: Unread | None = None
    needed: int | None = 0
    """How many tokens earlier sequences were determined by; None = all."""

    @property
    def filled_from(self) -> int:
        """The place in the endless row of the tokens that fill up the last joined sequence."""
        return self.fresh.origin - (self.joined * self.fresh.sequence_length - self.unread.tokens if self.unread else 0)

    @property
    def joined(self) -> int:
        """The number of sequences that consist of what was left."""
        return -(-self.unread.tokens // self.fresh.sequence_length) if self.unread else 0

    def needs(self, number: int) -> int | None:
        """How many tokens must exist to determine sequence `number`, as in SequenceOrder.needs(); None = all."""
        fresh = self.fresh.origin + 1 if number < self.joined else self.fresh.needs(number - self.joined)
        return None if self.needed is None or fresh is None else max(self.needed, fresh)

    def pieces(self, numbers: np.ndarray, *, total: int | None) -> Iterator[list[tuple[int, int]]]:
        """The pieces of the source that the inputs of each of these sequences consist of: start and length of each.

        total: as in SequenceOrder.starts().
        """
        length, is_joined = self.fresh.sequence_length, numbers < self.joined
        starts = iter(self.fresh.starts(numbers[~is_joined] - self.joined, total=total).tolist())
        for number, old in zip(numbers.tolist(), is_joined.tolist(), strict=True):
            yield self._joined_pieces(number, total=total) if old else [(next(starts), length)]

    def _joined_pieces(self, number: int, *, total: int | None) -> list[tuple[int, int]]:
        assert self.unread is not None
        begin = number * self.fresh.sequence_length
        end = min(begin + self.fresh.sequence_length, self.unread.tokens)
        found = [*self.unread.pieces(begin, end, total=total)]
        if missing := begin + self.fresh.sequence_length - end:
            found.append((self.filled_from, missing))
        return found

    def then(self, sequence_length: int, window: Window | None, *, after: int, total: int | None) -> "Continuation":
        """How the source goes on at another length or window, after the first `after` sequences, at least one, which
        must be known. total: as in SequenceOrder.starts()."""
        length, needed = self.fresh.sequence_length, self.needs(after - 1)
        unread: Unread | None
        if self.unread and after * length < self.unread.tokens:
            unread, origin = self.unread.after(after * length), self.filled_from
        elif after == self.joined:
            unread, origin = None, self.fresh.origin
        else:
            number = after - self.joined
            _, (first,), (size,) = self.fresh.units(np.array([number - 1]), total=total)
            end = int(first + size)
            unread = Unread(self.fresh, number, end - number) if end > number else None
            origin = self.fresh.origin + end * length
        missing = -unread.tokens % sequence_length if unread else 0
        fresh = order_of(sequence_length, window, seed=self.fresh.seed, origin=origin + missing)
        return Continuation(fresh, unread, needed)


def beginning(sequence_length: int, window: Window | None, *, seed: int) -> Continuation:
    """The sequences of a source that nothing was read of."""
    return Continuation(order_of(sequence_length, window, seed=seed))
