"""Manifests of version 1, which 0.1.0 wrote: a line per box, with checksums of its blocks. Imports no torch."""

import json
from dataclasses import replace
from math import prod
from typing import Any

from recipes.checkpoint.manifest import ADAPTER, DTYPE_BYTES, Chunk, Contents, Manifest


def decode(text: bytes) -> Manifest:
    """The checkpoint as the present version describes it; the contents of its files are those of the old manifest.

    Raises ValueError, LookupError, TypeError or AttributeError if this is no such manifest.
    """
    content = json.loads(text)
    shards = [name for name, file in content["files"].items() if file.get("header_bytes")]
    lines: dict[str, list[tuple[str, dict[str, Any]]]] = {name: [] for name in shards}
    for name, tensor in content["tensors"].items():
        for line in tensor["chunks"]:
            lines[line["file"]].append((name, line))
        tensor["boxes"] = [
            {"file": int(line["file"].split("-")[1]), "start": line["start"], "shape": line["shape"]}
            for line in tensor.pop("chunks")
        ]
    manifest = ADAPTER.validate_json(json.dumps(content), strict=True)
    contents = {}
    for shard in shards:
        chunks, sums, offset = [], b"", manifest.files[shard].header_bytes
        for name, line in sorted(lines[shard], key=lambda pair: pair[1]["offset"]):
            size = prod(line["shape"]) * DTYPE_BYTES[manifest.tensors[name].dtype]
            chunks.append((name, Chunk(shard, offset, size, (*line["start"],), (*line["shape"],), len(sums) // 8)))
            sums += bytes.fromhex("".join(line["blocks"]))
            offset += size
        contents[shard] = Contents(chunks, len(sums) // 8, sums)
    return replace(manifest, explicit=contents)
