"""manifest.json: what a checkpoint consists of, down to the bytes.

Written last. It is checked before it is trusted: the disk may be damaged or the source hostile. Imports no torch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Annotated, Any, NamedTuple

import numpy
import xxhash
from annotated_types import Interval
from pydantic import Field, TypeAdapter

from parallel.errors import UserError
from recipes.checkpoint.boxes import Boxes, Count, Shape, rows_overlap

MANIFEST = "manifest.json"
FORMAT, VERSION = "shardwright checkpoint", 2
MAX_MANIFEST_BYTES = 100_000_000
"""A larger manifest is not written. A shard takes 230 bytes and a row of boxes 85: 4 MB and 2 MB for the largest model
in models/sizes.py, 1137 tensors with two moments each, in 16,384 shards."""
MAX_VERSION_1_BYTES = 1 << 30
"""A larger one is not read. Version 1 had a line of 165 bytes for each box, and 19 for each block."""
MAX_HEADER_BYTES = 100_000_000
"""The largest header of a shard that the safetensors library reads."""
MAX_SHARDS = 1_000_000
SHARDS_PER_FOLDER = 1000
"""Shards of each folder, if there are more shards than that."""
SUM_BYTES = 8
"""Size of a block's checksum in the last tensor of a shard."""
BLOCK_BYTES = 4 << 20
"""Bytes per checksum: how much must be read to verify the smallest part of a tensor."""
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""The element types that a checkpoint may hold, by their names in safetensors."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
"""The allowed names of files in a checkpoint: none leads out of the folder."""
SHARD_NAME = re.compile(r"(?:shards-[0-9]{5}/)?shard-([0-9]{5,7})-of-([0-9]{5,7})\.safetensors")


class Damage(UserError):
    """A checkpoint is not as it was written. The text names the file, and the tensor and bytes where possible."""


class Missing(Damage):
    """A file is missing or has the wrong size. Another node may see it as it should be."""


def shard_name(number: int, shards: int) -> str:
    """The file of a checkpoint that this process of so many writes."""
    name = f"shard-{number:05d}-of-{shards:05d}.safetensors"
    return name if shards <= SHARDS_PER_FOLDER else f"shards-{number // SHARDS_PER_FOLDER:05d}/{name}"


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint."""

    bytes: Count
    checksum: str
    """xxh3_128 of the file, as `xxhsum -H2` prints it."""
    header_bytes: Count = 0
    """Bytes of a shard before its first tensor; 0 for other files."""
    header_checksum: str = ""
    """xxh3_64 of the header."""
    sums_checksum: str = ""
    """xxh3_64 of a shard's last tensor, the checksums of its blocks; "" in version 1, where the manifest has them."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: contiguous in one file, in row-major order."""

    file: str
    offset: int
    """Position of its first byte in the file."""
    bytes: int
    start: tuple[int, ...]
    """Index of its first element in the tensor."""
    shape: tuple[int, ...]
    first_block: int
    """Index of the checksum of its first block among those of the shard. Every Manifest.block_bytes bytes are a block;
    the last one of a box may be shorter."""


class Contents(NamedTuple):
    """What is in a shard."""

    chunks: list[tuple[str, Chunk]]
    """(tensor, chunk), in the order of the file."""
    blocks: int
    sums: bytes
    """xxh3_64 of every block; b"" if the shard itself has them."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, cut into boxes."""

    dtype: str
    """Key of DTYPE_BYTES."""
    shape: Shape
    boxes: tuple[Boxes, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint."""

    format: str
    version: int
    step: Count | None
    """Optimizer steps done; None for imported weights."""
    state: dict[str, Any]
    """Everything that is not a tensor, as plain JSON: the progress of the run, the optimizer's groups."""
    block_bytes: Annotated[int, Interval(ge=16, le=1 << 26)]
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    explicit: Annotated[dict[str, Any], Field(exclude=True, max_length=0)] = field(default_factory=dict)
    """Shard -> Contents where they do not follow from the tensors: in version 1. Not in the file."""

    @property
    def bytes(self) -> int:
        """Total size of all files except the manifest."""
        return sum(file.bytes for file in self.files.values())

    @cached_property
    def shards(self) -> dict[int, str]:
        """The shards by number."""
        names = [name for name, file in self.files.items() if file.header_bytes]
        if self.version == 1:
            return dict(enumerate(names))
        return {int(found[1]): name for name in names if (found := SHARD_NAME.fullmatch(name))}

    def contents(self, number: int) -> Contents:
        """What is in the shard of this number: in the order of the tensors, but the widest elements first."""
        name = self.shards[number]
        if name in self.explicit:
            contents: Contents = self.explicit[name]
            return contents
        offset, block, chunks = self.files[name].header_bytes, 0, []
        for tensor, row in self._rows_in(number):
            size = prod(row.shape) * DTYPE_BYTES[self.tensors[tensor].dtype]
            start = row.start_of(row.number_in(number) or 0)
            chunks.append((tensor, Chunk(name, offset, size, start, row.shape, block)))
            offset, block = offset + size, block - (-size // self.block_bytes)
        return Contents(chunks, block, b"")

    def _rows_in(self, number: int) -> Iterator[tuple[str, Boxes]]:
        """The tensors that have a box in this shard, in its order, and the row of boxes that it belongs to."""
        rows, names = self._rows
        away = number - rows[:, 0]
        for place in numpy.flatnonzero((away >= 0) & (away % rows[:, 1] == 0) & (away // rows[:, 1] < rows[:, 2])):
            name, index = names[place]
            yield name, self.tensors[name].boxes[index]

    @cached_property
    def _rows(self) -> tuple[Any, list[tuple[str, int]]]:
        """First file, distance and number of all rows of boxes, in the order of shards; and which they are."""
        ordered = sorted(self.tensors, key=lambda name: -DTYPE_BYTES[self.tensors[name].dtype])
        names = [(name, index) for name in ordered for index in range(len(self.tensors[name].boxes))]
        rows = [self.tensors[name].boxes[index] for name, index in names]
        table = [(row.file, row.stride or 1, row.count) for row in rows]
        return numpy.array(table, numpy.int64).reshape(-1, 3), names


ADAPTER = TypeAdapter(Manifest)
TAIL_BYTES = 48


def encode(manifest: Manifest) -> bytes:
    """The contents of manifest.json: JSON that ends with a checksum of everything before it."""
    body = ADAPTER.dump_json(manifest, exclude_defaults=True)[:-1]
    if len(body) + TAIL_BYTES > MAX_MANIFEST_BYTES:
        raise UserError(f"the manifest has {len(body)} bytes, more than the format allows; save from fewer processes")
    return body + f',"checksum":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def contradictions(manifest: Manifest) -> Iterator[str]:
    """Everything that could make a reader go outside of the folder, of a file or of a tensor."""
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        yield f"its format is {manifest.format[:50]!r}, version {manifest.version}"
    if manifest.block_bytes % 16:
        yield f"blocks of {manifest.block_bytes} bytes would cut elements"
    yield from _file_contradictions(manifest)
    numbers = numpy.zeros(max(manifest.shards, default=-1) + 1, bool)
    numbers[[*manifest.shards]] = True
    total = 0
    for name, tensor in manifest.tensors.items():
        yield from tensor_contradictions(name[:200], tensor, numbers)
        total += prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        if total >= 2**62:
            yield f"{name[:200]} has the shape {list(tensor.shape)}"
    yield from _size_contradictions(manifest, len(numbers))


def _file_contradictions(manifest: Manifest) -> Iterator[str]:
    for name, file in manifest.files.items():
        found = SHARD_NAME.fullmatch(name)
        if not found and (not PLAIN_NAME.fullmatch(name) or name == MANIFEST):
            yield f"a file called {name[:200]!r}"
        if not found and file.header_bytes:
            yield f"a shard called {name[:200]!r}"
        if found and (int(found[1]) >= int(found[2]) or int(found[2]) > MAX_SHARDS or not file.header_bytes):
            yield f"{name} as the name of a file"
        if found and shard_name(int(found[1]), int(found[2])) != name:
            yield f"{name} in the wrong folder"
        if file.header_bytes > file.bytes:
            yield f"{name} has a header larger than itself"
    if len({match[2] for match in map(SHARD_NAME.fullmatch, manifest.files) if match}) > 1:
        yield "shards of saves with different numbers of processes"


def tensor_contradictions(name: str, tensor: StoredTensor, shards: Any) -> Iterator[str]:
    """shards: whether there is a shard of each number."""
    if not name or not name.isprintable():
        yield f"a tensor called {name!r}"
    if tensor.dtype not in DTYPE_BYTES:
        yield f"{name} has elements of type {tensor.dtype[:50]!r}"
        return
    if prod(tensor.shape) >= 2**62:
        yield f"{name} has the shape {list(tensor.shape)}"
    for row in tensor.boxes:
        if problem := row.problem(len(tensor.shape)):
            yield f"{name} has {problem}"
            return
        if any(end > whole for end, whole in zip(row.end, tensor.shape, strict=True)):
            yield f"{name} has a part outside of its shape"
        if not prod(row.shape):
            yield f"{name} has 0 bytes for a part of the shape {list(row.shape)}"
        if row.shards.stop > len(shards) or not shards[row.shards].all():
            yield f"{name} is in one of the shards {row.file} to {row.shards.stop - 1} that is not there"
    if sum(row.count * prod(row.shape) for row in tensor.boxes) != prod(tensor.shape) or rows_overlap(tensor.boxes):
        yield f"the parts of {name} do not make up the shape {list(tensor.shape)}"


def _size_contradictions(manifest: Manifest, shards: int) -> Iterator[str]:
    """Shards whose sizes are not those of their tensors, and headers that are much larger than JSON that names each
    tensor of the file once; they are not read."""
    sizes, likely = numpy.zeros(shards, numpy.int64), numpy.full(shards, 1500, numpy.int64)
    for name, tensor in manifest.tensors.items():
        for row in tensor.boxes:
            size = prod(row.shape) * DTYPE_BYTES[tensor.dtype]
            sizes[row.shards] += size - (-size // manifest.block_bytes) * SUM_BYTES
            likely[row.shards] += 12 * len(name) + 2000
    for number, name in manifest.shards.items():
        file = manifest.files[name]
        if file.header_bytes > min(likely[number], MAX_HEADER_BYTES):
            yield f"{name} has a header of {file.header_bytes} bytes, more than its tensors need"
        if file.header_bytes + sizes[number] != file.bytes:
            yield f"{name} has {file.bytes} bytes, but its tensors end at {file.header_bytes + sizes[number]}"
