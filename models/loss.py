"""The training loss: cross-entropy, summed over the target tokens."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORED = -100
"""A target with this value counts for nothing (PyTorch's own default)."""


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over all targets of -log softmax(logits)[target], in nats, computed in float32.

    logits: (B, T, V) of any float type; targets: (B, T) integers, IGNORED where there is none. The sum, not the mean:
    only the trainer knows how many targets the global batch has.
    """
    return cross_entropy(
        logits.flatten(0, 1).to(torch.float32), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
