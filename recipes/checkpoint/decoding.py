"""Reads the manifest of a checkpoint of any version. Imports no torch."""

import re
from pathlib import Path

import xxhash
from pydantic import ValidationError

from parallel.errors import UserError
from recipes.checkpoint.manifest import (
    ADAPTER,
    FORMAT,
    TAIL_BYTES,
    VERSION,
    Damage,
    Manifest,
    contradictions,
)

BYTES_PER_VALUE = {1: 8, 2: 4}
"""A manifest has at least this much text per value, by version; those that runs write have 12 and 6. A text of nothing
but small values would take thirty times its size in memory."""
_TAIL = re.compile(rb',"checksum":"([0-9a-f]{32})"\}\n')
_HEAD = re.compile(rb'\{"format":"([^"\\]{0,100})","version":(\d{1,9}),')


def decode(text: bytes, *, where: Path) -> Manifest:
    """The manifest with these contents. where: its path, for messages.

    Raises Damage if it is not exactly what encode() wrote, or is inconsistent; UserError if a newer version wrote it.
    """
    body, tail = text[:-TAIL_BYTES], _TAIL.fullmatch(text[-TAIL_BYTES:])
    if not tail:
        raise Damage(f"{where} is damaged: it is cut off, or is not a manifest")
    if xxhash.xxh3_128_hexdigest(body) != tail[1].decode():
        raise Damage(f"{where} is damaged: its checksum does not match (bytes 0 to {len(body)})")
    head = _HEAD.match(body)
    if head and head[1] != FORMAT.encode():
        raise Damage(f"{where} is damaged: its format is {head[1].decode(errors='replace')[:50]!r}")
    version = int(head[2]) if head else VERSION
    if version > VERSION:
        raise UserError(
            f"{where} has version {version} of the format, but this program reads {VERSION}; use a newer one"
        )
    if sum(map(body.count, (b",", b"[", b"{"))) > len(body) // BYTES_PER_VALUE.get(version, 8) + 10_000:
        raise Damage(f"{where} is damaged: it does not describe a checkpoint (too many values for {len(body)} bytes)")
    try:
        manifest, problem = _decoded(body + b"}", version)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:200]
        raise Damage(f"{where} is damaged: it does not describe a checkpoint ({what})") from None
    if manifest is None:
        raise Damage(f"{where} is damaged: {problem}")
    return manifest


def _decoded(text: bytes, version: int) -> tuple[Manifest | None, str]:
    """The manifest, or what is wrong with it."""
    if version == 1:
        from recipes.checkpoint import version1

        old = version1.ADAPTER.validate_json(text, strict=True)
        problem = next(version1.contradictions(old), "")
        return None if problem else version1.converted(old), problem
    manifest = ADAPTER.validate_json(text, strict=True)
    problem = next(contradictions(manifest), "")
    return None if problem else manifest, problem
