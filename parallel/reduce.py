"""Sums over named groups of processes: loss, token counts and gradient norm."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.profiler import record_function

from parallel.dist import all_gather_single


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


def gather_loss_and_numbers(
    loss: Tensor, numbers: Sequence[float], *, loss_group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """(the loss summed over `loss_group`, the numbers of every process in the world, (processes, numbers)).

    One message for both; they stay on the device of the loss, in float64. loss: this process's part, a scalar.
    """
    group = dist.get_global_rank(loss_group, 0)
    own = torch.tensor([0.0, group, *numbers], dtype=torch.float64).to(loss.device)
    own[0] = loss
    rows = own.new_empty(dist.get_world_size() * len(own))
    all_gather_single(rows, own)
    rows = rows.view(-1, len(own))
    return torch.where(rows[:, 1] == group, rows[:, 0], 0.0).sum(), rows[:, 2:]


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


def clipping_divisor(norm: Tensor, *, max_norm: float) -> Tensor:
    """What to divide all gradients by, 1 or more, so that their norm is at most `max_norm`. The host does not wait."""
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[DTensor]:
    """Every parameter's gradient; after fully_shard all of them are DTensors."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert all(isinstance(gradient, DTensor) for gradient in gradients), "gradients of a model that is not sharded"
    return gradients  # type: ignore[return-value]
