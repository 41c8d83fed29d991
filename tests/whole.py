"""Gathers what is sharded, and exports it as a run does at its end."""

import tempfile
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from parallel.dist import World, all_gather_single, on_main
from parallel.fsdp import reshard
from recipes.checkpoint.checkpoints import Checkpoints
from recipes.checkpoint.config import CheckpointConfig
from recipes.checkpoint.parameters import write_parameters
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.optimizer import build_optimizer
from recipes.weights.convert import CARD, export_checkpoint
from recipes.weights.description import Description, checkpoint_files


@torch.no_grad()
def whole(tensor: DTensor) -> Tensor:
    """The whole tensor, on every process; all of its mesh must call this.

    For parameters that tensor parallelism has cut into equal parts, and FSDP then into parts that may be unequal. Torch
    2.13 fails at these in full_tensor() ("_StridedShard"), and prints a warning for equal ones.
    """
    mesh, part = tensor.device_mesh, tensor.to_local()
    cuts = {axis: cast(Shard, cut).dim for axis, cut in enumerate(tensor.placements) if not cut.is_replicate()}
    for axis, dim in cuts.items():  # FSDP's axis, the last to cut, comes first
        length = tensor.shape[dim] // prod(mesh.size(later) for later in cuts if later > axis and cuts[later] == dim)
        rows = part.movedim(dim, 0).contiguous()
        share = -(-length // mesh.size(axis))  # as torch.chunk: the last shards may be smaller or empty
        if len(rows) < share:
            rows = torch.cat((rows, rows.new_zeros(share - len(rows), *rows.shape[1:])))
        gathered = rows.new_empty(share * mesh.size(axis), *rows.shape[1:])
        all_gather_single(gathered, rows, group=mesh.get_group(axis))
        part = gathered[:length].movedim(0, dim)
    return part


def export_model(
    model: nn.Module, folder: Path, description: Description, *, world: World | None, **options: Any
) -> None:
    """Save a sharded model as a run does, and export that, without a model card. All processes of `world` call it.

    world: None = of a plain model on this process alone. options: as of export_checkpoint().
    """
    files = checkpoint_files(description)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        if world is None:
            tensors = dict(model.named_parameters())
            shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
            write_parameters(Path(place), shapes, lambda name: tensors[name], files=files)
            export_checkpoint(Path(place), folder, replace=True, **options)
            return
        reshard(model)  # an optimizer without state takes a step, but not on what validation has gathered
        config = CheckpointConfig(every=1, keep=1, asynchronous=False)
        checkpoints = Checkpoints(Path(world.messages.from_main(place)), config, files=files, log=lambda line: None)
        checkpoints.save(model, build_optimizer(model, OptimizerConfig()), step=1, progress={"tokens": 0})
        assert checkpoints.finish() == 1
        on_main(world, lambda: export_checkpoint(checkpoints.path(1), folder, replace=True, **options))
        if world.is_main:
            (folder / CARD).unlink()
