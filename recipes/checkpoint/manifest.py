"""manifest.json: what a checkpoint consists of, down to the bytes.

Written last. It is checked before it is trusted: the disk may be damaged or the source hostile. Imports no torch.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Annotated, Any, NamedTuple, cast

import numpy
import xxhash
from annotated_types import Interval, MaxLen, MultipleOf
from pydantic import Field, TypeAdapter

from parallel.errors import UserError

MANIFEST = "manifest.json"
FORMAT, VERSION = "shardwright checkpoint", 2
MAX_MANIFEST_BYTES = 1 << 30
"""A larger one is neither written nor read. A shard takes 230 bytes and a row of boxes 85: 4 MB and 2 MB for the
largest model in models/sizes.py, 1137 tensors with two moments each, in 16,384 shards. Version 1 had a line per box."""
MAX_HEADER_BYTES = 100_000_000
"""The largest header of a shard that the safetensors library reads."""
MAX_ELEMENTS = 1 << 48
"""Of a tensor, so that bytes of shards can be summed in 64 bits."""
SHARDS_PER_FOLDER = 1000
"""Shards of each folder, if there are more shards than that."""
SUM_BYTES = 8
"""Size of a block's checksum in the last tensor of a shard."""
BLOCK_BYTES = 4 << 20
"""Bytes per checksum: how much must be read to verify the smallest part of a tensor."""
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""The element types that a checkpoint may hold, by their names in safetensors."""
SHARD_NAME = re.compile(r"(?:shards-[0-9]{5}/)?shard-([0-9]{5,7})-of-[0-9]{5,7}\.safetensors")
Count = Annotated[int, Interval(ge=0, lt=2**62)]
Shape = Annotated[tuple[Count, ...], MaxLen(16)]
FileName = Annotated[str, Field(pattern=r"^(shards-[0-9]{5}/)?[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$")]
"""None leads out of the folder."""


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
    header_bytes: Annotated[int, Interval(ge=0, le=MAX_HEADER_BYTES)] = 0
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
    block_bytes: Annotated[int, Interval(ge=16, le=1 << 26), MultipleOf(16)]
    files: dict[FileName, StoredFile]
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
        return {int(match[1]): name for name in names if (match := SHARD_NAME.fullmatch(name))}

    def contents(self, number: int) -> Contents:
        """What is in the shard of this number: in the order of the tensors, but the widest elements first."""
        name = self.shards[number]
        if name in self.explicit:
            return cast(Contents, self.explicit[name])
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
"""Of the end of a manifest, with the checksum."""


def encode(manifest: Manifest) -> bytes:
    """The contents of manifest.json: JSON that ends with a checksum of everything before it."""
    body = ADAPTER.dump_json(manifest, exclude_defaults=True)[:-1]
    if len(body) + TAIL_BYTES > MAX_MANIFEST_BYTES:
        raise UserError(f"the manifest has {len(body)} bytes, more than the format allows; save from fewer processes")
    return body + f',"checksum":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def contradictions(manifest: Manifest) -> Iterator[str]:
    """Everything that could make a reader go outside of a file or of a tensor, or leave a part of a tensor unread."""
    there = numpy.zeros(max(manifest.shards, default=-1) + 1, bool)
    there[[*manifest.shards]] = True
    sizes = numpy.zeros(len(there), numpy.int64)
    for name, tensor in manifest.tensors.items():
        if problem := _contradiction(name, tensor, there):
            yield problem
            return
        for row in tensor.boxes:
            size = prod(row.shape) * DTYPE_BYTES[tensor.dtype]
            sums = 0 if manifest.explicit else -(-size // manifest.block_bytes) * SUM_BYTES
            sizes[row.shards] += size + sums
    for number, name in manifest.shards.items():
        file = manifest.files[name]
        if file.header_bytes + sizes[number] != file.bytes:
            yield f"{name} has {file.bytes} bytes, but its tensors end at {file.header_bytes + sizes[number]}"


def _contradiction(name: str, tensor: StoredTensor, there: Any) -> str:
    """there: whether there is a shard of each number."""
    if not name.isprintable():
        return f"a tensor called {name[:200]!r}"
    name = name[:200]
    if tensor.dtype not in DTYPE_BYTES:
        return f"{name} has elements of type {tensor.dtype[:50]!r}"
    for row in tensor.boxes:
        if problem := row.problem(tensor.shape):
            return f"{name} has {problem}"
        if row.shards.stop > len(there) or not there[row.shards].all():
            return f"{name} is in one of the shards {row.file} to {row.shards.stop - 1} that is not there"
    elements = prod(tensor.shape)
    if elements > MAX_ELEMENTS or sum(row.count * prod(row.shape) for row in tensor.boxes) != elements:
        return f"the parts of {name} do not make up the shape {list(tensor.shape)}"
    return ""
