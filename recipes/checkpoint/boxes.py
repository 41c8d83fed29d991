"""Boxes of a tensor, in regular rows: a tensor cut into 16,384 parts is one line of a manifest. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated

from annotated_types import Interval, MaxLen

MAX_TOGETHER = 100
"""The most boxes of a tensor that are compared pairwise, if no straight cut separates them."""

Count = Annotated[int, Interval(ge=0, lt=2**62)]
Shape = Annotated[tuple[Count, ...], MaxLen(16)]


@dataclass(frozen=True)
class Boxes:
    """Equal boxes of a tensor at equal distances, each in another shard, at equal distances too."""

    file: Count
    """The number of the shard with the first box."""
    start: Shape
    """Index of the first box's first element in the tensor."""
    shape: Shape
    count: Annotated[int, Interval(ge=1, lt=2**31)] = 1
    stride: Count = 0
    """Distance from each box's shard to that of the next."""
    step: Shape = ()
    """Distance from each box's start to that of the next, along each dimension."""

    @property
    def shards(self) -> slice:
        """The numbers of the shards that have one of the boxes."""
        return slice(self.file, self.file + (self.count - 1) * self.stride + 1, self.stride or 1)

    def number_in(self, file: int) -> int | None:
        """The number of the box in this shard; None if there is none."""
        number, rest = divmod(file - self.file, self.stride or 1)
        return number if rest == 0 and 0 <= number < self.count else None

    def start_of(self, number: int) -> tuple[int, ...]:
        if not number:
            return self.start
        return tuple(first + number * step for first, step in zip(self.start, self.step, strict=True))

    def meeting(self, start: Sequence[int], shape: Sequence[int]) -> range:
        """The numbers of the boxes that share an element with this one, none of whose sides is 0."""
        low, high = 0, self.count
        steps = self.step or (0,) * len(self.start)
        for mine, length, step, first, wanted in zip(self.start, self.shape, steps, start, shape, strict=True):
            if step:
                low = max(low, (first - mine - length) // step + 1)
                high = min(high, -((mine - first - wanted) // step))
            elif mine >= first + wanted or first >= mine + length:
                return range(0)
        return range(low, max(low, high))

    def problem(self, dimensions: int) -> str:
        """Why this cannot be a row of boxes of a tensor with so many dimensions; "" if it can."""
        if len(self.start) != dimensions or len(self.shape) != dimensions or len(self.step) not in (0, dimensions):
            return "a part with another number of dimensions"
        if self.count > 1 and (not self.stride or not self._apart):
            return "parts that overlap or share a file"
        return ""

    @property
    def _apart(self) -> bool:
        return any(step >= length for step, length in zip(self.step, self.shape, strict=bool(self.step)))

    @property
    def end(self) -> tuple[int, ...]:
        """The index after the last element of the last box."""
        return tuple(first + length for first, length in zip(self.start_of(self.count - 1), self.shape, strict=True))


@dataclass(frozen=True)
class Hull:
    """The smallest box around some boxes."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


def rows_overlap(rows: Sequence[Boxes]) -> bool:
    """What overlap() returns for the boxes of all rows, if those of one row lie apart from each other."""
    hulls = [Hull(row.start, tuple(a - b for a, b in zip(row.end, row.start, strict=True))) for row in rows]
    if not overlap(hulls):
        return False
    if sum(row.count for row in rows) > 1 << 16:  # no run cuts a tensor like this
        return True
    return overlap([Hull(row.start_of(number), row.shape) for row in rows for number in range(row.count)])


def overlap(boxes: Sequence[Hull]) -> bool:
    """Whether two boxes share an element, or too many boxes are laid out in a way that no run cuts a tensor.

    Boxes are split into groups by straight cuts, along one dimension after the other. If a tensor is cut into rows,
    columns or both, this separates all boxes. The boxes that remain together are compared pairwise, and must be few.
    """
    if not boxes or not boxes[0].shape:
        return len(boxes) > 1
    together = [list(boxes)]
    for axis in [*range(len(boxes[0].shape))] * 2:
        together = [part for group in together for part in _apart(group, axis) if len(part) > 1]
    return any(len(group) > MAX_TOGETHER or _any_two_meet(group) for group in together)


def _apart(boxes: list[Hull], axis: int) -> Iterator[list[Hull]]:
    """Groups of boxes that do not overlap on this axis."""
    group: list[Hull] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box.start[axis]):
        if group and box.start[axis] >= end:
            yield group
            group = []
        group.append(box)
        end = max(end, box.start[axis] + box.shape[axis])
    yield group


def _any_two_meet(boxes: list[Hull]) -> bool:
    for one, other in combinations(boxes, 2):
        sides = zip(one.start, one.shape, other.start, other.shape, strict=True)
        if all(a < b + length_b and b < a + length_a for a, length_a, b, length_b in sides):
            return True
    return False
