"""Turns parameters on the meta device into real, sharded ones."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

InitParameter = Callable[[str, Tensor, torch.Generator], None]


def plain_name(name: str) -> str:
    """The fully qualified name in the plain model, without the wrapper that activation checkpointing adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


@torch.no_grad()
def materialize(
    model: nn.Module,
    *,
    device: torch.device,
    seed: int,
    init_parameter: InitParameter,
    keep_on: torch.device | None = None,
) -> None:
    """Allocate every parameter's local shard and fill it with random values.

    Each parameter has its own generator, seeded by `seed` and the parameter's name, and is drawn in full before only
    the local shard is kept: the values do not depend on the mesh. A process holds at most one full parameter.

    Args:
        model: on the meta device, sharded.
        device: where the values are drawn. Generators of CPU and CUDA differ, and so do the values.
        seed: of the generators.
        init_parameter: fills a full parameter, given its plain name, the tensor and a generator.
        keep_on: where the shards are kept, if not on `device` (offloading to the host).
    """
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
