"""The forward and backward passes of a step: micro-batches, one after the other; norms of gradients, sums over groups.

parallel/pipeline.py does the same for a model whose stages are on several processes.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.profiler import record_function

from models.interface import interface_of
from parallel.dist import all_gather_single
from parallel.fsdp import expect_micro_batch, units_of
from parallel.mesh import Mesh, is_whole_along

Batch = tuple[Any, Tensor, Any]
"""Tokens, targets (rows, length) and documents of a micro-batch."""


def backward(loss: Tensor) -> None:
    """loss.backward(), where a loss that is NaN or infinite makes every gradient NaN, and so the norm of all ranks."""
    loss.backward(one_or_nan(loss))


def one_or_nan(loss: Tensor) -> Tensor:
    """1 for a finite loss, NaN otherwise: what its gradient begins with."""
    number = loss.detach()
    return number - number + 1


class Passes:
    """Computes gradients, and their norm."""

    copies: ProcessGroup | None = None
    """The processes with the first and the last stage, if both have a tied embedding; None on all others."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, *, reshards: bool, has_z_loss: bool, dropout_seed: int | None = None
    ) -> None:
        """
        Args:
            model: sharded, with its values.
            mesh: the one that it is sharded over.
            reshards: whether weights are gathered anew for each micro-batch (ZeRO-3).
            has_z_loss: whether the model returns two losses, of which the z-loss is the second.
            dropout_seed: seed of the random numbers that the model draws in a step; None if it draws none.
        """
        self.model, self.mesh, self.units = model, mesh, units_of(model)
        self._first = next(model.parameters())  # as sharded
        self._loss: Any = model.get_submodule(interface_of(model).loss)
        routers = interface_of(model).routers
        self.routers: Any = model.get_submodule(routers) if routers else None
        """What counts the loads of experts; None without any here."""
        self.reshards, self.has_z_loss, self._dropout_seed = reshards, has_z_loss, dropout_seed

    def run(
        self,
        micro_batches: Sequence[Batch],
        target_tokens: Tensor,
        *,
        step: int,
        progressed: Callable[[], None],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Add up the gradients of all micro-batches. Returns this process's losses / target_tokens, () or (2,).

        Args:
            micro_batches: this data rank's share of the global batch.
            target_tokens: the number of targets in the global batch.
            step: the number of the step, on which dropout depends.
            progressed: called before each micro-batch.
            rows: where the summed loss and the number of targets of each row are noted, (2, rows of this data rank):
                this process's part of them; None = nowhere.
        """
        losses = torch.zeros(2 if self.has_z_loss else (), device=target_tokens.device)
        self._begin(micro_batches, device=target_tokens.device)
        for index, (inputs, targets, documents) in enumerate(micro_batches):
            progressed()
            expect_micro_batch(self.units, is_last=index == len(micro_batches) - 1, reshards=self.reshards)
            if self._dropout_seed is not None:
                seed_random(self._dropout_seed, step, self.mesh.data_rank, index)
            self._note(rows, index, of=len(micro_batches))
            micro_losses = self.model(inputs, targets, documents=documents) / target_tokens
            backward(micro_losses.sum() if self.has_z_loss else micro_losses)  # in the last, FSDP sums the gradients
            losses += micro_losses.detach()
        self._note(None)
        return losses

    def _note(self, rows: Tensor | None, index: int = 0, *, of: int = 1) -> None:
        """Let the next loss be noted as that of one of so many micro-batches; None: nowhere."""
        self._loss.rows = None if rows is None else rows.chunk(of, dim=1)[index]

    def _begin(self, micro_batches: Sequence[Batch], *, device: torch.device) -> None:
        """Count the loads of experts anew. No gradients are left of an earlier step: FSDP sums them once."""
        assert self._first.grad is None, "a step without zero_grad() after the one before it (parallel/fsdp.py, Gather)"
        if self.routers is not None:  # all tokens are routed, also those without a target
            tokens = torch.full((), sum(targets.numel() for _, targets, _ in micro_batches), device=device)
            self.routers.begin(sum_over_group(tokens, self.mesh.data_group))

    def counted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The given parameters without those that an earlier stage has as well."""
        return [*parameters]

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The L2 norm of the gradients of these parameters of the model, a float32 scalar, on all processes."""
        return gradient_norm(parameters)


def seed_random(*numbers: int) -> None:
    """Seed what this process draws next, so that a resumed run draws the same without having saved anything."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


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
        if gradients[0].is_cpu:  # where torch's norm of 134M float32 numbers is 1.4% short; norms of rows are exact
            gradients = [torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32) for gradient in gradients]
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
    copies = [gradient.to_local() for gradient in _gradients(parameters) if is_whole_along(gradient, axis)]
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
    losses: Tensor, numbers: Sequence[float], *, loss_group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """(the losses summed over `loss_group`, the numbers of every process in the world, (processes, numbers)).

    One message for both; they stay on the device of the losses, in float64. losses: this process's parts, () or (n,).
    """
    group, count = dist.get_global_rank(loss_group, 0), losses.numel()
    own = torch.tensor([group, *numbers], dtype=torch.float64).to(losses.device)
    own = torch.cat([own, losses.detach().double().view(-1)])
    rows = own.new_empty(dist.get_world_size() * len(own))
    all_gather_single(rows, own)
    rows = rows.view(-1, len(own))
    found = torch.where(rows[:, :1] == group, rows[:, -count:], 0.0).sum(0)
    return found.view(losses.shape), rows[:, 1:-count]
