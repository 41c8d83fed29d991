"""Turns parameters on the meta device into real, sharded ones."""

import hashlib
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


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
