"""Who multiplies which whole matrix, and when.

Newton-Schulz needs whole matrices, of which each process holds a part. Each matrix has one owner, a process that gets
all parts, and owners are balanced by the cost of their products. They work in rounds, so that parts arrive for the next
round while this one multiplies. In a round each owner has one batch: matrices of one shape, multiplied together.
Imports no torch.
"""

import heapq
from collections.abc import Sequence
from itertools import groupby, zip_longest

Shape = tuple[int, int]
"""(rows, columns)."""
Round = tuple[tuple[int, ...], ...]
"""The numbers of the matrices of each owner's batch, which may be empty."""

BATCH = 2**25
"""Elements of a batch at most, unless a single matrix has more: a batch is a few more copies of itself in memory."""


def flat(shape: Shape) -> Shape:
    """The shape in which a matrix is multiplied: transposed if it is higher than wide."""
    rows, columns = shape
    return (rows, columns) if rows <= columns else (columns, rows)


def newton_schulz_flops(shape: Shape, *, steps: int) -> int:
    """FLOPs for one matrix: X X^T, its square, and the product of both with X, in each step."""
    short, long = flat(shape)
    return steps * 2 * short * short * (2 * long + short)


def deal(shapes: Sequence[Shape], *, owners: int, batch: int = BATCH) -> list[Round]:
    """The rounds in which so many owners multiply matrices of these shapes.

    The costliest matrix goes first, each to the owner with the least to do: at worst one has 4/3 of the best that is
    possible (Graham 1969). So do rounds, and those of all owners begin with matrices of similar cost.
    """

    def by_cost(number: int) -> tuple[int, Shape, int]:
        return -newton_schulz_flops(shapes[number], steps=1), flat(shapes[number]), number

    loads = [(0, owner) for owner in range(owners)]
    dealt: list[list[int]] = [[] for _ in range(owners)]
    for number in sorted(range(len(shapes)), key=by_cost):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + newton_schulz_flops(shapes[number], steps=1), owner))
        dealt[owner].append(number)
    return list(zip_longest(*[[*_batches(numbers, shapes, batch)] for numbers in dealt], fillvalue=()))


def _batches(numbers: Sequence[int], shapes: Sequence[Shape], batch: int) -> list[tuple[int, ...]]:
    """One owner's matrices, sorted by shape, in batches."""
    found = []
    for shape, alike in groupby(numbers, key=lambda number: flat(shapes[number])):
        together, at_once = tuple(alike), max(1, batch // (shape[0] * shape[1]))
        found += [together[start : start + at_once] for start in range(0, len(together), at_once)]
    return found
