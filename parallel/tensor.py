"""Tensor and sequence parallelism, and the loss over a vocabulary in parts.

Each process of a tensor group holds 1 / degree of every matrix. Between the parts of a block it holds 1 / degree of
the tokens of a row: a part gathers them before its first linears, which are cut by output ("column"), and scatters the
sum of its last one, which is cut by input ("row") (Megatron-LM, Korthikanti et al. 2022).

B batch, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from models.interface import BlockInterface, ModelInterface, blocks_of, has_part, inside_of, interface_of
from models.loss import EAGER, IGNORED, SummedLoss, Targets, capped, loss_in_chunks
from parallel.errors import UserError
from parallel.float8 import Move, float8_gather, float8_scatter

TOKENS = Shard(1)
"""How the residual stream (B, T, D) is cut."""


def cut_matrices(model: nn.Module, axis: DeviceMesh, *, float8_gathers: bool = False, overlapped: bool = False) -> str:
    """Cut every matrix, the residual stream and the loss, in place, over the axis. Returns a line for the log.

    float8_gathers: gather activations as float8. Raises UserError where only some of a part's linears take it.
    overlapped: leave activations as Inductor needs them to fuse their messages with products.
    """
    interface = interface_of(model)
    inside = interface.inside_block
    if inside is None:
        raise UserError("mesh.tensor: this model does not say where its blocks can be cut; write tensor = 1")
    moving: Callable[[Move], Move] = _without_single_rows if overlapped else lambda move: move
    gathers = sum(
        _cut_block(block, axis, inside_of(block, inside), float8_gathers, moving) for block in blocks_of(model)
    )
    if float8_gathers and not gathers:
        raise UserError(
            "float8.gather_activations: float8.exclude leaves no linear that reads gathered ones; write false"
        )
    _cut_ends(model, axis, interface, whole_rows=inside.whole_rows)
    if interface.routers is not None:
        _keep_whole(model.get_submodule(interface.routers), axis)
    loss = cast(SummedLoss, model.get_submodule(interface.loss))
    model.set_submodule(interface.loss, VocabularyParallelLoss(loss, axis.get_group()))
    experts = f".{inside.experts}."  # parallel/experts.py cuts them
    if missed := [n for n, p in model.named_parameters() if not isinstance(p, DTensor) and experts not in n]:
        raise UserError(f"mesh.tensor: nothing says how {missed[0]} is cut; write tensor = 1")
    how = f"; {gathers} gathers per forward pass are in float8" if gathers else ""
    parts = f"{axis.size()} parts of every matrix, of the tokens between them, and of the vocabulary"
    return f"tensor parallelism: {parts}{how}"


def _cut_block(
    block: nn.Module, axis: DeviceMesh, inside: BlockInterface, float8_gathers: bool, moving: Callable[[Move], Move]
) -> int:
    """Cut a block's parts and what they read and return. Returns how many of them gather float8."""
    # FSDP sums gradients of norms over the group in float32, but up to torch 2.14 in bfloat16 where a step has a single
    # micro-batch (pytorch #190626): nothing public changes that, and they have been rounded once before.
    # Blocks of transformers may add what a norm returns to the residual stream, which is no DTensor.
    plan: dict[str, ParallelStyle] = dict.fromkeys(inside.norms, SequenceParallel(use_local_output=inside.whole_rows))
    plan |= dict.fromkeys(inside.post_norms, SequenceParallel(use_local_output=True))
    plan |= dict.fromkeys(inside.feature_norms, _InnerNorm(Shard(2), cuts_weight=True))  # (B, T, N, H)
    gathers = 0
    for part in inside.parts:
        column, row, norms = (_within(part, names) for names in (inside.column, inside.row, inside.inner_norms))
        features = Replicate() if part in inside.whole_parts else Shard(-1)
        plan |= dict.fromkeys(column, ColwiseParallel(output_layouts=features))
        plan |= dict.fromkeys(
            row, RowwiseParallel(input_layouts=features, output_layouts=Partial(), use_local_output=False)
        )
        # Heads are an axis in the middle. Which one it is makes no difference to the weight's gradient, a sum over all.
        plan |= dict.fromkeys(norms, _InnerNorm(features if features.is_replicate() else Shard(1)))
    parallelize_module(block, axis, plan)
    for name in filter(partial(has_part, block), inside.shared):  # the gradient of a process is that of its own heads
        block.get_submodule(name).register_forward_hook(
            lambda module, arguments, output: output.to_local(grad_placements=(Partial(),))
        )
    if inside.experts and has_part(block, inside.experts):  # each process brings its own tokens to experts
        _before(block.get_submodule(inside.experts.rpartition(".")[0]), _local)
    for linear in map(block.get_submodule, inside.row):
        scatter = float8_scatter(linear) if float8_gathers else None
        _scatter_tokens(linear, moving(scatter or _redistributed))
    for part in inside.parts:
        linears = [block.get_submodule(name) for name in _within(part, inside.column)]
        gather = float8_gather(linears) if float8_gathers else None
        gathers += gather is not None
        _gather_tokens(block.get_submodule(part), axis, moving(gather or _redistributed))
    return gathers


def _within(part: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(f"{part}.")]


class _InnerNorm(ParallelStyle):
    """A norm inside a part: of each head, of which a process has some, or of all features.

    placement: how what it reads is cut. cuts_weight: whether its weight is cut as well. Then it is of all features of
    all heads, of which a process has some, and the means of squares alone are exchanged.
    """

    def __init__(self, placement: Placement, *, cuts_weight: bool = False) -> None:
        self._placement, self._cuts_weight = placement, cuts_weight

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(name: str, norm: nn.Module, mesh: DeviceMesh) -> None:
            weight = cast(Tensor, norm.weight)
            norm.register_parameter("weight", nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))

        distribute_module(module, device_mesh, cut if self._cuts_weight else None)

        def on_mesh(norm: nn.Module, inputs: tuple[Tensor, ...]) -> DTensor:
            return DTensor.from_local(inputs[0], device_mesh, (self._placement,), run_check=False)

        module.register_forward_pre_hook(on_mesh)
        module.register_forward_hook(lambda norm, inputs, output: _local(output))
        return module


def _cut_ends(model: nn.Module, axis: DeviceMesh, interface: ModelInterface, *, whole_rows: bool) -> None:
    """Cut what is before and after the blocks: embedding, norm and output projection."""
    embedding = cast(nn.Embedding, model.get_submodule(interface.embedding)) if interface.embedding else None
    plan: dict[str, ParallelStyle] = {}
    if interface.embedding is not None:
        plan[interface.embedding] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Replicate() if whole_rows else TOKENS
        )
    if interface.head_norm is not None:
        plan[interface.head_norm] = SequenceParallel(use_local_output=whole_rows)
    projection = interface.head or interface.tied_head
    head = model.get_submodule(projection) if projection else None
    if projection and isinstance(head, nn.Linear):
        # FSDP warns of modules that return views, as the local part of a DTensor is: the loss takes it.
        plan[projection] = ColwiseParallel(input_layouts=TOKENS, output_layouts=Shard(-1), use_local_output=False)
    elif projection and head is not None:
        # A head that is given the embedding's weight multiplies with the part of the vocabulary that the embedding has.
        plan[projection] = PrepareModuleInput(input_layouts=(TOKENS, None), desired_input_layouts=(Replicate(), None))
        head.register_forward_hook(lambda module, inputs, output: _local(output))
    parallelize_module(model, axis, plan)
    if whole_rows:

        def own_tokens(rows: Tensor) -> Tensor:
            whole = DTensor.from_local(rows, axis, (Replicate(),), run_check=False)
            return whole.redistribute(placements=(TOKENS,)).to_local()

        _before(blocks_of(model)[0], own_tokens)
    if embedding is None:
        return
    if interface.head is None and isinstance(head, nn.Linear):
        head.weight = embedding.weight  # each has made its own copy of the same part
    # A compiled block takes the embedding's output, a tensor that still waits for its communication, and hands back a
    # wrong gradient (torch 2.13, pytorch #179849): a copy is an ordinary tensor.
    embedding.register_forward_hook(lambda module, inputs, output: output.clone())


def _keep_whole(routers: nn.Module, axis: DeviceMesh) -> None:
    """Give every process all of their weights, whose gradients are the sums of those for each process's tokens."""
    for name, weight in list(routers.named_parameters()):
        whole = distribute_tensor(weight.data, axis, [Replicate()], src_data_rank=None)
        router, _, own = name.rpartition(".")
        routers.get_submodule(router).register_parameter(own, nn.Parameter(whole))
    routers.register_forward_hook(
        lambda module, arguments, found: {
            layer: (cast(DTensor, weight).to_local(grad_placements=(Partial(),)), bias)
            for layer, (weight, bias) in found.items()
        }
    )


def _before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change the argument that has tokens, the first one, or all in it, before the module sees it."""

    def changed(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if arguments:
            first, *others = arguments
            return (tuple(map(change, first)) if isinstance(first, tuple) else change(first), *others), options
        return (), options | {"hidden_states": change(options["hidden_states"])}

    module.register_forward_pre_hook(changed, with_kwargs=True)


def _local(output: Tensor) -> Tensor:
    return output.to_local() if isinstance(output, DTensor) else output


def _gather_tokens(part: nn.Module, axis: DeviceMesh, move: Move) -> None:
    """Give this part of a block all tokens."""

    def gathered(first: Tensor) -> DTensor:
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, axis, (TOKENS,), run_check=False)
        return move(first, Replicate())

    _before(part, gathered)


def _scatter_tokens(linear: nn.Module, move: Move) -> None:
    """Add up the parts of a row linear's output, and keep this process's tokens."""
    linear.register_forward_hook(lambda module, arguments, output: move(output, TOKENS).to_local())


def _redistributed(activation: DTensor, placement: Placement) -> DTensor:
    return activation.redistribute(placements=(placement,))


def _without_single_rows(move: Move) -> Move:
    """The same move of activations (B, T, D), without the axis B while it is 1.

    With it, Inductor does not fuse the gather with products (torch 2.13). Use it only for that: compiled for any T,
    these views end in a RecursionError.
    """

    def moved(activation: DTensor, placement: Placement) -> DTensor:
        if len(activation) > 1:
            return move(activation, placement)
        flat = cast(DTensor, activation.flatten(0, 1))  # (T, D)
        return cast(DTensor, move(flat, Shard(0) if placement == TOKENS else placement).unflatten(0, (1, -1)))

    return moved


class VocabularyParallelLoss(nn.Module):
    """The summed loss of logits of which each process of a group holds some columns."""

    def __init__(self, whole: SummedLoss, group: ProcessGroup) -> None:
        """whole: the loss that it replaces."""
        super().__init__()
        self.chunks, self.softcap, self.z_loss, self.group = whole.chunks, whole.softcap, whole.z_loss, group
        self.kernels = EAGER
        self.rows: Tensor | None = None
        """As of the whole loss."""

    def forward(self, logits: Tensor, targets: Tensor | None) -> Tensor:
        """logits: (B, T, V / degree); targets: (B, T), equal in the group. Returns as the whole loss does."""
        logits = _local(logits)
        if targets is None:
            logits = capped(logits, self.softcap).to(logits.dtype) if self.softcap else logits
            parts = [torch.empty_like(logits) for _ in range(self.group.size())]
            dist.all_gather(parts, logits.contiguous(), group=self.group)
            return torch.cat(parts, dim=-1)
        targets, width = targets.flatten(), logits.shape[-1]
        columns, counts = targets - self.group.rank() * width, targets != IGNORED  # (B T,)
        own = (columns >= 0) & (columns < width) & counts
        return loss_in_chunks(
            logits.flatten(0, 1),
            Targets(columns.where(own, 0), own, counts),
            chunks=self.chunks,
            kernels=self.kernels,
            combine=self._combine,
            softcap=self.softcap,
            z_loss=self.z_loss if torch.is_grad_enabled() else 0.0,
            rows=self.rows,
        )

    def _combine(self, largest: Tensor, sums: Tensor, at_target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sums of whole rows from those of each process's columns: three numbers per token in two messages."""
        of_all = largest.clone()
        dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=self.group)
        both = torch.stack([sums * (largest - of_all).exp(), at_target])  # (2, B T)
        dist.all_reduce(both, group=self.group)
        return of_all, both[0], both[1]
