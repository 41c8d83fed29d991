"""The files of a checkpoint: written with checksums and synced to the disk, read back with every byte verified.

A shard is a safetensors file (https://huggingface.co/docs/safetensors): a length, a JSON header, raw little-endian
bytes. Its tensors are the boxes that one process wrote. Imports no torch.
"""

import errno
import json
import os
import re
import stat
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy
import xxhash

from parallel.errors import TemporaryError, UserError
from recipes.checkpoint.manifest import (
    ADAPTER,
    BLOCK_BYTES,
    DTYPE_BYTES,
    FORMAT,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SUM_BYTES,
    TAIL_BYTES,
    VERSION,
    Chunk,
    Contents,
    Damage,
    Manifest,
    Missing,
    StoredFile,
    contradictions,
    encode,
)
from recipes.files.atomic import naming, sync_descriptor, sync_folder
from recipes.files.reading import patiently

AtHand = Callable[[Path], AbstractContextManager[object]]
"""What brings the contents of a shard here for a while."""
EXPONENTS = {"F64": (8, 0x7FF << 52), "F32": (4, 0x7F800000), "F16": (2, 0x7C00), "BF16": (2, 0x7F80)}
"""Dtype -> bytes of a number, and the bits of its exponent, all of which NaN and the infinities have."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that one process writes."""

    tensor: str
    dtype: str
    """Key of DTYPE_BYTES."""
    start: tuple[int, ...]
    shape: tuple[int, ...]
    whole: bool
    """Whether the box is the whole tensor."""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def label(self) -> str:
        """The name in the shard: the tensor's name, with the range of the box if that is not all of it."""
        return self.tensor if self.whole else box_name(self.tensor, self.start, self.shape)


_TAIL = re.compile(rb',"checksum":"([0-9a-f]{32})"\}\n')
_HEAD = re.compile(rb'\{"format":"([^"\\]{0,100})","version":(\d{1,9}),')
BLOCK_SUMS = "checksums of blocks"
"""The last tensor of a shard: xxh3_64 of every block of the others."""


def box_name(tensor: str, start: Sequence[int], shape: Sequence[int]) -> str:
    """The name of a box of a tensor, such as "model.embedding.weight[0:2048, 0:256]"."""
    ranges = ", ".join(f"{first}:{first + length}" for first, length in zip(start, shape, strict=True))
    return f"{tensor}[{ranges}]"


def write_file(path: Path, contents: Iterable[Any]) -> StoredFile:
    """Create a file of these pieces, one after the other, and sync it to the disk."""
    hashed, length = xxhash.xxh3_128(), 0
    # O_EXCL: never overwrite a file, and never write through a symbolic link.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for content in contents:
            view = memoryview(content)
            hashed.update(view)
            length += len(view)
            with naming(path):
                while view:
                    view = view[os.write(descriptor, view) :]
        sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)
    return StoredFile(length, hashed.hexdigest())


def shard_header(pieces: Sequence[Piece]) -> bytes:
    """The bytes of a shard before its first tensor."""
    blocks = sum(-(-piece.bytes // BLOCK_BYTES) for piece in pieces)
    sums = BLOCK_SUMS, "U8", (blocks, SUM_BYTES), blocks * SUM_BYTES
    return safetensors_header([*((one.label, one.dtype, one.shape, one.bytes) for one in pieces), sums])


def safetensors_header(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """The bytes before the first tensor of a file (https://huggingface.co/docs/safetensors): a length and JSON. The
    library's writers need all of a file in memory at once. tensors: name, type, shape and bytes of each."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, size in tensors:
        begin, end = end, end + size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def shard_bytes(pieces: Sequence[Piece]) -> int:
    """The size of a shard with these pieces."""
    blocks = sum(-(-piece.bytes // BLOCK_BYTES) for piece in pieces)
    return len(shard_header(pieces)) + sum(piece.bytes for piece in pieces) + blocks * SUM_BYTES


def write_shard(path: Path, pieces: Sequence[Piece], contents: Iterable[Any]) -> StoredFile:
    """Write pieces to a safetensors file, widest elements first to align all. contents: yields the bytes of each."""
    header, sums = shard_header(pieces), bytearray()

    def blocks() -> Iterator[Any]:
        yield header
        for piece, content in zip(pieces, contents, strict=True):
            view = memoryview(content)
            assert len(view) == piece.bytes, f"{piece.label}: {len(view)} bytes for {piece.bytes}"
            for begin in range(0, len(view), BLOCK_BYTES):
                block = view[begin : begin + BLOCK_BYTES]
                sums.extend(xxhash.xxh3_64_digest(block))  # of the bytes in memory, before the disk has them
                yield block
        yield sums

    return replace(
        write_file(path, blocks()),
        header_bytes=len(header),
        header_checksum=xxhash.xxh3_64_hexdigest(header),
        sums_checksum=xxhash.xxh3_64_hexdigest(sums),
    )


def complete(folder: Path, manifest: Manifest, texts: Mapping[str, str]) -> None:
    """Add the small files (name -> text) to a folder that has its shards, then the manifest, and sync the folder.

    Raises UserError rather than write a manifest that would not be read.
    """
    files = dict(manifest.files)
    for name, text in texts.items():
        files[name] = write_file(folder / name, [text.encode("utf-8")])
    manifest = replace(manifest, files=files)
    if problem := next(contradictions(manifest), None):
        raise UserError(f"what the processes wrote does not make up a checkpoint: {problem}")
    write_file(folder / MANIFEST, [encode(manifest)])
    for place in sorted({(folder / name).parent for name in files} | {folder}, reverse=True):
        sync_folder(place)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a regular file. Raises Damage if there is none, TemporaryError if it cannot be read now."""
    try:
        # O_NONBLOCK: opening a pipe must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Damage(f"{path} is a symbolic link, which a checkpoint must not contain") from None
        raise _unreadable(path, error) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Damage(f"{path} is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def _unreadable(path: Path, error: OSError) -> UserError:
    """The error to raise: Damage only if no other answer of the system can be expected."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return Missing(f"{path} is missing")
    text = f"{path} cannot be read: {error.strerror}"
    if error.errno in (errno.EISDIR, errno.ENXIO):
        return Damage(text)
    return TemporaryError(
        f"{text}; this may pass, and nothing is changed. If it stays, rename {path.parent} to use an older checkpoint"
    )


def decode(text: bytes, *, where: Path) -> Manifest:
    """The manifest, of any version, with these contents. where: its path, for messages.

    Raises Damage if it is not exactly what encode() wrote, or is inconsistent; UserError if a newer version wrote it.
    """
    body, tail = text[:-TAIL_BYTES], _TAIL.fullmatch(text[-TAIL_BYTES:])
    if not tail:
        raise Damage(f"{where} is damaged: it is cut off, or is not a manifest")
    if xxhash.xxh3_128_hexdigest(body) != tail[1].decode():
        raise Damage(f"{where} is damaged: its checksum does not match (bytes 0 to {len(body)})")
    if not (head := _HEAD.match(body)):
        raise Damage(f"{where} is damaged: it does not describe a checkpoint")
    if head[1] != FORMAT.encode():
        raise Damage(f"{where} is damaged: its format is {head[1].decode(errors='replace')[:50]!r}")
    if (version := int(head[2])) > VERSION:
        raise UserError(
            f"{where} has version {version} of the format, but this program reads {VERSION}; use a newer one"
        )
    try:
        if version == 1:
            from recipes.checkpoint import version1

            manifest = version1.decode(body + b"}")
        else:
            manifest = ADAPTER.validate_json(body + b"}", strict=True)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise Damage(f"{where} is damaged: it does not describe a checkpoint ({why})") from None
    if problem := next(contradictions(manifest), ""):
        raise Damage(f"{where} is damaged: {problem}")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint. Raises Damage, or TemporaryError for a fault that stays."""
    path = folder / MANIFEST

    def read() -> bytes:
        with opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > MAX_MANIFEST_BYTES:
                raise Damage(f"{path} has {size} bytes, more than a manifest can have")
            text = bytearray(size)
            _fill(descriptor, memoryview(text), 0, path)
            return bytes(text)

    return decode(patiently(read), where=path)


def check_files(folder: Path, manifest: Manifest, names: Collection[str] | None = None) -> None:
    """Check the sizes of these files, or of all, and the contents of the small ones. Raises Damage."""

    def check(name: str, about: StoredFile) -> None:
        with opened(folder / name) as descriptor:
            _check_size(folder / name, descriptor, about)
            if about.header_bytes:
                return
            hashed = xxhash.xxh3_128()
            for begin in range(0, about.bytes, BLOCK_BYTES):
                block = memoryview(bytearray(min(BLOCK_BYTES, about.bytes - begin)))
                _fill(descriptor, block, begin, folder / name)
                hashed.update(block)
        if hashed.hexdigest() != about.checksum:
            raise Damage(f"{folder / name} is damaged: bytes 0 to {about.bytes}")

    for name in manifest.files if names is None else names:
        patiently(partial(check, name, manifest.files[name]))


class OpenShard:
    """A shard whose size, header and checksums of blocks are verified; reads its tensors, and verifies every byte."""

    def __init__(self, folder: Path, manifest: Manifest, name: str, contents: Contents, descriptor: int) -> None:
        """Raises Damage."""
        self._path, self._descriptor, self._block_bytes = folder / name, descriptor, manifest.block_bytes
        self._bounce, self._sums = bytearray(), contents.sums
        about = manifest.files[name]
        _check_size(self._path, descriptor, about)
        self._verified(0, about.header_bytes, about.header_checksum, "its header")
        if not self._sums:
            begin = about.bytes - contents.blocks * SUM_BYTES
            self._sums = self._verified(begin, about.bytes, about.sums_checksum, "the checksums of its tensors")

    def _verified(self, begin: int, end: int, checksum: str, what: str) -> bytes:
        content = bytearray(end - begin)
        _fill(self._descriptor, memoryview(content), begin, self._path)
        if xxhash.xxh3_64_hexdigest(content) != checksum:
            raise Damage(f"{self._path} is damaged: bytes {begin} to {end}, {what}")
        return bytes(content)

    def read(self, tensor: str, chunk: Chunk, first: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a chunk, starting at byte `first`. Raises Damage, which names the block."""
        block_bytes, last = self._block_bytes, first + len(into)
        for block in range(first // block_bytes, -(-last // block_bytes)):
            begin, end = block * block_bytes, min((block + 1) * block_bytes, chunk.bytes)
            inside = first <= begin and end <= last
            if not inside and len(self._bounce) < end - begin:
                self._bounce = bytearray(end - begin)
            target = into[begin - first : end - first] if inside else memoryview(self._bounce)[: end - begin]
            _fill(self._descriptor, target, chunk.offset + begin, self._path)
            place = (chunk.first_block + block) * SUM_BYTES
            if xxhash.xxh3_64_digest(target) != self._sums[place : place + SUM_BYTES]:
                raise Damage(
                    f"{self._path} is damaged: bytes {chunk.offset + begin} to {chunk.offset + end}, which belong to"
                    f" {box_name(tensor, chunk.start, chunk.shape)}"
                )
            if not inside:
                low, high = max(begin, first), min(end, last)
                into[low - first : high - first] = target[low - begin : high - begin]


def verify_shards(
    folder: Path, manifest: Manifest, names: Collection[str], *, look: Callable[[str, memoryview], None] | None = None
) -> None:
    """Read these shards completely and verify every byte. Raises Damage. look: gets each tensor's name and bytes."""
    buffer = memoryview(bytearray(manifest.block_bytes))

    def verify_shard(number: int, name: str) -> None:
        contents = manifest.contents(number)
        with opened(folder / name) as descriptor:
            shard = OpenShard(folder, manifest, name, contents, descriptor)
            for tensor, chunk in contents.chunks:
                for first in range(0, chunk.bytes, len(buffer)):
                    shard.read(tensor, chunk, first, buffer[: chunk.bytes - first])
                    if look:
                        look(tensor, buffer[: chunk.bytes - first])

    for number, name in manifest.shards.items():
        if name in names:
            patiently(partial(verify_shard, number, name))


def verify(folder: Path, at_hand: AtHand = nullcontext) -> Manifest:
    """Read a checkpoint completely and verify every byte. Raises Damage at the first wrong one, or at a NaN. at_hand:
    around each shard, of which one is read at a time."""
    manifest = read_manifest(folder)
    check_files(folder, manifest)

    def require_finite(tensor: str, content: memoryview) -> None:
        size, exponent = EXPONENTS.get(manifest.tensors[tensor].dtype, (1, 0))
        words = numpy.frombuffer(content, f"<u{size}", count=len(content) // size)
        if exponent and (words & exponent == exponent).any():
            raise Damage(f"{folder} is as it was written, but has NaN or infinite values in {tensor}")

    for name in manifest.shards.values():
        with at_hand(folder / name):
            verify_shards(folder, manifest, [name], look=require_finite)
    return manifest


def _check_size(path: Path, descriptor: int, about: StoredFile) -> None:
    size = os.fstat(descriptor).st_size
    if size != about.bytes:
        what = "cut off" if size < about.bytes else "too long"
        raise Missing(f"{path} is {what}: {size} bytes instead of {about.bytes}")


def _fill(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            raise _unreadable(path, error) from None
        if count == 0:
            raise Damage(f"{path} is cut off at byte {offset + done}")
        done += count
