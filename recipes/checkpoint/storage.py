"""Converts between tensors, sharded or not, and the files of a checkpoint.

The planners of torch.distributed.checkpoint (DCP), which know every way to shard a tensor, decide what goes where. Only
this folder uses DCP. Its storage is not used, because it pickles.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.tensor import DTensor

from parallel.errors import UserError
from recipes.checkpoint.files import Piece, ShardReader, Written
from recipes.checkpoint.manifest import BLOCK_BYTES, DTYPE_BYTES, FORMAT, VERSION, Chunk, Manifest, StoredTensor
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


def shard_name(rank: int, world_size: int) -> str:
    """The file name of the shard that a process writes."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


@dataclass(frozen=True)
class Plan:
    """Which parts of which tensors this process writes. Valid as long as names, shapes and sharding do not change."""

    pieces: list[Piece]
    """In the order of the shard."""
    layout: dict[str, tuple[str, tuple[int, ...]]]
    """Dtype and shape of every tensor; on rank 0 only."""
    signature: list[Any]
    _items: list[WriteItem]

    def tensors(self, state: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """The current values of the pieces, on their device."""
        planner = _save_planner(state)
        return (cast(Tensor, planner.resolve_data(item)).detach() for item in self._items)


def make_plan(state: Mapping[str, Tensor], *, group: dist.ProcessGroup) -> Plan:
    """Divide the tensors among the processes: every element is written once, replicas share the work. Collective."""
    local = _save_planner(state).create_local_plan()
    main, size = dist.get_rank() == 0, dist.get_world_size()
    plans: list[Any] = [None] * size
    dist.gather_object(local, plans if main else None, group=group)
    layout = {}
    if main:
        plans, metadata = _save_planner(state).create_global_plan(plans)
        layout = {
            name: (CODES[about.properties.dtype], tuple(about.size))
            for name, about in metadata.state_dict_metadata.items()
            if isinstance(about, TensorStorageMetadata)
        }
    own: list[Any] = [None]
    dist.scatter_object_list(own, plans if main else None, group=group)
    pieces = [(_piece(item), item) for item in own[0].items]
    pieces = [(piece, item) for piece, item in pieces if piece.bytes]
    pieces.sort(key=lambda pair: -DTYPE_BYTES[pair[0].dtype])  # widest first: every tensor is aligned to its elements
    return Plan([piece for piece, _ in pieces], layout, signature(state), [item for _, item in pieces])


def signature(state: Mapping[str, Tensor]) -> list[Any]:
    """Everything that a plan depends on."""
    return [
        (name, value.shape, value.dtype, value.placements if isinstance(value, DTensor) else None)
        for name, value in state.items()
    ]


def _save_planner(state: Mapping[str, Tensor]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), None, dist.get_rank() == 0)
    return planner


def _piece(item: WriteItem) -> Piece:
    about = item.tensor_data
    assert about is not None, f"{item.index.fqn} is not a tensor"
    if about.properties.dtype not in CODES:
        raise UserError(f"{item.index.fqn} has elements of type {about.properties.dtype}, which no checkpoint can hold")
    start, shape = tuple(about.chunk.offsets), tuple(about.chunk.sizes)
    return Piece(item.index.fqn, CODES[about.properties.dtype], start, shape, whole=shape == tuple(about.size))


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; not copied if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class HostMemory:
    """Host memory that every save is copied to, so that training can continue while it is written."""

    SEGMENT = 512 << 20
    """Bytes to allocate at a time: torch rounds pinned memory up to a power of two."""

    def __init__(self) -> None:
        self._segments: list[Tensor] = []

    def copy(self, tensors: Sequence[Tensor]) -> list[memoryview]:
        """Copies of the bytes of each tensor, valid until the next call."""
        copies, segment, used, devices = [], 0, 0, set()
        left = sum(-(-tensor.nbytes // 16) * 16 for tensor in tensors)
        for tensor in tensors:
            size = tensor.nbytes
            if segment < len(self._segments) and used + size > len(self._segments[segment]):
                segment, used = segment + 1, 0
            while segment < len(self._segments) and size > len(self._segments[segment]):
                segment += 1
            if segment == len(self._segments):
                pinned = tensor.device.type == "cuda"
                length = max(size, min(left, self.SEGMENT))
                self._segments.append(torch.empty(length, dtype=torch.uint8, pin_memory=pinned))
            place = self._segments[segment][used : used + size]
            # Copied as a tensor, not as bytes: it need not be contiguous.
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            copies.append(place.numpy().data)
            used += -(-size // 16) * 16  # aligns every copy to its elements
            left -= -(-size // 16) * 16
            devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return copies


def assemble(
    step: int | None,
    state: dict[str, Any],
    layout: Mapping[str, tuple[str, tuple[int, ...]]],
    shards: Sequence[Written],
) -> Manifest:
    """The manifest, from what each process wrote."""
    chunks: dict[str, list[Chunk]] = {name: [] for name in layout}
    for _, _, pieces in shards:
        for piece, chunk in pieces:
            chunks[piece.tensor].append(chunk)
    tensors = {
        name: StoredTensor(dtype, shape, tuple(sorted(chunks[name], key=lambda chunk: chunk.start)))
        for name, (dtype, shape) in layout.items()
    }
    return Manifest(FORMAT, VERSION, step, state, BLOCK_BYTES, {name: file for name, file, _ in shards}, tensors)


def read_tensors(path: Path, manifest: Manifest, state: Mapping[str, Tensor]) -> None:
    """Fill these tensors, or this process's shards of them, from a checkpoint, however that was sharded.

    Every byte read is verified. Raises Damage, or UserError if a tensor is missing or has another shape.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    for name, value in state.items():
        stored = manifest.tensors.get(name)
        if stored is None or stored.shape != tuple(value.shape):
            what = "does not hold" if stored is None else f"has the shape {list(stored.shape)} for"
            raise UserError(f"{path} {what} {name}, which has the shape {list(value.shape)} here")
    planner.set_up_planner(dict(state), _metadata(manifest), False)
    by_file: dict[str, list[tuple[Chunk, ReadItem]]] = {}
    chunks = {(name, chunk.start): chunk for name in state for chunk in manifest.tensors[name].chunks}
    # DCP's global plan for loading is the same as the local plans.
    for item in planner.create_local_plan().items:
        assert item.storage_index.offset is not None
        chunk = chunks[item.storage_index.fqn, tuple(item.storage_index.offset)]
        by_file.setdefault(chunk.file, []).append((chunk, item))
    reader = ShardReader(path, manifest)

    def read(name: str) -> None:
        with reader.file(name) as descriptor:
            for chunk, item in sorted(by_file[name], key=lambda pair: pair[0].offset):
                fqn = item.storage_index.fqn
                target = planner.resolve_tensor(item).detach()
                _read_box(reader, descriptor, fqn, DTYPES[manifest.tensors[fqn].dtype], chunk, item, target)

    for name in sorted(by_file):
        patiently(partial(read, name))


def _read_box(
    reader: ShardReader, descriptor: int, name: str, dtype: torch.dtype, chunk: Chunk, item: ReadItem, target: Tensor
) -> None:
    """Read the part of a chunk that this item needs into `target`, which has the shape of that part."""
    start, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    if not target.numel():
        return
    row_elements = prod(chunk.shape[1:])
    first = start[0] * row_elements * dtype.itemsize if start else 0
    rows = torch.Size((lengths[0], *chunk.shape[1:]) if lengths else ())
    if rows == torch.Size(lengths) and target.is_contiguous():
        flat = target.view(-1)
        if target.device.type == "cpu" and target.dtype == dtype:
            reader.read(descriptor, name, chunk, first, flat.view(torch.uint8).numpy().data)
            return
        for piece in flat.split(READ_BYTES // dtype.itemsize):
            values = torch.empty(piece.shape, dtype=dtype)
            reader.read(descriptor, name, chunk, first, raw(values))
            piece.copy_(values)
            first += values.numel() * dtype.itemsize
        return
    # Cut by columns, in the checkpoint or here: read whole rows, and drop what other processes need.
    values = torch.empty(rows, dtype=dtype)
    reader.read(descriptor, name, chunk, first, raw(values))
    for axis, (begin, length) in enumerate(zip(start[1:], lengths[1:], strict=True), 1):
        values = values.narrow(axis, begin, length)
    target.copy_(values)


def _metadata(manifest: Manifest) -> Metadata:
    """The manifest in the form that DCP's planner expects."""
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=DTYPES[tensor.dtype]),
                torch.Size(tensor.shape),
                [ChunkStorageMetadata(torch.Size(chunk.start), torch.Size(chunk.shape)) for chunk in tensor.chunks],
            )
            for name, tensor in manifest.tensors.items()
        }
    )
