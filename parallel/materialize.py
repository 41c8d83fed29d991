"""Turns parameters on the meta device into real, sharded ones, and sharded ones into whole ones."""

from collections.abc import Callable, Iterator
from math import prod
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from parallel.dist import all_gather_single


def plain_name(name: str) -> str:
    """The fully qualified name in the plain model, without the wrapper that activation checkpointing adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


@torch.no_grad()
def materialize(model: nn.Module, *, device: torch.device, seed: int, keep_on: torch.device | None = None) -> None:
    """Allocate every parameter's local shard and fill it, and every buffer, from the model's `initial_values`.

    Each process draws all of every parameter, one after the other, and keeps only its shard: the values do not depend
    on the mesh. They are drawn on `device` (those of CPU and CUDA differ) and stay there unless `keep_on` names another
    (offloading).
    """
    model.to_empty(device=keep_on or device)
    for module in model.modules():  # what is no parameter is not offloaded
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))
    places = {plain_name(name): tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    initial_values = cast(Callable[..., Iterator[tuple[str, Tensor]]], model.initial_values)
    shapes = {name: tensor.shape for name, tensor in places.items()}
    for name, whole in initial_values(shapes, seed=seed, device=device):
        place = places.pop(name)
        if isinstance(place, DTensor):
            # src_data_rank=None: every process takes its own shard, and nothing is sent.
            shard = distribute_tensor(whole, place.device_mesh, place.placements, src_data_rank=None)
            place.to_local().copy_(shard.to_local())
        else:
            place.copy_(whole)
    assert not places, f"no initial values of {sorted(places)}"


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
