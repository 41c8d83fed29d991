"""The state of a large model in training, and what so many ranks would store of it: inputs for the plan of a save."""

from math import prod

import numpy

from models.hf import layout_of
from models.sizes import SIZES
from recipes.checkpoint.manifest import (
    BLOCK_BYTES,
    DTYPE_BYTES,
    FORMAT,
    SUM_BYTES,
    VERSION,
    Manifest,
    StoredFile,
    StoredTensor,
    shard_name,
)
from recipes.checkpoint.plan import Cut, Spread, plan


def spreads_of(model: str, *, shard: int) -> dict[str, Spread]:
    """The tensors of a model in training, cut into so many parts by neighbouring ranks."""
    found = {}
    for name, stored in layout_of(SIZES[model]).tensors.items():
        cut = Spread("F32", stored.shape, (Cut(0, shard, 1),))
        found[f"model.{name}"] = cut
        found |= {f"optimizer.{name}.{kind}": cut for kind in ("exp_avg", "exp_avg_sq")}
        found[f"optimizer.{name}.step"] = Spread("F32", ())
    return found


def stored_by(tensors: dict[str, Spread], ranks: int) -> Manifest:
    """The manifest of what so many ranks would write."""
    stored = plan(tensors, ranks)
    sizes, pieces = numpy.zeros(ranks, numpy.int64), numpy.zeros(ranks, numpy.int64)
    for tensor in stored.values():
        for row in tensor.boxes:
            size = prod(row.shape) * DTYPE_BYTES[tensor.dtype]
            sizes[row.shards] += size - (-size // BLOCK_BYTES) * SUM_BYTES
            pieces[row.shards] += 1
    files = {}
    for rank in map(int, numpy.flatnonzero(pieces)):
        header = 8 + 100 * int(pieces[rank])
        size, short = header + int(sizes[rank]), f"{rank:016x}"
        files[shard_name(rank, ranks)] = StoredFile(size, f"{rank:032x}", header, short, short[::-1])
    return Manifest(FORMAT, VERSION, 1, {}, BLOCK_BYTES, files, stored)


def opened(stored: dict[str, StoredTensor], tensors: dict[str, Spread], *, rank: int) -> int:
    """How many shards a rank opens to read its part of these tensors."""
    found: set[int] = set()
    for name, about in tensors.items():
        start, shape = _box_of(about, rank)
        for row in stored[name].boxes if prod(shape) else ():
            found.update(row.file + number * row.stride for number in row.meeting(start, shape))
    return len(found)


def _box_of(about: Spread, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and shape of the box that a process holds."""
    start, shape = [0] * len(about.shape), list(about.shape)
    for dimension, parts, stride in about.cuts:
        each = -(-shape[dimension] // parts)
        begin = min(rank // stride % parts * each, shape[dimension])
        start[dimension] += begin
        shape[dimension] = min(each, shape[dimension] - begin)
    return tuple(start), tuple(shape)
