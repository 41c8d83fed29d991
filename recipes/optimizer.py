"""AdamW with decayed and undecayed parameters."""

import torch
from torch import nn

from parallel.materialize import plain_name
from recipes.schema import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the sharded parameters of `model`, one fused kernel per dtype and device.

    Matrices decay; norm weights and embeddings do not, a tied output projection included (it is the embedding).
    """
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        decays = parameter.dim() >= 2 and plain_name(name) != "embedding.weight"
        (decayed if decays else undecayed).append(parameter)
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": undecayed, "weight_decay": 0.0}],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
