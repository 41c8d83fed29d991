"""Brings sharded matrices whole to their owners, and results back to the shards they are of.

FSDP cuts matrices by rows, into chunks that may be uneven or empty; before it tensor parallelism has cut them by rows
or columns. All parts of a matrix are in one group of processes. With several replicas of the model, an owner is in one
of them and gathers from its own group; the other replicas receive results from the processes with the same shards.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from parallel.dist import wait_for
from parallel.mesh import Mesh, sharding_group
from parallel.owners import Round, Shape, deal, flat

Part = tuple[slice, slice]
"""Rows and columns of a matrix."""


class Sent:
    """What is on its way to this process."""

    def __init__(self, buffer: Tensor, work: dist.Work | None) -> None:
        self._of: tuple[Tensor, dist.Work | None] | None = (buffer, work)

    def received(self) -> Tensor:
        """The buffer with all that was sent; this object no longer holds it."""
        assert self._of is not None, "asked for twice"
        (buffer, work), self._of = self._of, None
        if work is not None:
            wait_for(work)
        return buffer


class Matrices:
    """Sharded matrices, each with an owner. All processes call its methods for the same rounds in the same order."""

    def __init__(self, matrices: Sequence[DTensor], mesh: Mesh, *, dtype: torch.dtype) -> None:
        """dtype: the type in which parts and results are sent."""
        self._group, self._replicas = sharding_group(mesh), mesh.replicate_group
        self._rank, self._size = self._group.rank(), self._group.size()
        self.replicas = self._replicas.size()
        self._shapes: list[Shape] = [(matrix.shape[0], matrix.shape[1]) for matrix in matrices]
        self._parts = [parts_of(matrix, self._size) for matrix in matrices]
        self._empty = matrices[0].to_local().new_empty(0, dtype=dtype)
        self.rounds = deal(self._shapes, owners=self._size * self.replicas)

    def gathered(self, of: Round) -> list[int]:
        """The matrices that the owners in this process's replica gather in a round."""
        return [number for batch in self._batches(of, self._replicas.rank()) for number in batch]

    def send(self, of: Round, shards: Mapping[int, Tensor]) -> Sent:
        """Send this process's shards of gathered() to their owners."""
        batches = self._batches(of, self._replicas.rank())
        outgoing = [shards[number].flatten() for batch in batches for number in batch]
        return self._exchange(outgoing, self._own_sizes(batches), self._batch_sizes(of), self._empty)

    def whole(self, of: Round, parts: Tensor) -> Tensor:
        """This process's batch (matrices, short side, long side), from what send() has brought."""
        batch = self._batch(of)
        if not batch:
            return parts.new_empty(0, 1, 1)
        whole = parts.new_empty(len(batch), *flat(self._shapes[batch[0]]))
        places = self._places(batch, whole)
        arrived = parts.split([place.numel() for place in places])
        torch._foreach_copy_(places, [part.view(place.shape) for part, place in zip(arrived, places, strict=True)])
        return whole

    def send_back(self, of: Round, results: Tensor) -> Sent:
        """Send each process its shards of this process's results, in the shape of whole()."""
        batches = self._batches(of, self._replicas.rank())
        outgoing = [place.flatten() for place in self._places(self._batch(of), results)]
        room = self._empty.new_empty(self._longest(of))
        return self._exchange(outgoing, self._batch_sizes(of), self._own_sizes(batches), room)

    def share(self, of: Round, results: Tensor) -> Sent:
        """Give the other replicas what send_back() has brought; with one replica, there is nothing to do."""
        if self.replicas == 1:
            return Sent(results, None)
        everything = results.new_empty(self.replicas * len(results))
        parts = list(everything.chunk(self.replicas))
        return Sent(everything, dist.all_gather(parts, results, group=self._replicas, async_op=True))

    def shards(self, of: Round, results: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(number, this process's shard) of the results of all matrices of a round, from what share() has brought."""
        for replica in range(self.replicas):
            start = replica * self._longest(of)
            for batch in self._batches(of, replica):
                for number in batch:
                    rows, columns = self._size_of(number, self._rank)
                    yield number, results[start : start + rows * columns].view(rows, columns)
                    start += rows * columns

    def _batches(self, of: Round, replica: int) -> Sequence[tuple[int, ...]]:
        """The batches of one replica, in the order of its owners. (Neighbours in a round are of other replicas.)"""
        return of[replica :: self.replicas]

    def _batch(self, of: Round) -> tuple[int, ...]:
        """This process's batch."""
        return self._batches(of, self._replicas.rank())[self._rank]

    def _places(self, batch: Sequence[int], whole: Tensor) -> list[Tensor]:
        """Views of a batch, one for each part of it, in the order in which the processes that have them send them."""
        found = []
        for rank in range(self._size):
            for matrix, number in zip(whole, batch, strict=True):
                rows, columns = self._parts[number][rank]
                upright = matrix if flat(self._shapes[number]) == self._shapes[number] else matrix.mT
                found.append(upright[rows, columns])
        return found

    def _size_of(self, number: int, rank: int) -> tuple[int, int]:
        rows, columns = self._parts[number][rank]
        return rows.stop - rows.start, columns.stop - columns.start

    def _own_sizes(self, batches: Sequence[Sequence[int]]) -> list[int]:
        """Elements of this process's shards of the batch of each owner."""
        return [sum(prod(self._size_of(number, self._rank)) for number in batch) for batch in batches]

    def _batch_sizes(self, of: Round) -> list[int]:
        """Elements of each process's shards of this process's batch."""
        batch = self._batch(of)
        return [sum(prod(self._size_of(number, rank)) for number in batch) for rank in range(self._size)]

    def _longest(self, of: Round) -> int:
        """Elements of this process's shards of the results of one replica: as many as of the one with most."""
        return max(sum(self._own_sizes(self._batches(of, replica))) for replica in range(self.replicas))

    def _exchange(self, outgoing: list[Tensor], sent: list[int], received: list[int], room: Tensor) -> Sent:
        """Each process sends each other one a part. Returns what arrives, in `room` if there is enough of it."""
        together = torch.cat([self._empty, *outgoing])
        amount = sum(received)
        if self._size == 1 and len(room) <= amount:
            return Sent(together, None)
        room = room if len(room) >= amount else self._empty.new_empty(amount)
        work = dist.all_to_all_single(room[:amount], together, received, sent, group=self._group, async_op=True)
        return Sent(room, work)


def parts_of(matrix: DTensor, processes: int) -> list[Part]:
    """The part that each process of a sharding_group() has: FSDP cuts the rows of what tensor parallelism has left."""
    placement = dict(zip(matrix.device_mesh.mesh_dim_names or (), matrix.placements, strict=True)).get("tensor")
    tensor = matrix.device_mesh["tensor"].size() if placement is not None else 1
    cut = None if placement is None or placement.is_replicate() else cast(Shard, placement).dim
    found = []
    for rank in range(processes):
        by_fsdp, by_tensor = divmod(rank, tensor)
        rows, columns = slice(0, matrix.shape[0]), slice(0, matrix.shape[-1])
        if cut == 0:
            rows = _chunk(rows, by_tensor, tensor)
        elif cut == 1:
            columns = _chunk(columns, by_tensor, tensor)
        found.append((_chunk(rows, by_fsdp, processes // tensor), columns))
    return found


def _chunk(whole: slice, index: int, count: int) -> slice:
    """One of so many chunks, as torch.chunk() cuts them: the last ones may be shorter, or empty."""
    size = -(-(whole.stop - whole.start) // count)
    start = min(whole.start + index * size, whole.stop)
    return slice(start, min(start + size, whole.stop))
