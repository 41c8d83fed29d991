"""From meta device to real, sharded parameters."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

InitParameter = Callable[[str, Tensor, torch.Generator], None]


def plain_name(name: str) -> str:
    """The fully qualified name in the plain model, without what activation checkpointing puts in between."""
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
    """Allocate every parameter's local shard and fill it with values drawn on `device`.

    keep_on: where the shards live, when that is not `device` (offloading to the host).

    Each parameter has a generator of its own, seeded by `seed` and its name alone, and is drawn whole before the
    local part is kept: the values do not depend on the mesh. No process holds more than one whole parameter.
    (Generators of CPU and CUDA differ, so values do depend on the kind of device.)
    """
    model.to_empty(device=keep_on or device)
    for name, parameter in model.named_parameters():
        name = plain_name(name)
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
        whole = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        init_parameter(name, whole, generator)
        if isinstance(parameter, DTensor):
            # src_data_rank=None: every process cuts its own part, nothing is sent.
            shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())
        else:
            parameter.copy_(whole)
