"""Manifests of version 1, which version 0.1 wrote: a row for every box, with the checksums of its blocks.

Imports no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

import numpy
from annotated_types import Interval
from pydantic import Field, TypeAdapter

from recipes.checkpoint.boxes import Boxes, Count, Shape
from recipes.checkpoint.manifest import (
    DTYPE_BYTES,
    FORMAT,
    MANIFEST,
    MAX_HEADER_BYTES,
    PLAIN_NAME,
    Chunk,
    Contents,
    Manifest,
    StoredFile,
    StoredTensor,
    tensor_contradictions,
)


@dataclass(frozen=True)
class Part:
    """A box of a tensor: contiguous in one file, in row-major order."""

    file: str
    offset: Count
    """Position of its first byte in the file."""
    bytes: Count
    start: Shape
    shape: Shape
    blocks: tuple[Annotated[str, Field(pattern="^[0-9a-f]{16}$")], ...]
    """xxh3_64 of every Manifest.block_bytes bytes; the last block may be shorter."""


@dataclass(frozen=True)
class Tensor:
    """A tensor, cut into boxes."""

    dtype: str
    shape: Shape
    chunks: tuple[Part, ...]


@dataclass(frozen=True)
class Version1:
    """Everything in a checkpoint."""

    format: str
    version: int
    step: Count | None
    state: dict[str, Any]
    block_bytes: Annotated[int, Interval(ge=16, le=1 << 26)]
    files: dict[str, StoredFile]
    tensors: dict[str, Tensor]


ADAPTER = TypeAdapter(Version1)


def converted(old: Version1) -> Manifest:
    """The checkpoint as the present version describes it; the contents of its files are those of the old manifest."""
    shards = [name for name, file in old.files.items() if file.header_bytes]
    number = {name: place for place, name in enumerate(shards)}
    parts: dict[str, list[tuple[str, Part]]] = {name: [] for name in shards}
    for name, tensor in old.tensors.items():
        for part in tensor.chunks:
            parts[part.file].append((name, part))
    contents = {}
    for name, inside in parts.items():
        inside.sort(key=lambda pair: pair[1].offset)
        chunks, sums = [], b""
        for tensor_name, part in inside:
            chunk = Chunk(name, part.offset, part.bytes, part.start, part.shape, len(sums) // 8)
            chunks.append((tensor_name, chunk))
            sums += b"".join(map(bytes.fromhex, part.blocks))
        contents[name] = Contents(chunks, len(sums) // 8, sums)
    tensors = {name: _converted(tensor, number) for name, tensor in old.tensors.items()}
    return Manifest(
        old.format, old.version, old.step, old.state, old.block_bytes, old.files, tensors, explicit=contents
    )


def _converted(tensor: Tensor, number: Mapping[str, int]) -> StoredTensor:
    """number: of each shard, by its name."""
    boxes = (Boxes(number[part.file], part.start, part.shape) for part in tensor.chunks)
    return StoredTensor(tensor.dtype, tensor.shape, tuple(boxes))


def contradictions(manifest: Version1) -> Iterator[str]:
    """Everything that could make a reader go outside of the folder, of a file or of a tensor."""
    if (manifest.format, manifest.version) != (FORMAT, 1):
        yield f"its format is {manifest.format[:50]!r}, version {manifest.version}"
    if manifest.block_bytes % 16:
        yield f"blocks of {manifest.block_bytes} bytes would cut elements"
    for name, file in manifest.files.items():
        if not PLAIN_NAME.fullmatch(name) or name == MANIFEST:
            yield f"a file called {name[:200]!r}"
        if file.header_bytes > file.bytes:
            yield f"{name} has a header larger than itself"
    for name, tensor in manifest.tensors.items():
        yield from _tensor_contradictions(name[:200], tensor, manifest)
    yield from _header_contradictions(manifest)
    ends = {name: file.header_bytes for name, file in manifest.files.items()}
    in_files = sorted(
        (chunk.file, chunk.offset, chunk.bytes) for tensor in manifest.tensors.values() for chunk in tensor.chunks
    )
    for name, offset, size in in_files:
        if offset != ends[name]:
            yield f"in {name}, a part begins at byte {offset} instead of {ends[name]}"
        ends[name] = offset + size
    for name, file in manifest.files.items():
        if file.header_bytes and ends[name] != file.bytes:
            yield f"{name} has {file.bytes} bytes, but its tensors end at {ends[name]}"


def _header_contradictions(manifest: Version1) -> Iterator[str]:
    """Headers that are much larger than JSON that names each tensor of the file once; they are not read."""
    likely = dict.fromkeys(manifest.files, 1000)
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            likely[chunk.file] += 12 * len(name) + 2000
    for name, file in manifest.files.items():
        if file.header_bytes > min(likely[name], MAX_HEADER_BYTES):
            yield f"{name} has a header of {file.header_bytes} bytes, more than its tensors need"


def _tensor_contradictions(name: str, tensor: Tensor, manifest: Version1) -> Iterator[str]:
    for chunk in tensor.chunks:
        if chunk.file not in manifest.files or not manifest.files[chunk.file].header_bytes:
            yield f"{name} is in {chunk.file[:200]!r}, which is not a shard"
            return
    yield from tensor_contradictions(name, _converted(tensor, dict.fromkeys(manifest.files, 0)), numpy.ones(1, bool))
    for chunk in tensor.chunks:
        if chunk.bytes != prod(chunk.shape) * DTYPE_BYTES[tensor.dtype] or not chunk.bytes:
            yield f"{name} has {chunk.bytes} bytes for a part of the shape {list(chunk.shape)}"
        elif len(chunk.blocks) != -(-chunk.bytes // manifest.block_bytes):
            yield f"{name} has {len(chunk.blocks)} checksums for {chunk.bytes} bytes"
