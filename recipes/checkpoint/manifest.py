"""manifest.json: what a checkpoint consists of, down to the bytes.

Written last. It is checked before it is trusted: the disk may be damaged or the source hostile. Imports no torch.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Annotated, Any

import xxhash
from annotated_types import Interval, MaxLen
from pydantic import TypeAdapter, ValidationError

from parallel.errors import UserError

MANIFEST = "manifest.json"
FORMAT, VERSION = "shardwright checkpoint", 1
MAX_MANIFEST_BYTES = 1 << 30
"""A larger manifest is neither written nor read. A chunk takes 165 bytes, a block 19. The largest model in
models/sizes.py, 405 billion parameters, has 1137 tensors with two moments each, 4.9 TB in all; sharded over 512
processes, that makes 288 MB and 22 MB; over 1,800, as much as this. (Replicas add nothing.)"""
BYTES_PER_VALUE = 8
"""A manifest has at least this much text per value; those that runs write have 12. A text of nothing but small values
would take thirty times its size in memory."""
MAX_HEADER_BYTES = 100_000_000
"""The largest header of a shard that the safetensors library reads."""
MAX_TOGETHER = 100
"""The most boxes of a tensor that are compared pairwise, if no straight cut separates them."""
BLOCK_BYTES = 4 << 20
"""Bytes per checksum: how much must be read to verify the smallest part of a tensor."""
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""The element types that a checkpoint may hold, by their names in safetensors."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
"""The allowed names of files in a checkpoint: none leads out of the folder."""


class Damage(UserError):
    """A checkpoint is not as it was written. The text names the file, and the tensor and bytes where possible."""


class Missing(Damage):
    """A file is missing or has the wrong size. Another node may see it as it should be."""


class OlderFormat(Damage):
    """A checkpoint in the format of torch.distributed.checkpoint, which older versions wrote."""


Count = Annotated[int, Interval(ge=0, lt=2**62)]
Shape = Annotated[tuple[Count, ...], MaxLen(16)]


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


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: contiguous in one file, in row-major order."""

    file: str
    offset: Count
    """Position of its first byte in the file."""
    bytes: Count
    start: Shape
    """Index of its first element in the tensor."""
    shape: Shape
    blocks: tuple[str, ...]
    """xxh3_64 of every Manifest.block_bytes bytes; the last block may be shorter."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, cut into boxes."""

    dtype: str
    """Key of DTYPE_BYTES."""
    shape: Shape
    chunks: tuple[Chunk, ...]


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

    @property
    def bytes(self) -> int:
        """Total size of all files except the manifest."""
        return sum(file.bytes for file in self.files.values())

    def shards(self) -> dict[str, list[tuple[str, Chunk]]]:
        """Shard -> (tensor, chunk) of all its chunks, in the order of the file."""
        found: dict[str, list[tuple[str, Chunk]]] = {name: [] for name, file in self.files.items() if file.header_bytes}
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                found[chunk.file].append((name, chunk))
        for chunks in found.values():
            chunks.sort(key=lambda pair: pair[1].offset)
        return found


_ADAPTER = TypeAdapter(Manifest)
_TAIL = re.compile(rb',"checksum":"([0-9a-f]{32})"\}\n')
_TAIL_BYTES = 48
_HEAD = re.compile(rb'\{"format":"%s","version":(\d{1,9}),' % FORMAT.encode())


def encode(manifest: Manifest) -> bytes:
    """The contents of manifest.json: JSON that ends with a checksum of everything before it."""
    body = _ADAPTER.dump_json(manifest)[:-1]
    if len(body) + _TAIL_BYTES > MAX_MANIFEST_BYTES:
        raise UserError(f"the manifest has {len(body)} bytes, more than the format allows; save from fewer processes")
    return body + f',"checksum":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def decode(text: bytes, *, where: Path) -> Manifest:
    """The manifest with these contents. where: its path, for messages.

    Raises Damage if it is not exactly what encode() wrote, or is inconsistent; UserError if a newer version wrote it.
    """
    body, tail = text[:-_TAIL_BYTES], _TAIL.fullmatch(text[-_TAIL_BYTES:])
    if not tail:
        raise Damage(f"{where} is damaged: it is cut off, or is not a manifest")
    if xxhash.xxh3_128_hexdigest(body) != tail[1].decode():
        raise Damage(f"{where} is damaged: its checksum does not match (bytes 0 to {len(body)})")
    if (head := _HEAD.match(body)) and int(head[1]) > VERSION:
        raise UserError(
            f"{where} has version {int(head[1])} of the format, but this program reads {VERSION}; use a newer one"
        )
    if sum(map(body.count, (b",", b"[", b"{"))) > len(body) // BYTES_PER_VALUE + 10_000:
        raise Damage(f"{where} is damaged: it does not describe a checkpoint (too many values for {len(body)} bytes)")
    try:
        manifest = _ADAPTER.validate_json(body + b"}", strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:200]
        raise Damage(f"{where} is damaged: it does not describe a checkpoint ({what})") from None
    if problem := next(_contradictions(manifest), None):
        raise Damage(f"{where} is damaged: {problem}")
    return manifest


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Everything that could make a reader go outside of the folder, of a file or of a tensor."""
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
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


def _header_contradictions(manifest: Manifest) -> Iterator[str]:
    """Headers that are much larger than JSON that names each tensor of the file once; they are not read."""
    likely = dict.fromkeys(manifest.files, 1000)
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            likely[chunk.file] += 12 * len(name) + 2000
    for name, file in manifest.files.items():
        if file.header_bytes > min(likely[name], MAX_HEADER_BYTES):
            yield f"{name} has a header of {file.header_bytes} bytes, more than its tensors need"


def _tensor_contradictions(name: str, tensor: StoredTensor, manifest: Manifest) -> Iterator[str]:
    if not name or not name.isprintable():
        yield f"a tensor called {name!r}"
    if tensor.dtype not in DTYPE_BYTES:
        yield f"{name} has elements of type {tensor.dtype[:50]!r}"
        return
    if prod(tensor.shape) >= 2**62:
        yield f"{name} has the shape {list(tensor.shape)}"
    for chunk in tensor.chunks:
        if chunk.file not in manifest.files or not manifest.files[chunk.file].header_bytes:
            yield f"{name} is in {chunk.file[:200]!r}, which is not a shard"
            return
        if len(chunk.start) != len(tensor.shape) or len(chunk.shape) != len(tensor.shape):
            yield f"{name} has a part with another number of dimensions"
            return
        sides = zip(chunk.start, chunk.shape, tensor.shape, strict=True)
        if any(first + length > whole for first, length, whole in sides):
            yield f"{name} has a part outside of its shape"
        if chunk.bytes != prod(chunk.shape) * DTYPE_BYTES[tensor.dtype] or not chunk.bytes:
            yield f"{name} has {chunk.bytes} bytes for a part of the shape {list(chunk.shape)}"
        elif len(chunk.blocks) != -(-chunk.bytes // manifest.block_bytes):
            yield f"{name} has {len(chunk.blocks)} checksums for {chunk.bytes} bytes"
    if sum(prod(chunk.shape) for chunk in tensor.chunks) != prod(tensor.shape) or _overlap(tensor.chunks):
        yield f"the parts of {name} do not make up the shape {list(tensor.shape)}"


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Whether two boxes share an element, or too many boxes are laid out in a way that no run cuts a tensor.

    Boxes are split into groups by straight cuts, along one dimension after the other. If a tensor is cut into rows,
    columns or both, this separates all boxes. The boxes that remain together are compared pairwise, and must be few.
    """
    if not chunks or not chunks[0].shape:
        return len(chunks) > 1
    together = [list(chunks)]
    for axis in [*range(len(chunks[0].shape))] * 2:
        together = [part for group in together for part in _apart(group, axis) if len(part) > 1]
    return any(len(group) > MAX_TOGETHER or _any_two_meet(group) for group in together)


def _apart(chunks: list[Chunk], axis: int) -> Iterator[list[Chunk]]:
    """Groups of boxes that do not overlap on this axis."""
    group: list[Chunk] = []
    end = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.start[axis]):
        if group and chunk.start[axis] >= end:
            yield group
            group = []
        group.append(chunk)
        end = max(end, chunk.start[axis] + chunk.shape[axis])
    yield group


def _any_two_meet(chunks: list[Chunk]) -> bool:
    for one, other in combinations(chunks, 2):
        sides = zip(one.start, one.shape, other.start, other.shape, strict=True)
        if all(a < b + length_b and b < a + length_a for a, length_a, b, length_b in sides):
            return True
    return False
