"""Converts between tensors, sharded or not, and the files of a checkpoint.

The storage and the planners of torch.distributed.checkpoint (DCP) are not used: the one pickles, and the others gather
every process's plan on rank 0 and send all of them back.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from parallel.errors import UserError
from recipes.checkpoint.files import OpenShard, Piece, opened
from recipes.checkpoint.manifest import BLOCK_BYTES, FORMAT, VERSION, Chunk, Manifest, StoredFile, StoredTensor
from recipes.checkpoint.plan import Cut, Spread, pieces_of, plan, strides_of
from recipes.files.reading import patiently

PARAMETERS = "model."
"""Prefix of the names of parameters in a checkpoint."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Name in safetensors -> dtype."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
READ_BYTES = 16 * BLOCK_BYTES
"""How many bytes to read at a time when they cannot be read directly into the tensor."""


@dataclass(frozen=True)
class Share:
    """The parts of tensors that each process writes. Valid as long as names, shapes and sharding do not change."""

    pieces: list[Piece]
    """What this process writes, in the order of its shard."""
    stored: dict[str, StoredTensor]
    """All tensors, and the processes that write their boxes."""
    signature: list[Any]
    identity: str
    """Hash that is the same on two processes if they planned the same."""

    def tensors(self, state: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """The current values of the pieces, on their device."""
        return (local(state[piece.tensor]) for piece in self.pieces)


def make_plan(
    state: Mapping[str, Tensor],
    parts: Sequence[tuple[tuple[int, int] | None, Mapping[str, Spread]]],
    *,
    rank: int,
    processes: int,
) -> Share:
    """Divide the tensors among the processes: every element is written once, replicas share the work.

    Every process computes this alone. parts: of the model, (Spread.ranks, tensors) of each; what several have, the
    first one writes. Raises UserError if a tensor is spread in a way that cannot be saved.
    """
    spreads = {name: replace(one, ranks=ranks) for ranks, part in reversed(parts) for name, one in part.items()}
    stored = plan(spreads, processes)
    is_known = spreads_of(state) in [part for _, part in parts]  # else another identity tells all processes
    pieces = pieces_of(stored, rank) if is_known else []
    for piece in pieces:
        if (box := _box(state[piece.tensor])) != (piece.start, piece.shape):
            raise UserError(f"{piece.tensor} holds the box {box} where {(piece.start, piece.shape)} was expected")
    identity = xxhash.xxh3_64_hexdigest(repr((processes, spreads, is_known)).encode())
    return Share(pieces, stored, signature(state), identity)


def spreads_of(state: Mapping[str, Tensor]) -> dict[str, Spread]:
    """How each tensor is spread over the processes that hold it. Raises UserError if no checkpoint can hold it."""
    meshes = {value.device_mesh for value in state.values() if isinstance(value, DTensor)}
    axes = {mesh: strides_of(mesh.mesh.tolist()) for mesh in meshes}
    spreads = {}
    for name, value in state.items():
        if value.dtype not in CODES:
            raise UserError(f"{name} has elements of type {value.dtype}, which no checkpoint can hold")
        cuts = cuts_of(value.placements, axes[value.device_mesh]) if isinstance(value, DTensor) else ()
        spreads[name] = Spread(CODES[value.dtype], tuple(value.shape), cuts)
    return spreads


def cuts_of(placements: Sequence[Placement], axes: Sequence[tuple[int, int]]) -> tuple[Cut, ...]:
    """The cuts by the axes of a mesh, each of which has a number of parts and a distance of their ranks."""
    cuts, strided = [], []
    for (parts, stride), placement in zip(axes, placements, strict=True):
        if isinstance(placement, _StridedShard):  # FSDP's cut of what tensor parallelism has cut before
            strided.append(Cut(placement.dim, parts, stride))
        elif isinstance(placement, Shard):
            cuts.append(Cut(placement.dim, parts, stride))
    return (*cuts, *reversed(strided))


def _box(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and shape of this process's part of a tensor."""
    if not isinstance(value, DTensor):
        return (0,) * value.dim(), tuple(value.shape)
    shape, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    assert tuple(shape) == tuple(local(value).shape), f"{tuple(local(value).shape)} instead of {tuple(shape)}"
    return tuple(start), tuple(shape)


def local(value: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def signature(state: Mapping[str, Tensor]) -> list[Any]:
    """Everything that a plan depends on."""
    return [
        (name, value.shape, value.dtype, value.placements if isinstance(value, DTensor) else None)
        for name, value in state.items()
    ]


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; not copied if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class HostCopies:
    """Host memory that every save is copied to, so that training can continue while it is written."""

    SEGMENT = 512 << 20
    """Bytes to allocate at a time: torch rounds pinned memory up to a power of two."""

    def __init__(self) -> None:
        self._segments: list[Tensor] = []
        self._thread: threading.Thread | None = None

    def allocate(self, tensors: Sequence[Tensor]) -> None:
        """Allocate on a thread what copy() will need: the first save would stand still for several GB of pinned memory.

        If there is not enough, copy() says so.
        """

        def places() -> None:
            with suppress(Exception):
                self._places(tensors)

        self._thread = threading.Thread(target=places)
        self._thread.start()

    def copy(self, tensors: Sequence[Tensor]) -> list[memoryview]:
        """Copies of the bytes of each tensor, valid until the next call."""
        if self._thread is not None:
            self._thread.join()
        copies, devices = [], {tensor.device for tensor in tensors}
        for tensor, place in zip(tensors, self._places(tensors), strict=True):
            # Copied as a tensor, not as bytes: it need not be contiguous.
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            copies.append(place.numpy().data)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return copies

    def _places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The bytes for each tensor, in segments that are there or allocated now."""
        places, lengths = [], list[int]()  # (segment, offset) of each tensor; the bytes of the segments
        for tensor in tensors:
            size = -(-tensor.nbytes // 16) * 16  # aligns every copy to its elements
            if not lengths or lengths[-1] + size > self.SEGMENT:
                lengths.append(0)
            places.append((len(lengths) - 1, lengths[-1]))
            lengths[-1] += size
        if lengths != [len(segment) for segment in self._segments]:
            pinned = any(tensor.device.type == "cuda" for tensor in tensors)
            self._segments = []  # freed before others are allocated
            self._segments += [torch.empty(length, dtype=torch.uint8, pin_memory=pinned) for length in lengths]
        return [
            self._segments[segment][offset : offset + tensor.nbytes]
            for tensor, (segment, offset) in zip(tensors, places, strict=True)
        ]


def assemble(
    step: int | None, state: dict[str, Any], stored: Mapping[str, StoredTensor], files: Mapping[str, StoredFile]
) -> Manifest:
    """The manifest, from the plan and what each process wrote."""
    return Manifest(FORMAT, VERSION, step, state, BLOCK_BYTES, dict(sorted(files.items())), dict(stored))


class BoxRead(NamedTuple):
    """What this process reads of a box."""

    tensor: str
    box: tuple[int, ...]
    """The start of the box in the tensor."""
    start: tuple[int, ...]
    """The start of what is read, in the box."""
    target: Tensor
    """The values to fill."""


def read_tensors(path: Path, manifest: Manifest, state: Mapping[str, Tensor]) -> None:
    """Fill these tensors, or this process's shards of them, from a checkpoint, however that was sharded.

    Every byte read is verified. Raises Damage, or UserError if a tensor is missing or has another shape.
    """
    wanted: dict[int, list[BoxRead]] = {}
    for name, value in state.items():
        stored = manifest.tensors.get(name)
        if stored is None or stored.shape != tuple(value.shape):
            what = "does not hold" if stored is None else f"has the shape {list(stored.shape)} for"
            raise UserError(f"{path} {what} {name}, which has the shape {list(value.shape)} here")
        for shard, part in parts_of(name, stored, *_box(value), local(value)):
            wanted.setdefault(shard, []).append(part)

    def read(number: int) -> None:
        contents = manifest.contents(number)
        chunks = {(tensor, chunk.start): chunk for tensor, chunk in contents.chunks}
        parts = [(chunks[part.tensor, part.box], part) for part in wanted[number]]
        name = manifest.shards[number]
        with opened(path / name) as descriptor:
            shard = OpenShard(path, manifest, name, contents, descriptor)
            for chunk, part in sorted(parts, key=lambda pair: pair[0].offset):
                _read_box(shard, DTYPES[manifest.tensors[part.tensor].dtype], chunk, part)

    for number in sorted(wanted):
        patiently(partial(read, number))


def parts_of(
    name: str, stored: StoredTensor, start: tuple[int, ...], shape: tuple[int, ...], target: Tensor
) -> Iterator[tuple[int, BoxRead]]:
    """(number of the shard, part) of everything stored that meets this box of a tensor. target: its values."""
    if not prod(shape):
        return
    for row in stored.boxes:
        for number in row.meeting(start, shape):
            box, view, inside = row.start_of(number), target, []
            for axis, (begin, length) in enumerate(zip(box, row.shape, strict=True)):
                low, high = max(begin, start[axis]), min(begin + length, start[axis] + shape[axis])
                view = view.narrow(axis, low - start[axis], high - low)
                inside.append(low - begin)
            yield row.file + number * row.stride, BoxRead(name, box, tuple(inside), view)


def _read_box(shard: OpenShard, dtype: torch.dtype, chunk: Chunk, part: BoxRead) -> None:
    """Read what this part needs of a chunk."""
    target, lengths = part.target, tuple(part.target.shape)
    first = part.start[0] * prod(chunk.shape[1:]) * dtype.itemsize if part.start else 0
    rows = (lengths[0], *chunk.shape[1:]) if lengths else ()
    if rows == lengths and target.is_contiguous():
        flat = target.view(-1)
        if target.device.type == "cpu" and target.dtype == dtype:
            shard.read(part.tensor, chunk, first, flat.view(torch.uint8).numpy().data)
            return
        for piece in flat.split(READ_BYTES // dtype.itemsize):
            values = torch.empty(piece.shape, dtype=dtype)
            shard.read(part.tensor, chunk, first, raw(values))
            piece.copy_(values)
            first += values.numel() * dtype.itemsize
        return
    # Cut by columns, in the checkpoint or here: read whole rows, and drop what other processes need.
    values = torch.empty(rows, dtype=dtype)
    shard.read(part.tensor, chunk, first, raw(values))
    for axis, (begin, length) in enumerate(zip(part.start[1:], lengths[1:], strict=True), 1):
        values = values.narrow(axis, begin, length)
    target.copy_(values)
