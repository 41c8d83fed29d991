"""FSDP2: shard parameters, gradients and optimizer states, with the mixed-precision policy."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from models.interface import blocks_of, interface_of
from parallel.config import FSDPConfig
from parallel.mesh import Mesh


def shard_blocks_and_root(model: nn.Module, mesh: Mesh, config: FSDPConfig) -> str:
    """fully_shard every block, then the root, in place. Returns a line for the log.

    Gradients are summed over the data ranks, not averaged: the step divides the loss by the whole batch's targets.
    """
    interface = interface_of(model)
    options: dict[str, Any] = {
        "mesh": mesh.fsdp,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.param_dtype),
            reduce_dtype=getattr(torch, config.reduce_dtype),
            # Activations follow the parameters by themselves; casting would round the float32 rotary tables.
            cast_forward_inputs=False,
        ),
        "offload_policy": (
            CPUOffloadPolicy(pin_memory=mesh.devices.device_type == "cuda") if config.cpu_offload else OffloadPolicy()
        ),
    }
    reshard = config.reshard_after_forward
    units = [fully_shard(block, reshard_after_forward=reshard, **options) for block in blocks_of(model)]
    if interface.head is not None:
        # Untied: two large matrices that are never needed at the same time. The backward pass starts with the head.
        embedding, head = model.get_submodule(interface.embedding), model.get_submodule(interface.head)
        fully_shard(embedding, reshard_after_forward=reshard, **options)
        fully_shard(head, reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Else a factor of one still takes NCCL's slower pre-multiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
    for index, unit in enumerate(units):
        # Ask for the next blocks' weights before this one computes, so that a slow host does not expose the gather.
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + config.prefetch])
        if config.prefetch > 1:  # one block ahead FSDP2 looks by itself in the backward pass
            unit.set_modules_to_backward_prefetch(units[max(0, index - config.prefetch) : index][::-1])

    shard, replicate = mesh.degrees.shard * mesh.degrees.context, mesh.degrees.replicate
    stage = "ZeRO-3" if reshard else "ZeRO-2"
    layout = f"{stage} over {shard}" if shard > 1 else "no sharding"
    copies = f" x {replicate} replicas" if replicate > 1 else ""
    offload = ", offloaded to the host" if config.cpu_offload else ""
    ahead = f", {config.prefetch} blocks gathered ahead" if config.prefetch > 1 else ""
    return f"fsdp: {layout}{copies}, {config.param_dtype} compute, {config.reduce_dtype} reduction{ahead}{offload}"
