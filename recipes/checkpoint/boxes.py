"""Boxes of a tensor, in regular rows: a tensor cut into 16,384 parts is one line of a manifest. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval, MaxLen

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

    def problem(self, whole: tuple[int, ...]) -> str:
        """Why this cannot be a row of boxes of a tensor of this shape; "" if it can."""
        if len(self.start) != len(whole) or len(self.shape) != len(whole) or len(self.step) not in (0, len(whole)):
            return "a part with another number of dimensions"
        apart = any(step >= length for step, length in zip(self.step, self.shape, strict=bool(self.step)))
        if self.count > 1 and not (self.stride and apart):
            return "parts that overlap or share a file"
        last = self.start_of(self.count - 1)
        if any(first + length > end for first, length, end in zip(last, self.shape, whole, strict=True)):
            return "a part outside of its shape"
        return ""
