"""The training loss: summed cross-entropy. B batch, T tokens, R rows = B T, V vocabulary, C rows of one chunk."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

IGNORED = -100
"""A target with this value does not count in the loss (PyTorch's default)."""


def sum_exponentials(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of logits (C, V): the largest, and the sum of exp(logit - largest); (C,) each, in float32."""
    values = logits.to(torch.float32)
    largest = values.amax(-1, keepdim=True)  # (C, 1)
    sums = (values - largest).exp_().sum(-1, keepdim=True)  # (C, 1)
    return largest[:, 0], sums[:, 0]


def overwrite_by_exponentials(logits: Tensor, largest: Tensor, factors: Tensor) -> None:
    """Replace logits (C, V), in place, by exp(logits - largest) x factors, with largest and factors (C,)."""
    torch.mul((logits - largest[:, None]).exp_(), factors[:, None], out=logits)


@dataclass(frozen=True)
class Kernels:
    """The two functions that read or write all logits of a chunk. Compiled, each is one kernel without copies."""

    sum_exponentials: Callable[[Tensor], tuple[Tensor, Tensor]] = sum_exponentials
    overwrite_by_exponentials: Callable[[Tensor, Tensor, Tensor], None] = overwrite_by_exponentials


EAGER = Kernels()


class SummedLoss(nn.Module):
    """cross_entropy_sum as a module without parameters, which tensor parallelism replaces."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.kernels = EAGER

    def forward(self, logits: Tensor, targets: Tensor | None) -> Tensor:
        """The summed loss, or the logits where there are no targets."""
        if targets is None:
            return logits
        return cross_entropy_sum(logits, targets, chunks=self.chunks, kernels=self.kernels)


def cross_entropy_sum(logits: Tensor, targets: Tensor, *, chunks: int = 1, kernels: Kernels = EAGER) -> Tensor:
    """Sum over all targets of -log softmax(logits)[target], in nats, computed in float32.

    logits: (B, T, V) of any float type; targets: (B, T) integers, IGNORED where there is no target. The sum, not the
    mean: only the trainer knows how many targets the global batch has. With more than one chunk, or with compiled
    kernels, no float32 copy of all logits exists; the backward pass then overwrites the logits with their gradient, so
    it cannot run twice.
    """
    rows, targets = logits.flatten(0, 1), targets.flatten()  # (R, V), (R,)
    if chunks == 1 and kernels is EAGER:
        return cross_entropy(rows.to(torch.float32), targets, ignore_index=IGNORED, reduction="sum")
    counts = targets != IGNORED
    return loss_in_chunks(rows, targets.where(counts, 0), counts, counts, chunks=chunks, kernels=kernels)


Combine = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Makes the largest logits, the sums of exponentials and the targets' logits, (R,) each, those of whole rows."""


def loss_in_chunks(
    logits: Tensor,
    columns: Tensor,
    own: Tensor,
    counts: Tensor,
    *,
    chunks: int,
    kernels: Kernels = EAGER,
    combine: Combine = lambda *whole: whole,
) -> Tensor:
    """The same sum, keeping only the logits, in the projection's own type, for the backward pass.

    The projection itself is not chunked: its products need no float32 copies, float8 and FSDP expect it to be called
    once, and its weight's gradient is one product, rounded once. Chunking it too would avoid storing the logits, but
    would need a float32 sum of that gradient instead, which is as large once tokens = 2 D (D model width).

    Args:
        logits: (R, V), or some columns of them.
        columns: (R,), which of these columns is the target; any of them where none is.
        own: (R,), whether one of these columns is the target.
        counts: (R,), whether there is a target.
        chunks: number of parts of about R / chunks rows, one after the other.
        kernels: what runs over the logits of a chunk.
        combine: for logits of which this process has some columns.
    """
    whole = logits.contiguous()  # torch.compile refuses to write into anything else
    loss: Tensor = _InChunks.apply(whole, columns, own, counts, chunks, kernels, combine)
    return loss


class _InChunks(torch.autograd.Function):
    """loss_in_chunks.

    The backward pass reads the logits again. Computing the gradient in the forward pass, beside the sums, would save
    that; but it is multiplied by a factor that is known only afterwards, and doing that costs what was saved, and more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        columns: Tensor,
        own: Tensor,
        counts: Tensor,
        chunks: int,
        kernels: Kernels,
        combine: Combine,
    ) -> Tensor:
        found = [kernels.sum_exponentials(rows) for rows in logits.tensor_split(chunks)]
        largest, sums = (torch.cat(parts) for parts in zip(*found, strict=True))  # (R,)
        at_target = logits.gather(-1, columns[:, None])[:, 0].to(torch.float32).where(own, 0)
        largest, sums, at_target = combine(largest, sums, at_target)
        ctx.save_for_backward(logits, columns, own, counts, largest, sums)
        ctx.chunks, ctx.kernels = chunks, kernels
        return (sums.log() + (largest - at_target)).where(counts, 0).sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Overwrite the logits with scale x (softmax(logits) - one-hot target), or 0 where there is no target."""
        saved, columns, own, counts, largest, sums = ctx.saved_tensors
        logits = saved.detach()  # else autograd asks whether a chunk's view is as old as what became of another one
        scales = scale * counts  # (R,)
        at = torch.arange(len(columns), device=columns.device), columns
        at_target = ((logits[at] - largest).exp() / sums - own.to(torch.float32)) * scales  # (R,)
        for chunk in zip(*(part.tensor_split(ctx.chunks) for part in (logits, largest, scales / sums)), strict=True):
            ctx.kernels.overwrite_by_exponentials(*chunk)
        logits[at] = at_target.to(logits.dtype)
        return logits, *[None] * 6
