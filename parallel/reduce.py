"""Sums over named groups of processes: loss, token counts, gradient norm, and clipping."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.profiler import record_function


def sum_over_group(value: Tensor, group: ProcessGroup) -> Tensor:
    """`value` summed over the processes of the group, in place; the host does not wait for the device."""
    if group.size() > 1:
        dist.all_reduce(value, group=group)
    return value


def largest_in_groups(value: Tensor, groups: Iterable[ProcessGroup]) -> Tensor:
    """The largest of the values that the processes of these groups have, infinite if any is NaN.

    It is equal on all of them to the bit. (The order of a sum is NCCL's choice in each group.) The host does not wait.
    """
    largest = torch.where(value.isfinite(), value, math.inf)
    for group in groups:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def reduce_loss_and_times(loss: Tensor, times: list[float], *, loss_group: ProcessGroup) -> tuple[float, Tensor]:
    """(the loss summed over `loss_group`, the times of every process in the world, (processes, times) on the host).

    One message for both. loss: this process's part, a scalar. The host waits for the device.
    """
    own = torch.tensor([0.0, *times], dtype=torch.float64).to(loss.device)
    own[0] = loss
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    rows = torch.stack(gathered).cpu()
    return sum(rows[dist.get_process_group_ranks(loss_group), 0].tolist()), rows[:, 1:]


@record_function("gradient norm")
@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The global L2 norm of all gradients, a float32 scalar, equal on all processes.

    One all-reduce for each set of sharded mesh axes: for FSDP one in the shard group, as replicas agree already.
    """
    groups: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    for gradient in _gradients(parameters):
        # Not is_shard(): it is False for the strided shards that FSDP makes of what tensor parallelism has cut.
        sharded_axes = tuple(axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())
        groups[gradient.device_mesh, sharded_axes].append(gradient.to_local())
    squares = []
    for (mesh, axes), gradients in groups.items():
        square = get_total_norm(gradients).float().square()
        for axis in axes:
            if mesh.size(axis) > 1:
                dist.all_reduce(square, group=mesh.get_group(axis))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


@record_function("gradient norm")
def share_gradients_of_copies(parameters: Iterable[nn.Parameter], axis: DeviceMesh) -> None:
    """Give all processes along the axis the first one's gradients of what each of them holds whole, in place.

    FSDP has summed these in a group of its own for each of them, and NCCL may choose another order in each. Copies that
    differ by such roundings drift apart (bigscience-workshop/Megatron-DeepSpeed #271, NVIDIA-NeMo/Automodel #3822).
    """
    [name] = axis.mesh_dim_names or ("",)
    copies = []
    for gradient in _gradients(parameters):
        names = gradient.device_mesh.mesh_dim_names or ()
        if gradient.placements[names.index(name)].is_replicate():
            copies.append(gradient.to_local())
    together = torch.cat([copy.flatten() for copy in copies])
    if len(together):  # FSDP leaves some processes no part of small parameters
        dist.broadcast(together, group=axis.get_group(), group_src=0)
        parts = together.split([copy.numel() for copy in copies])
        torch._foreach_copy_(copies, [part.view_as(copy) for part, copy in zip(parts, copies, strict=True)])


@record_function("gradient clipping")
@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], *, norm: Tensor, max_norm: float) -> None:
    """Scale all gradients, in place, so that their global norm is at most `max_norm`. The host does not wait."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([gradient.to_local() for gradient in _gradients(parameters)], scale)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[DTensor]:
    """Every parameter's gradient; after fully_shard all of them are DTensors."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert all(isinstance(gradient, DTensor) for gradient in gradients), "gradients of a model that is not sharded"
    return gradients  # type: ignore[return-value]
