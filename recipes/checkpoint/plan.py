"""The parts of tensors that each process writes: every process computes the same answer, without a message.

It depends only on names, shapes, and how the mesh cuts each tensor, which all processes know: stages of a pipeline have
told each other. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy

from parallel.errors import UserError
from recipes.checkpoint.files import Piece
from recipes.checkpoint.manifest import DTYPE_BYTES, Boxes, StoredTensor

TINY = 64
"""Bytes of tensors that are together in one file, such as counters of steps: every process reads all of them."""
Array = numpy.ndarray[Any, numpy.dtype[numpy.int64]]


class Cut(NamedTuple):
    """A cut of a tensor by one axis of the mesh: of its parts, rank r has number r // stride % parts."""

    dimension: int
    """Dimension of the tensor that is cut."""
    parts: int
    stride: int
    """Distance between the ranks of neighbouring parts."""


@dataclass(frozen=True)
class Spread:
    """How a tensor is spread over the processes."""

    dtype: str
    """Key of DTYPE_BYTES."""
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    """Cuts in their order. A part is what torch.chunk gives: rounded up, and the last ones shorter or empty. Processes
    that no cut separates hold the same box."""
    ranks: tuple[int, int] | None = None
    """The first rank of those that hold the tensor, and one past the last; None = all."""


@dataclass(frozen=True)
class Division:
    """The boxes of all tensors of one shape that the mesh cuts in the same way."""

    elements: Array
    """Elements of each box."""
    largest: int
    """The elements of the largest box."""
    ranks: Array
    """(boxes, replicas): the ranks that hold each box. The distance between two replicas is the same for all boxes."""
    runs: tuple[Boxes, ...]
    """The same boxes as regular rows of them, in the files of the first replica."""


def plan(tensors: Mapping[str, Spread], processes: int) -> dict[str, StoredTensor]:
    """The boxes of every tensor, and in which process's file each is: every element once, equal shares for replicas.

    One of a tensor's replicas writes all of its boxes: the one whose processes have the least to write so far. The
    tensors with the largest boxes come first.
    """
    holders = {name: about.ranks or (0, processes) for name, about in tensors.items()}
    divisions = {
        name: divide(about.shape, about.cuts, holders[name][1] - holders[name][0]) for name, about in tensors.items()
    }
    width = {name: DTYPE_BYTES[about.dtype] for name, about in tensors.items()}
    load = numpy.zeros(processes, numpy.int64)
    planned: dict[str, StoredTensor] = {}
    for name in sorted(tensors, key=lambda name: -divisions[name].largest * width[name]):
        division = divisions[name]
        ranks = division.ranks + holders[name][0]
        shared = ranks.size and ranks.shape[1] > 1 and (len(ranks) > 1 or division.elements[0] * width[name] > TINY)
        replica = int(load[ranks].max(axis=0).argmin()) if shared else 0
        load[ranks[:, replica]] += division.elements * width[name]
        away = int(ranks[0, replica] - division.ranks[0, 0]) if ranks.size else 0
        runs = tuple(replace(run, file=run.file + away) for run in division.runs) if away else division.runs
        planned[name] = StoredTensor(tensors[name].dtype, tensors[name].shape, runs)
    return {name: planned[name] for name in tensors}


def pieces_of(tensors: Mapping[str, StoredTensor], rank: int) -> list[Piece]:
    """What a process writes, in the order of its file: widest elements first, so that all are aligned."""
    pieces = []
    for name, tensor in tensors.items():
        for run in tensor.boxes:
            if (number := run.number_in(rank)) is not None:
                whole = run.shape == tensor.shape
                pieces.append(Piece(name, tensor.dtype, run.start_of(number), run.shape, whole=whole))
    return sorted(pieces, key=lambda piece: -DTYPE_BYTES[piece.dtype])


@lru_cache(maxsize=64)
def divide(shape: tuple[int, ...], cuts: tuple[Cut, ...], processes: int) -> Division:
    """The boxes of a tensor of this shape. Raises UserError if these cuts do not belong to that number of processes."""
    ranks = numpy.arange(processes, dtype=numpy.int64)
    starts = numpy.zeros((processes, len(shape)), numpy.int64)
    shapes = numpy.tile(numpy.array(shape, numpy.int64), (processes, 1))
    box = numpy.zeros(processes, numpy.int64)
    for dimension, parts, stride in cuts:
        part = ranks // stride % parts
        left = shapes[:, dimension]
        each = -(-left // parts)
        begin = numpy.minimum(part * each, left)
        starts[:, dimension] += begin
        shapes[:, dimension] = numpy.minimum(each, left - begin)
        box = box * parts + part
    number = prod(cut.parts for cut in cuts)
    if processes % number or (numpy.bincount(box, minlength=number) != processes // number).any():
        raise UserError(f"a mesh that cuts a tensor {[tuple(cut) for cut in cuts]} does not fit {processes} processes")
    holders = numpy.argsort(box, kind="stable").reshape(number, -1)
    if ((holders - holders[:, :1]) != (holders - holders[:, :1])[:1]).any():
        raise UserError(f"the replicas of a tensor cut {[tuple(cut) for cut in cuts]} are at irregular distances")
    holders = holders[(shapes[holders[:, 0]] > 0).all(axis=1)]
    orders = [_in_order(starts[holders[:, 0]], last) for last in range(len(shape))] or [numpy.arange(len(holders))]
    divisions = [
        (holders[order], _runs(starts[holders[order][:, 0]], shapes[holders[order][:, 0]], holders[order][:, 0]))
        for order in orders
    ]
    holders, runs = min(divisions, key=lambda pair: len(pair[1]))
    elements = shapes[holders[:, 0]].prod(axis=1)
    return Division(elements, int(elements.max(initial=0)), holders, runs)


def _in_order(starts: Array, last: int) -> Array:
    """The order of boxes by their starts, where dimension `last` varies fastest."""
    others = [dimension for dimension in range(starts.shape[1]) if dimension != last]
    return numpy.lexsort([starts[:, dimension] for dimension in [last, *reversed(others)]])


def _runs(starts: Array, shapes: Array, ranks: Array) -> tuple[Boxes, ...]:
    """Neighbours with equal shapes, at equal distances in the tensor and among the files, as one row of boxes."""
    table = numpy.column_stack([ranks, starts, shapes])
    steps = numpy.diff(table, axis=0)
    width = starts.shape[1]
    regular = (steps[:, 0] > 0) & (steps[:, 1 : 1 + width] >= 0).all(axis=1) & ~steps[:, 1 + width :].any(axis=1)
    changes = numpy.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 1
    rows, begin = [], 0
    while begin < len(table):
        end, step = begin + 1, None
        if begin < len(steps) and regular[begin]:
            step, after = steps[begin], int(numpy.searchsorted(changes, begin, side="right"))
            end = int(changes[after]) + 1 if after < len(changes) else len(table)
        file, *rest = table[begin].tolist()
        first = Boxes(file, tuple(rest[:width]), tuple(rest[width:]))
        if step is not None:
            stride, *moves = step.tolist()
            first = replace(first, count=end - begin, stride=stride, step=tuple(moves[:width]))
        rows.append(first)
        begin = end
    return tuple(rows)


def strides_of(ranks: Sequence[Any]) -> list[tuple[int, int]]:
    """The parts of each axis of a mesh, and the distance of neighbours in ranks, from the ranks of one slice of it.

    ranks: nested lists, as DeviceMesh.mesh has them. Raises UserError if they are not at equal distances.
    """
    array = numpy.array(ranks, numpy.int64)
    origin = (0,) * array.ndim
    axes = []
    for axis, parts in enumerate(array.shape):
        neighbour = tuple(int(other == axis) for other in range(array.ndim))
        axes.append((parts, int(array[neighbour] - array[origin]) if parts > 1 else 1))
    for axis, (parts, stride) in enumerate(axes):
        shape = [1] * array.ndim
        shape[axis] = parts
        if stride < 1 or (array // stride % parts != numpy.arange(parts).reshape(shape)).any():
            raise UserError(f"the mesh of a tensor has ranks {array.tolist()}, which are not at equal distances")
    return axes
