"""The training loss: cross-entropy, summed over the target tokens.

B batch, T tokens, V vocabulary, C tokens of one chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORED = -100
"""A target with this value counts for nothing (PyTorch's own default)."""


def cross_entropy_sum(logits: Tensor, targets: Tensor, *, chunks: int = 1) -> Tensor:
    """Sum over all targets of -log softmax(logits)[target], in nats, computed in float32.

    logits: (B, T, V) of any float type; targets: (B, T) integers, IGNORED where there is none. The sum, not the mean:
    only the trainer knows how many targets the global batch has.

    chunks: more than one computes in so many runs of tokens, so that no float32 copy of all logits exists. The
    backward pass then writes the gradient over the logits, so it cannot run twice.
    """
    rows, targets = logits.flatten(0, 1), targets.flatten()  # (B T, V), (B T)
    return _sum(rows, targets) if chunks == 1 else _InChunks.apply(rows, targets, chunks)


def _sum(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.to(torch.float32), targets, ignore_index=IGNORED, reduction="sum")


class _InChunks(torch.autograd.Function):
    """The same sum with nothing kept for the backward pass but the logits, as the projection gave them.

    The projection itself stays whole: its products need no float32 copies, float8 and FSDP want it called once, and
    its weight's gradient is one product, rounded once. In chunks it would save the logits too, but hold a float32 sum
    of that gradient instead, which is as large from tokens = 2 D on (D model width).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, chunks: int) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.chunks = chunks
        pairs = zip(logits.tensor_split(chunks), targets.tensor_split(chunks), strict=True)
        return torch.stack([_sum(*pair) for pair in pairs]).sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        for pair in zip(logits.tensor_split(ctx.chunks), targets.tensor_split(ctx.chunks), strict=True):
            _replace_by_gradient(*pair, scale)
        return logits, None, None


def _replace_by_gradient(logits: Tensor, targets: Tensor, scale: Tensor) -> None:
    """Write scale x (softmax(logits) - one-hot target), and 0 where there is no target, over the logits (C, V)."""
    counts = targets != IGNORED
    scales = (scale * counts)[:, None]  # (C, 1)
    columns = targets.where(counts, 0)[:, None]  # (C, 1)
    probabilities = logits.softmax(-1, dtype=torch.float32)  # (C, V)
    at_targets = (probabilities.gather(-1, columns) - 1) * scales  # (C, 1)
    torch.mul(probabilities, scales, out=logits)
    logits.scatter_(-1, columns, at_targets.to(logits.dtype))
