"""The training loss: summed cross-entropy. B batch, T tokens, V vocabulary, C tokens of one chunk."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

IGNORED = -100
"""A target with this value does not count in the loss (PyTorch's default)."""


class SummedLoss(nn.Module):
    """cross_entropy_sum as a module without parameters, which tensor parallelism replaces."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks

    def forward(self, logits: Tensor, targets: Tensor | None) -> Tensor:
        """The summed loss, or the logits where there are no targets."""
        return logits if targets is None else cross_entropy_sum(logits, targets, chunks=self.chunks)


def cross_entropy_sum(logits: Tensor, targets: Tensor, *, chunks: int = 1) -> Tensor:
    """Sum over all targets of -log softmax(logits)[target], in nats, computed in float32.

    logits: (B, T, V) of any float type; targets: (B, T) integers, IGNORED where there is no target. The sum, not the
    mean: only the trainer knows how many targets the global batch has. With more than one chunk, no float32 copy of
    all logits exists; the backward pass then overwrites the logits with their gradient, so it cannot run twice.
    """
    rows, targets = logits.flatten(0, 1), targets.flatten()  # (B T, V), (B T)
    return _sum(rows, targets) if chunks == 1 else _InChunks.apply(rows, targets, chunks)


def _sum(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.to(torch.float32), targets, ignore_index=IGNORED, reduction="sum")


class _InChunks(torch.autograd.Function):
    """The same sum, keeping only the logits, in the projection's own type, for the backward pass.

    The projection itself is not chunked: its products need no float32 copies, float8 and FSDP expect it to be called
    once, and its weight's gradient is one product, rounded once. Chunking it too would avoid storing the logits, but
    would need a float32 sum of that gradient instead, which is as large once tokens = 2 D (D model width).
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
    """Overwrite logits (C, V) with scale x (softmax(logits) - one-hot target), or 0 where there is no target."""
    counts = targets != IGNORED
    scales = (scale * counts)[:, None]  # (C, 1)
    columns = targets.where(counts, 0)[:, None]  # (C, 1)
    probabilities = logits.softmax(-1, dtype=torch.float32)  # (C, V)
    at_targets = (probabilities.gather(-1, columns) - 1) * scales  # (C, 1)
    torch.mul(probabilities, scales, out=logits)
    logits.scatter_(-1, columns, at_targets.to(logits.dtype))
