"""Activation checkpointing: what the forward pass keeps, and what the backward pass computes again."""

import logging
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operator that is named below
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from models.interface import interface_of
from parallel.config import ActivationCheckpointingConfig

# Attention, by each of the backends that scaled_dot_product_attention may choose, and inside documents.
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
)

# What "selective" keeps. Everything else in a block (norms, rotations, SwiGLU product, residual sums, casts) moves
# few bytes and almost no FLOPs, and compile fuses its recomputation into the kernels that need it.
SAVED = (
    # Matrix products: nearly all FLOPs of a block.
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    # The same in batches: attention without a kernel of its own.
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    *ATTENTION,
    # Norms of tokens, and the largest magnitudes for float8: tiny, but each needs a pass over a whole tensor.
    torch.ops.aten.rsqrt.default,
    torch.ops.aten.amax.default,
    torch.ops.aten.max.default,
    # Communication inside a block: receiving twice costs more than keeping.
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)


def checkpoint_blocks(model: nn.Module, config: ActivationCheckpointingConfig) -> str:
    """Wrap the blocks that recompute, in place; state-dict keys stay those of the plain model. Returns a line for the
    log."""
    if config.mode == "none":
        return "activation checkpointing: off"
    interface = interface_of(model)
    _declare_attention(random=interface.draws_random)
    places = interface.block_at
    chosen = [places[index] for index in config.recomputed(interface.all_layers or len(places)) if index in places]
    for name in chosen:
        # Where nothing in a block draws random numbers, their state need not be kept.
        options: dict[str, Any] = {"preserve_rng_state": interface.draws_random}
        if config.mode == "selective":
            policy = _keep_but_attention if interface.draws_random else _keep_or_recompute
            options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
            # Under compile it warns each process of in-place operations; a block has none.
            logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
        model.set_submodule(name, checkpoint_wrapper(model.get_submodule(name), **options))
    kept = "keeps block inputs only"
    if config.mode == "selective":
        kept = f"keeps matmul{' and attention' if not interface.draws_random else ''} outputs"
    where = f" in {len(chosen)} of {len(places)} blocks" if len(chosen) < len(places) else ""
    return f"activation checkpointing: {config.mode}{where}, {kept}"


def _declare_attention(*, random: bool) -> None:
    """Process-wide: tell torch whether attention draws random numbers. Compiled, torch up to 2.13 saves and restores
    their state around attention that is computed again, whatever its dropout and `preserve_rng_state` (pytorch
    #187985)."""
    seeded = torch.Tag.nondeterministic_seeded
    for operator in ATTENTION:
        if random and seeded not in operator.tags:
            operator.tags.append(seeded)
        elif not random and seeded in operator.tags:
            operator.tags.remove(seeded)


def _keep_but_attention(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Attention that drops draws random numbers. Kept, it would draw none when its block is computed again, and each
    later dropout in the block would then drop other values than in the forward pass."""
    if operator in ATTENTION:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return _keep_or_recompute(context, operator, *arguments, **options)


def _keep_or_recompute(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    # Products and messages of experts, attention with sinks.
    of_ours = getattr(operator, "namespace", None) == "shardwright"
    keeps = of_ours or (operator in SAVED and not _is_partial_sum(operator, arguments))
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _is_partial_sum(operator: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether it is a product over a width that tensor parallelism has cut: the reduce-scatter's result is kept.

    The product itself is as large as without tensor parallelism, and nothing in the backward pass reads it. Only
    without compile, the one of attention (which the feed-forward follows) is computed again nevertheless.
    """
    if operator not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default):
        return False
    first = arguments[operator == torch.ops.aten.addmm.default]  # which has a bias before them
    return isinstance(first, DTensor) and any(placement.is_shard(first.ndim - 1) for placement in first.placements)
