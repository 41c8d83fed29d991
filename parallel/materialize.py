"""Turns parameters on the meta device into real, sharded ones, and sharded ones into whole ones."""

import hashlib
from collections.abc import Callable
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
    """Allocate every parameter's local shard and let the model's `init_parameter` fill it with random values.

    Each parameter has its own generator, seeded by `seed` and the parameter's name, and is drawn in full before only
    the local shard is kept: the values do not depend on the mesh. A process holds at most one full parameter. They are
    drawn on `device` (those of CPU and CUDA differ) and stay there unless `keep_on` names another (offloading).
    """
    init_parameter = cast(Callable[[str, Tensor, torch.Generator], None], model.init_parameter)
    model.to_empty(device=keep_on or device)
    for name, parameter in model.named_parameters():
        name = plain_name(name)
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
        whole = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        init_parameter(name, whole, generator)
        if isinstance(parameter, DTensor):
            # src_data_rank=None: every process takes its own shard, and nothing is sent.
            shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())
        else:
            parameter.copy_(whole)


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
