"""Writes the checkpoints that every later version must load: `python -m tests.recipes.checkpoint.golden FOLDER`.

Those in golden/ were written once and are never written again; a new version of the format adds new ones.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from parallel.config import MeshConfig
from recipes.checkpoint.storage import raw
from tests.build import SHARD_ALL
from tests.processes import run_processes
from tests.recipes.checkpoint.small import SMALL, checkpoints_in, snapshot, trained

GOLDEN = Path(__file__).parent / "golden"
PROGRESS = {"tokens": 36, "sequences": 4, "wandb": None, "name": "ä"}


def fingerprints(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: xxhash.xxh3_64_hexdigest(raw(tensor)) for name, tensor in sorted(tensors.items())}


def write(folder: Path, moments: str = "float32", mesh: MeshConfig = SHARD_ALL) -> dict[str, str]:
    """Save two steps of the small model, sharded over all processes; returns the fingerprints of its state."""
    from parallel.dist import start, stop

    start("cpu", seed=0)
    run = trained(2, moments=moments, mesh=mesh)
    checkpoints = checkpoints_in(folder, keep=1, files={"note.txt": "kept for ever\n"})
    checkpoints.save(*run, step=2, progress=PROGRESS)
    assert checkpoints.finish() == 2
    found = fingerprints(snapshot(*run, whole=True))
    stop()
    return found


def write_imported(folder: Path) -> dict[str, str]:
    """Write parameters alone, in bfloat16, as an import does; returns their fingerprints."""
    from models.hf import parameter_shapes
    from recipes.checkpoint.parameters import write_parameters

    torch.manual_seed(0)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in parameter_shapes(SMALL)}
    folder.joinpath("imported").mkdir()
    shapes: dict[str, Any] = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    write_parameters(folder / "imported", shapes, tensors.__getitem__, files={})
    return fingerprints(tensors)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir()
    expected = {
        "sharded": run_processes(2, write, target / "sharded")[0],
        "bfloat16": run_processes(1, write, target / "bfloat16", "bfloat16")[0],
        "imported": write_imported(target),
        "version2": run_processes(4, write, target / "version2", "float32", MeshConfig(replicate=2, shard=2))[0],
    }
    target.joinpath("fingerprints.json").write_text(json.dumps(expected, indent=1) + "\n")
