"""Tensor and sequence parallelism, and the loss over a vocabulary in parts.

Each process of a tensor group holds 1 / degree of every matrix. Between the parts of a block it holds 1 / degree of
the tokens of a row: a part gathers them before its first linears, which are cut by output ("column"), and scatters the
sum of its last one, which is cut by input ("row") (Megatron-LM, Korthikanti et al. 2022).

B batch, T tokens, V vocabulary, C tokens of one chunk.
"""

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
from models.loss import IGNORED, SummedLoss
from parallel.errors import UserError
from parallel.float8 import Move, float8_gather, float8_scatter

TOKENS = Shard(1)
"""How the residual stream (B, T, D) is cut."""


def split_over(model: nn.Module, axis: DeviceMesh, *, float8_gathers: bool = False) -> str:
    """Cut every matrix, the residual stream and the loss, in place, over the axis. Returns a line for the log.

    float8_gathers: gather activations as float8. Raises UserError where only some of a part's linears take it.
    """
    interface = interface_of(model)
    inside = interface.inside_block
    plan: dict[str, ParallelStyle] = {name: SequenceParallel() for name in inside.norms}
    plan |= dict.fromkeys(inside.column, ColwiseParallel())
    plan |= dict.fromkeys(inside.row, RowwiseParallel(output_layouts=Partial(), use_local_output=False))
    gathers = 0
    for block in blocks_of(model):
        parallelize_module(block, axis, plan)
        for linear in map(block.get_submodule, inside.row):
            _scatter_tokens(linear, float8_scatter(linear) if float8_gathers else None)
        for name in inside.parts:
            linears = [block.get_submodule(linear) for linear in inside.column if linear.startswith(f"{name}.")]
            gather = float8_gather(linears) if float8_gathers else None
            gathers += gather is not None
            _gather_tokens(block.get_submodule(name), axis, gather)
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
        outside[interface.head] = ColwiseParallel(input_layouts=TOKENS, output_layouts=Shard(-1))
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


def _gather_tokens(part: nn.Module, axis: DeviceMesh, gather: Move | None) -> None:
    """Give this part of a block all tokens, with this function or as they are. Its first argument alone has tokens."""

    def gathered(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        first, *others = arguments
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, axis, (TOKENS,), run_check=False)
        return _redistributed(first, Replicate(), move=gather), *others

    part.register_forward_pre_hook(gathered)


def _scatter_tokens(linear: nn.Module, scatter: Move | None) -> None:
    """Add up the parts of a row linear's output, with this function or as they are, and keep this process's tokens."""

    def scattered(module: nn.Module, arguments: tuple[Any, ...], output: DTensor) -> Tensor:
        return _redistributed(output, TOKENS, move=scatter).to_local()

    linear.register_forward_hook(scattered)


def _redistributed(activation: DTensor, placement: Placement, *, move: Move | None) -> DTensor:
    """An activation (B, T, D) with another placement, by this function or as it is.

    Without the axis of a single row, whose gather along the tokens Inductor would not fuse with products (torch 2.13).
    """
    one_row = len(activation) == 1
    rows = cast(DTensor, activation.flatten(0, 1)) if one_row else activation  # (T, D) or (B, T, D)
    placement = Shard(0) if one_row and placement == TOKENS else placement
    moved = rows.redistribute(placements=(placement,)) if move is None else move(rows, placement)
    return cast(DTensor, moved.unflatten(0, (1, -1))) if one_row else moved


class VocabularyParallelLoss(nn.Module):
    """The summed loss of logits of which each process of a group holds some columns."""

    def __init__(self, chunks: int, group: ProcessGroup) -> None:
        super().__init__()
        self.chunks, self.group = chunks, group

    def forward(self, logits: Tensor, targets: Tensor | None) -> Tensor:
        """logits: (B, T, V / degree); targets: (B, T), equal in the group. Returns the sum, or all logits (B, T, V)."""
        if targets is None:
            parts = [torch.empty_like(logits) for _ in range(self.group.size())]
            dist.all_gather(parts, logits.contiguous(), group=self.group)
            return torch.cat(parts, dim=-1)
        loss: Tensor = _Summed.apply(logits.flatten(0, 1), targets.flatten(), self.chunks, self.group)
        return loss


class _Summed(torch.autograd.Function):
    """The loss of models/loss.py over columns in parts. It keeps the logits and two numbers per token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, chunks: int, group: ProcessGroup) -> Tensor:
        width = logits.shape[-1]
        columns = targets - group.rank() * width
        own = (columns >= 0) & (columns < width) & (targets != IGNORED)
        columns = columns.where(own, 0)[:, None]
        largest, sums, losses = [], [], []
        pieces = zip(*(part.tensor_split(chunks) for part in (logits, columns, own)), strict=True)
        for rows, column, is_own in pieces:
            top = rows.amax(-1).to(torch.float32)
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            powers = (rows - top[:, None]).exp_()  # (C, V / degree), the only float32 tensor as large as that
            at_target = (rows.gather(-1, column)[:, 0] - top) * is_own
            both = torch.stack([powers.sum(-1), at_target])  # (2, C): the softmax's denominator, the target's logit
            del powers  # before the next chunk's
            dist.all_reduce(both, group=group)
            largest.append(top)
            sums.append(both[0])
            losses.append(both[0].log() - both[1])
        counts = targets != IGNORED
        ctx.chunks = chunks
        ctx.save_for_backward(logits, columns, own, counts, torch.cat(largest), torch.cat(sums))
        return torch.where(counts, torch.cat(losses), 0.0).sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
        # Overwrites the logits with their gradient, as models/loss.py does.
        saved = ctx.saved_tensors
        pieces = zip(*(part.tensor_split(ctx.chunks) for part in saved), strict=True)
        for rows, column, is_own, counts, top, total in pieces:
            gradient = (rows - top[:, None]).exp_().div_(total[:, None])  # (C, V / degree)
            gradient.scatter_add_(-1, column, -is_own.to(gradient.dtype)[:, None])
            rows.copy_(gradient.mul_((scale * counts)[:, None]))
            del gradient
        return saved[0], None, None, None
