"""What saving and resuming the largest model costs at so many ranks: the project's own code with all ranks' inputs.

The state is cut by FSDP into at most SHARD parts; the other ranks hold replicas.
"""

import tempfile
from collections.abc import Callable
from functools import partial, reduce
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy

from models.layout import layout_of
from models.sizes import SIZES
from parallel.messages import children_of, packed
from recipes.bench.scale_rows import Row
from recipes.checkpoint.files import complete
from recipes.checkpoint.manifest import (
    BLOCK_BYTES,
    DTYPE_BYTES,
    FORMAT,
    SUM_BYTES,
    VERSION,
    Manifest,
    StoredFile,
    StoredTensor,
    decode,
    encode,
    shard_name,
)
from recipes.checkpoint.plan import Cut, Spread, divide, plan

MODEL = "llama3_405b"
SHARD = 512
REPEATS = 3
SAVE_ROUNDS, RESUME_ROUNDS = 7, 5
"""Of messages up the tree and down: a save's left-overs, partial folder, shards, their arrival, commit, what to delete,
and whether to copy; a resume's check of the recipe, manifest, sizes, sizes that are not right, and tensors."""
OWN_OPERATIONS = 7
"""Of a save in each process: mkdir, open, write, fsync and close its shard; look at it in its folder, and at the next
one's."""
MAIN_OPERATIONS = 24
"""Of a save on rank 0 besides: three folders listed, created, renamed and synced, and the small files."""


def checkpoint_rows(ranks: int) -> list[Row]:
    """The rows of the table of docs/scale.md for this number of ranks."""
    shard = min(ranks, SHARD)
    tensors = spreads_of(MODEL, shard=shard)

    def plan_anew() -> None:
        divide.cache_clear()
        plan(tensors, ranks)

    planning = timed(plan_anew)
    manifest = stored_by(tensors, ranks)
    text = encode(manifest)
    children = len(children_of(0, ranks))
    parts = [dict([*manifest.files.items()][place::children]) for place in range(children)]
    folders = [name.rpartition("/")[0] for name in manifest.files]
    sizes = [file.bytes for file in manifest.files.values()]
    with tempfile.TemporaryDirectory() as place:
        merging = timed(lambda: packed(reduce(lambda one, other: one | other, parts)))
        writing = timed(partial(_complete, Path(place), manifest))
    rows = {
        "save: planning on each rank": (planning, "s"),
        "save: committing on rank 0": (merging + writing, "s"),
        "save: received by rank 0": (sum(map(message_bytes, parts)) / 1e6, "MB"),
        "save: size of the manifest": (len(text) / 1e6, "MB"),
        "save: most files in a folder": (max(map(folders.count, {*folders})), ""),
        "save: largest shard": (max(sizes) * len(sizes) / sum(sizes), "of the mean"),
        "resume: reading the manifest on rank 0": (timed(lambda: decode(text, where=Path("manifest"))), "s"),
        "resume: packing the manifest for all": (timed(lambda: packed(manifest)), "s"),
        "resume: manifest as it is sent on": (message_bytes(manifest) / 1e6, "MB"),
        "resume: files that a rank looks at": (-(-len(sizes) // ranks), ""),
        "resume: shards that a rank opens, on the same mesh": (opened(manifest.tensors, tensors, rank=5), ""),
    }
    counted = {
        "save: messages received by rank 0": SAVE_ROUNDS * children,
        "resume: messages received by rank 0": RESUME_ROUNDS * children,
        "save: file-system operations of a rank": OWN_OPERATIONS,
        "save: file-system operations of rank 0": OWN_OPERATIONS + MAIN_OPERATIONS + 3 * len({*folders}),
    }
    return [Row(f"checkpoint {what}", value, unit, "simulated") for what, (value, unit) in rows.items()] + [
        Row(f"checkpoint {what}", value, "", "counted") for what, value in counted.items()
    ]


def spreads_of(model: str, *, shard: int) -> dict[str, Spread]:
    """The tensors of a model in training, cut into so many parts by neighbouring ranks."""
    found = {}
    for name, stored in layout_of(SIZES[model]).tensors.items():
        cut = Spread("F32", stored.shape, (Cut(0, shard, 1),))
        found[f"model.{name}"] = cut
        found |= {f"optimizer.{name}.{kind}": cut for kind in ("exp_avg", "exp_avg_sq")}
        found[f"optimizer.{name}.step"] = Spread("F32", ())
    return found


def stored_by(tensors: dict[str, Spread], ranks: int) -> Manifest:
    """The manifest of what so many ranks would write."""
    stored = plan(tensors, ranks)
    sizes, pieces = numpy.zeros(ranks, numpy.int64), numpy.zeros(ranks, numpy.int64)
    for tensor in stored.values():
        for row in tensor.boxes:
            size = prod(row.shape) * DTYPE_BYTES[tensor.dtype]
            sizes[row.shards] += size - (-size // BLOCK_BYTES) * SUM_BYTES
            pieces[row.shards] += 1
    files = {}
    for rank in map(int, numpy.flatnonzero(pieces)):
        header = 8 + 100 * int(pieces[rank])
        size, short = header + int(sizes[rank]), f"{rank:016x}"
        files[shard_name(rank, ranks)] = StoredFile(size, f"{rank:032x}", header, short, short[::-1])
    return Manifest(FORMAT, VERSION, 1, {}, BLOCK_BYTES, files, stored)


def opened(stored: dict[str, StoredTensor], tensors: dict[str, Spread], *, rank: int) -> int:
    """How many shards a rank opens to read its part of these tensors."""
    found: set[int] = set()
    for name, about in tensors.items():
        start, shape = about.box_of(rank)
        for row in stored[name].boxes if prod(shape) else ():
            found.update(row.file + number * row.stride for number in row.meeting(start, shape))
    return len(found)


def _complete(place: Path, manifest: Manifest) -> None:
    """What rank 0 does when all shards are written."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        for name in {(Path(folder) / name).parent for name in manifest.files}:
            name.mkdir(exist_ok=True)
        complete(Path(folder), manifest, {})


def message_bytes(value: object) -> int:
    """How much passes when a process sends this to another."""
    return sum(part.numel() for part in packed(value))


def timed(work: Callable[[], object]) -> float:
    """The median of a few runs, in seconds."""
    found = []
    for _ in range(REPEATS):
        begin = perf_counter()
        work()
        found.append(perf_counter() - begin)
    return median(found)
