"""Tensor and sequence parallelism, and the loss over a vocabulary in parts.

Each process of a tensor group holds 1 / degree of every matrix. Between the parts of a block it holds 1 / degree of
the tokens of a row: a part gathers them before its first linears, which are cut by output ("column"), and scatters the
sum of its last one, which is cut by input ("row") (Megatron-LM, Korthikanti et al. 2022).

B batch, T tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from models.interface import blocks_of, interface_of
from models.loss import EAGER, IGNORED, SummedLoss, loss_in_chunks
from parallel.errors import UserError
from parallel.float8 import Move, float8_gather, float8_scatter

TOKENS = Shard(1)
"""How the residual stream (B, T, D) is cut."""


def split_over(model: nn.Module, axis: DeviceMesh, *, float8_gathers: bool = False, overlapped: bool = False) -> str:
    """Cut every matrix, the residual stream and the loss, in place, over the axis. Returns a line for the log.

    float8_gathers: gather activations as float8. Raises UserError where only some of a part's linears take it.
    overlapped: leave activations as Inductor needs them to fuse their messages with products.
    """
    interface = interface_of(model)
    inside = interface.inside_block
    plan: dict[str, ParallelStyle] = {name: SequenceParallel() for name in inside.norms}
    plan |= dict.fromkeys(inside.column, ColwiseParallel())
    plan |= dict.fromkeys(inside.row, RowwiseParallel(output_layouts=Partial(), use_local_output=False))
    gathers = 0
    moving: Callable[[Move], Move] = _without_single_rows if overlapped else lambda move: move
    for block in blocks_of(model):
        parallelize_module(block, axis, plan)
        for linear in map(block.get_submodule, inside.row):
            scatter = float8_scatter(linear) if float8_gathers else None
            _scatter_tokens(linear, moving(scatter or _redistributed))
        for name in inside.parts:
            linears = [block.get_submodule(linear) for linear in inside.column if linear.startswith(f"{name}.")]
            gather = float8_gather(linears) if float8_gathers else None
            gathers += gather is not None
            _gather_tokens(block.get_submodule(name), axis, moving(gather or _redistributed))
    if float8_gathers and not gathers:
        raise UserError(
            "float8.gather_activations: float8.exclude leaves no linear that reads gathered ones; write false"
        )
    # The head that is tied to the embedding multiplies with the same part of the vocabulary that the embedding holds.
    outside: dict[str, ParallelStyle] = {
        interface.embedding: RowwiseParallel(input_layouts=Replicate(), output_layouts=TOKENS),
        interface.head_norm: SequenceParallel(),
    }
    if interface.head is not None:
        # FSDP warns of modules that return views, as the local part of a DTensor is: the loss takes it.
        outside[interface.head] = ColwiseParallel(
            input_layouts=TOKENS, output_layouts=Shard(-1), use_local_output=False
        )
    else:
        assert interface.tied_head is not None
        outside[interface.tied_head] = PrepareModuleInput(
            input_layouts=(TOKENS, None), desired_input_layouts=(Replicate(), None)
        )
        model.get_submodule(interface.tied_head).register_forward_hook(lambda module, inputs, output: _local(output))
    parallelize_module(model, axis, outside)
    # A compiled block takes the embedding's output, a tensor that still waits for its communication, and hands back a
    # wrong gradient (torch 2.13, pytorch #179849): a copy is an ordinary tensor.
    model.get_submodule(interface.embedding).register_forward_hook(lambda module, inputs, output: output.clone())
    loss = cast(SummedLoss, model.get_submodule(interface.loss))
    model.set_submodule(interface.loss, VocabularyParallelLoss(loss.chunks, axis.get_group()))
    how = f"; {gathers} gathers per forward pass are in float8" if gathers else ""
    parts = f"{axis.size()} parts of every matrix, of the tokens between them, and of the vocabulary"
    return f"tensor parallelism: {parts}{how}"


def _local(output: Tensor) -> Tensor:
    return output.to_local() if isinstance(output, DTensor) else output


def _gather_tokens(part: nn.Module, axis: DeviceMesh, move: Move) -> None:
    """Give this part of a block all tokens. Its first argument alone has tokens."""

    def gathered(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        first, *others = arguments
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, axis, (TOKENS,), run_check=False)
        return move(first, Replicate()), *others

    part.register_forward_pre_hook(gathered)


def _scatter_tokens(linear: nn.Module, move: Move) -> None:
    """Add up the parts of a row linear's output, and keep this process's tokens."""
    linear.register_forward_hook(lambda module, arguments, output: move(output, TOKENS).to_local())


def _redistributed(activation: DTensor, placement: Placement) -> DTensor:
    return activation.redistribute(placements=(placement,))


def _without_single_rows(move: Move) -> Move:
    """The same for activations (B, T, D), but without the axis B while it is 1.

    With it, Inductor does not fuse the gather with products (torch 2.13). Only for that: compiled for T of any size,
    these views end in a RecursionError.
    """

    def moved(activation: DTensor, placement: Placement) -> DTensor:
        if len(activation) > 1:
            return move(activation, placement)
        flat = cast(DTensor, activation.flatten(0, 1))  # (T, D)
        found = move(flat, Shard(0) if placement == TOKENS else placement)
        return cast(DTensor, found.unflatten(0, (1, -1)))

    return moved


class VocabularyParallelLoss(nn.Module):
    """The summed loss of logits of which each process of a group holds some columns."""

    def __init__(self, chunks: int, group: ProcessGroup) -> None:
        super().__init__()
        self.chunks, self.group = chunks, group
        self.kernels = EAGER

    def forward(self, logits: Tensor, targets: Tensor | None) -> Tensor:
        """logits: (B, T, V / degree); targets: (B, T), equal in the group. Returns the sum, or all logits (B, T, V)."""
        logits = _local(logits)
        if targets is None:
            parts = [torch.empty_like(logits) for _ in range(self.group.size())]
            dist.all_gather(parts, logits.contiguous(), group=self.group)
            return torch.cat(parts, dim=-1)
        targets, width = targets.flatten(), logits.shape[-1]
        columns, counts = targets - self.group.rank() * width, targets != IGNORED  # (B T,)
        own = (columns >= 0) & (columns < width) & counts
        return loss_in_chunks(
            logits.flatten(0, 1),
            columns.where(own, 0),
            own,
            counts,
            chunks=self.chunks,
            kernels=self.kernels,
            combine=self._combine,
        )

    def _combine(self, largest: Tensor, sums: Tensor, at_target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of whole rows, from those of each process's columns: three numbers per token in two messages."""
        of_all = largest.clone()
        dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=self.group)
        both = torch.stack([sums * (largest - of_all).exp(), at_target])  # (2, B T)
        dist.all_reduce(both, group=self.group)
        return of_all, both[0], both[1]
