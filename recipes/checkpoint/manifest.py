"""manifest.json: what a checkpoint consists of, down to the bytes. Imports no torch.

Written last, it makes a folder a checkpoint. Nothing it says is believed before it was checked: it may come from a
damaged disk or from a stranger.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
"""Neither written nor read into memory beyond that.

A chunk takes 165 bytes, a block 19. The largest model that models/sizes.py knows, 405 billion parameters, has 1137
tensors with two moments each, 4.9 TB in all; sharded over 512 processes, that makes 288 MB and 22 MB; over 1,800, as
much as this. (Replicas add nothing.)
"""
BYTES_PER_VALUE = 8
"""How much text there is at least to each value of a manifest, 12 where a run writes it: a text of nothing but small
values would take thirty times its size in memory."""
MAX_HEADER_BYTES = 100_000_000
"""Of a shard; the safetensors library reads no larger ones."""
MAX_TOGETHER = 100
"""Boxes of a tensor that are compared each with each, where no straight cut parts them."""
BLOCK_BYTES = 4 << 20
"""Bytes under one checksum: as much as must be read to trust the smallest part of a tensor."""
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""The element types, by safetensors' names, that a checkpoint may hold."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
"""What a file of a checkpoint may be called: nothing that leads out of the folder."""

Count = Annotated[int, Interval(ge=0, lt=2**62)]
Shape = Annotated[tuple[Count, ...], MaxLen(16)]


class Damage(UserError):
    """A checkpoint is not what was once written; the text names the file, and tensor and bytes where it can."""


class Unreadable(Damage):
    """The disk, or the network before it, gives a file's bytes only with an error: they may be well all the same."""


class OlderFormat(Damage):
    """Not a checkpoint of this format, but one of torch.distributed.checkpoint, which was ours once."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint."""

    bytes: Count
    checksum: str
    """xxh3_128 of all of it, as `xxhsum -H2` prints it."""
    header_bytes: Count = 0
    """Of a shard: what precedes the first tensor's bytes."""
    header_checksum: str = ""
    """xxh3_64 of the header."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, in row-major order in one piece of one file."""

    file: str
    offset: Count
    """Of its first byte in the file."""
    bytes: Count
    start: Shape
    """Of its first element in the tensor."""
    shape: Shape
    blocks: tuple[str, ...]
    """xxh3_64 of each run of Manifest.block_bytes bytes; the last one may be shorter."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: the boxes it was cut into."""

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
    """Optimizer steps done; None for weights that come from elsewhere."""
    state: dict[str, Any]
    """What is no tensor, as plain JSON: the progress of the run, the optimizer's groups."""
    block_bytes: Annotated[int, Interval(ge=16, le=1 << 26)]
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(file.bytes for file in self.files.values())

    def shards(self) -> dict[str, list[tuple[str, Chunk]]]:
        """Shard -> (tensor, chunk) of everything in it, in the order of the file."""
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
    """The text of manifest.json: JSON that ends with a checksum of everything before it."""
    body = _ADAPTER.dump_json(manifest)[:-1]
    if len(body) + _TAIL_BYTES > MAX_MANIFEST_BYTES:
        raise UserError(f"the manifest has {len(body)} bytes, more than the format allows; shard over fewer processes")
    return body + f',"checksum":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def decode(text: bytes, *, where: Path) -> Manifest:
    """Raises Damage where this is not, to the bit, a text that encode() wrote, or where it contradicts itself.

    UserError where a newer version of this program wrote it.
    """
    body, tail = text[:-_TAIL_BYTES], _TAIL.fullmatch(text[-_TAIL_BYTES:])
    if not tail:
        raise Damage(f"{where} is damaged: it is cut off, or not a manifest at all")
    if xxhash.xxh3_128_hexdigest(body) != tail[1].decode():
        raise Damage(f"{where} is damaged: its checksum is another (bytes 0 to {len(body)})")
    if (head := _HEAD.match(body)) and int(head[1]) > VERSION:
        raise UserError(
            f"{where} has version {int(head[1])} of the format, this program reads {VERSION}; use a newer one"
        )
    if sum(map(body.count, (b",", b"[", b"{"))) > len(body) // BYTES_PER_VALUE + 10_000:
        raise Damage(f"{where} is damaged: it does not describe a checkpoint (too many values for {len(body)} bytes)")
    try:
        manifest = _ADAPTER.validate_json(body + b"}", strict=True)
    except ValidationError as error:
        raise Damage(f"{where} is damaged: it does not describe a checkpoint ({_first_line(error)})") from None
    if problem := next(_contradictions(manifest), None):
        raise Damage(f"{where} is damaged: {problem}")
    return manifest


def _first_line(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:200]


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Everything that could lead a reader astray: outside of the folder, of a file, of a tensor."""
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        yield f"it is called {manifest.format[:50]!r}, version {manifest.version}"
    if manifest.block_bytes % 16:
        yield "blocks of a size that would cut elements"
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
            yield f"in {name}, what should begin at byte {ends[name]} begins at {offset}"
        ends[name] = offset + size
    for name, file in manifest.files.items():
        if file.header_bytes and ends[name] != file.bytes:
            yield f"{name} has {file.bytes} bytes, but its tensors end at {ends[name]}"


def _header_contradictions(manifest: Manifest) -> Iterator[str]:
    """A header names each tensor of its file once, in JSON: much more than that is not read into memory."""
    likely = dict.fromkeys(manifest.files, 1000)
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            likely[chunk.file] += 12 * len(name) + 2000
    for name, file in manifest.files.items():
        if file.header_bytes > min(likely[name], MAX_HEADER_BYTES):
            yield f"{name} has a header of {file.header_bytes} bytes, which its tensors do not need"


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
            yield f"{name} is in {chunk.file[:200]!r}, which is none of its shards"
            return
        if len(chunk.start) != len(tensor.shape) or len(chunk.shape) != len(tensor.shape):
            yield f"{name} has a part with another number of dimensions"
            return
        sides = zip(chunk.start, chunk.shape, tensor.shape, strict=True)
        if any(first + length > whole for first, length, whole in sides):
            yield f"{name} has a part outside of itself"
        if chunk.bytes != prod(chunk.shape) * DTYPE_BYTES[tensor.dtype] or not chunk.bytes:
            yield f"{name} has {chunk.bytes} bytes for a part of the shape {list(chunk.shape)}"
        elif len(chunk.blocks) != -(-chunk.bytes // manifest.block_bytes):
            yield f"{name} has {len(chunk.blocks)} checksums for {chunk.bytes} bytes"
    if sum(prod(chunk.shape) for chunk in tensor.chunks) != prod(tensor.shape) or _overlap(tensor.chunks):
        yield f"the parts of {name} do not make up the shape {list(tensor.shape)}"


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Whether two boxes share an element, or lie as no run cuts them.

    Parting what lies apart, along one dimension after the other, leaves no two boxes together wherever tensors are cut
    into rows, columns or both. Only what stays together is compared box by box, and must be little.
    """
    if not chunks or not chunks[0].shape:
        return len(chunks) > 1
    together = [list(chunks)]
    for axis in [*range(len(chunks[0].shape))] * 2:
        together = [part for group in together for part in _apart(group, axis) if len(part) > 1]
    return any(len(group) > MAX_TOGETHER or _any_two_meet(group) for group in together)


def _apart(chunks: list[Chunk], axis: int) -> Iterator[list[Chunk]]:
    """Groups of boxes that share no place on this axis."""
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
    for number, one in enumerate(chunks):
        for other in chunks[:number]:
            sides = zip(one.start, one.shape, other.start, other.shape, strict=True)
            if all(a < b + length_b and b < a + length_a for a, length_a, b, length_b in sides):
                return True
    return False
