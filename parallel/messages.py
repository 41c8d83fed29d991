"""Messages between the hosts of all processes, along a tree: what each process opens and sends does not grow with them.

Every WIDTH neighbouring ranks, a node of eight GPUs, send to the first of them, and these first ones along a tree of
their own. They share one gloo group, which connects two processes when the first message passes between them.
"""

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")

WIDTH = 8
"""Ranks of a block, whose first one speaks for it."""
BRANCHES = 16
"""Blocks that one block hears from."""
FRAME = 4096
"""Bytes of the first message of a value, which is all of it if it fits."""
BLOCK = 16 << 20
"""Bytes of the largest message of pass_bytes()."""
PATIENCE = timedelta(hours=6)
"""How long a process waits for a message of one that it has met: rank 0 may be tokenizing a corpus."""

_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class Channel(IntEnum):
    """What is under way at the same time on different threads; messages of one channel do not meet another's."""

    MAIN = 1
    SAVES = 2
    COPIES = 3
    VOTES = 4
    MEMORY = 5


def parent_of(rank: int) -> int:
    """The rank that this one sends to; -1 for rank 0, the root."""
    block, place = divmod(rank, WIDTH)
    if place:
        return block * WIDTH
    return (block - 1) // BRANCHES * WIDTH if block else -1


def children_of(rank: int, size: int) -> list[int]:
    """The ranks that send to this one, in ascending order."""
    block, place = divmod(rank, WIDTH)
    if place:
        return []
    blocks = range(block * BRANCHES + 1, block * BRANCHES + BRANCHES + 1)
    candidates = [*range(rank + 1, rank + WIDTH), *(other * WIDTH for other in blocks)]
    return [child for child in candidates if child < size]


def host_group() -> dist.ProcessGroup:
    """The gloo group of all processes for messages; the first call makes it, and all processes must make it."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _groups:
        # They must have met within the run's time-out: nobody waits as long as PATIENCE for one that never joins.
        options = world._get_backend(torch.device("cpu")).options
        _groups[world] = dist.new_group(backend="gloo", timeout=options._timeout)
    return _groups[world]


class Messages:
    """One channel between all processes. All of them call the same methods in the same order."""

    def __init__(self, channel: Channel) -> None:
        """Collective, for the first channel of a process group."""
        self._group, self._channel = host_group(), int(channel)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._parent, self._children = parent_of(self.rank), children_of(self.rank, self.size)

    def reduce(self, value: Value, merge: Callable[[Value, Value], Value]) -> Value:
        """The values of all processes merged, on rank 0; elsewhere what passed through. merge: associative, and called
        with lower ranks first wherever neighbouring blocks meet."""
        for child in self._children:
            value = merge(value, self._receive(child))
        if self._parent >= 0:
            self._send(value, self._parent)
        return value

    def from_main(self, value: Value) -> Value:
        """Rank 0's value, on all processes."""
        frame = None
        if self._parent >= 0:
            value, frame = self._receive_frame(self._parent)
        for child in self._children:
            frame = self._send(value, child, frame)
        return value

    def to_main(self, value: Value) -> list[Value] | None:
        """The value of every process, by rank, on rank 0; None elsewhere."""
        found = self.reduce({self.rank: value}, lambda one, other: one | other)
        return [found[rank] for rank in range(self.size)] if self.rank == 0 else None

    def from_all(self, value: Value) -> list[Value]:
        """The (small) value of every process, by rank, on all processes."""
        return cast(list[Value], self.from_main(self.to_main(value)))

    def from_first(self, value: Value, ranks: Sequence[int]) -> Value:
        """The value of the first of these ranks, on all of them; only they call it."""
        if self.rank != ranks[0]:
            return cast(Value, self._receive(ranks[0]))
        frame = None
        for rank in ranks[1:]:
            frame = self._send(value, rank, frame)
        return value

    def pass_on(self, value: Value, *, to: int | None, source: int | None) -> Value | None:
        """Send a value to one process, while that of another comes. to, source: None = there is none."""
        parts = packed(value) if to is not None else ()
        works = [dist.isend(part, to, group=self._group, tag=self._channel) for part in parts]
        came = None if source is None else self._receive(source)
        for work in works:
            _wait(work)
        return came

    def pass_bytes(
        self, mine: Sequence[Tensor], theirs: Sequence[Tensor], *, to: int | None, source: int | None
    ) -> None:
        """Send these bytes to one process, while those of another fill the others."""
        works = []
        for tensors, move, rank in ((mine, dist.isend, to), (theirs, dist.irecv, source)):
            pieces = [piece for tensor in tensors for piece in tensor.split(BLOCK)]
            works += [move(piece, rank, group=self._group, tag=self._channel) for piece in pieces]
        for work in works:
            _wait(work)

    def barrier(self) -> None:
        """Returns on no process before all have called it."""
        self.reduce(0, max)
        self.from_main(0)

    def _send(self, value: Any, rank: int, frame: "Frame | None" = None) -> "Frame":
        frame = frame or packed(value)
        for part in frame:
            _wait(dist.isend(part, rank, group=self._group, tag=self._channel))
        return frame

    def _receive(self, rank: int) -> Any:
        return self._receive_frame(rank)[0]

    def _receive_frame(self, rank: int) -> "tuple[Any, Frame]":
        head = torch.empty(FRAME, dtype=torch.uint8)
        _wait(dist.irecv(head, rank, group=self._group, tag=self._channel))
        frame: Frame = (head,)
        if (length := length_in(head)) > FRAME - 8:
            rest = torch.empty(length, dtype=torch.uint8)
            _wait(dist.irecv(rest, rank, group=self._group, tag=self._channel))
            frame = head, rest
        return unpacked(frame), frame


Frame = tuple[Tensor, ...]


def _wait(work: dist.Work | None) -> None:
    assert work is not None  # both processes are members of the group
    work.wait(PATIENCE)


def packed(value: Any) -> Frame:
    """The one or two messages that a value takes."""
    text = pickle.dumps(value)
    head = torch.zeros(FRAME, dtype=torch.uint8)
    head[:8] = torch.frombuffer(bytearray(len(text).to_bytes(8, "little")), dtype=torch.uint8)
    content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if len(text) > FRAME - 8:
        return head, content
    head[8 : 8 + len(text)] = content
    return (head,)


def unpacked(frame: Frame) -> Any:
    """The value of packed()."""
    head, *rest = frame
    return pickle.loads((rest[0] if rest else head[8 : 8 + length_in(head)]).numpy().data)


def length_in(head: Tensor) -> int:
    """The bytes of a value whose first message this is."""
    return int.from_bytes(head[:8].numpy().tobytes(), "little")
