"""The optimizer of a recipe: AdamW with two parameter groups, one with weight decay and one without; Muon beside it."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from models.interface import blocks_of
from parallel.mesh import Mesh
from recipes.optimization.adamw import ShardedAdamW
from recipes.optimization.config import OptimizerConfig


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    mesh: Mesh | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
) -> torch.optim.Optimizer:
    """AdamW over the sharded parameters of `model`, or Muon beside it.

    Matrices decay. Norms and biases do not. Embeddings, of tokens, positions or distances, and an output projection
    that is tied to one do so only with decay_embeddings. mesh, dtype: for Muon, which shards it, and of its products.
    compiled: AdamW's updates by kernels of torch.compile, one call for each block; else by torch's fused kernel.
    """
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = _of_blocks(model, embeddings) if config.name == "muon" else {}
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for parameter in model.parameters():
        decays = parameter.dim() >= 2 and (config.decay_embeddings or parameter not in embeddings)
        if parameter not in matrices:
            (decayed if decays else undecayed).append(parameter)
    adamw = ShardedAdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": undecayed, "weight_decay": 0.0}],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        state_dtype=getattr(torch, config.state_dtype),
        blocks=blocks_of(model) if compiled else None,
    )
    if config.name == "adamw":
        return adamw
    from recipes.optimization.muon import Muon

    assert mesh is not None, "Muon without the mesh that shards its matrices"
    return Muon(adamw, [*matrices], config, mesh, dtype=dtype)


def matrices_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that Muon steps, if any."""
    return [parameter for group in optimizer.param_groups if "momentum" in group for parameter in group["params"]]


def _of_blocks(model: nn.Module, embeddings: Collection[Tensor]) -> dict[nn.Parameter, None]:
    """The matrices of the blocks, and those of experts, each once, in the order of the model."""
    found = (parameter for block in blocks_of(model) for parameter in block.parameters())
    return {parameter: None for parameter in found if parameter.dim() >= 2 and parameter not in embeddings}
