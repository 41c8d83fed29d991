"""The training loss: summed cross-entropy. B batch, T tokens, R rows = B T, V vocabulary, C rows of one chunk."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, nll_loss

IGNORED = -100
"""A target with this value does not count in the loss (PyTorch's default)."""


def capped(logits: Tensor, softcap: float) -> Tensor:
    """softcap x tanh(logits / softcap) (Gemma 2, section 2), in float32; 0 = the logits as they are, in float32."""
    values = logits.to(torch.float32)
    return values.div(softcap).tanh_().mul(softcap) if softcap else values


def sum_exponentials(logits: Tensor, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """The largest of each row of logits (C, V), and the row's sum of exp(logit - largest); (C,) each, in float32."""
    values = capped(logits, softcap)
    largest = values.amax(-1, keepdim=True)  # (C, 1)
    sums = (values - largest).exp_().sum(-1, keepdim=True)  # (C, 1)
    return largest[:, 0], sums[:, 0]


def overwrite_by_exponentials(logits: Tensor, largest: Tensor, factors: Tensor, softcap: float = 0.0) -> None:
    """Replace logits (C, V), in place, by exp(logits - largest) x factors, with largest and factors (C,).

    Capped logits take the place of logits, and the result is multiplied by their slope.
    """
    if not softcap:
        torch.mul((logits - largest[:, None]).exp_(), factors[:, None], out=logits)
        return
    values = capped(logits, softcap)
    slopes = 1 - (values / softcap).square()
    torch.mul((values - largest[:, None]).exp_() * factors[:, None], slopes, out=logits)


@dataclass(frozen=True)
class Kernels:
    """The two functions that read or write all logits of a chunk. Compiled, each is one kernel without copies."""

    sum_exponentials: Callable[..., tuple[Tensor, Tensor]] = sum_exponentials
    overwrite_by_exponentials: Callable[..., None] = overwrite_by_exponentials


EAGER = Kernels()


class SummedLoss(nn.Module):
    """cross_entropy_sum as a module without parameters, which tensor parallelism replaces."""

    def __init__(self, chunks: int, *, softcap: float = 0.0, z_loss: float = 0.0) -> None:
        super().__init__()
        self.chunks, self.softcap, self.z_loss = chunks, softcap, z_loss
        self.kernels = EAGER
        self.rows: Tensor | None = None
        """Where the next call notes the loss and the number of targets of each row of tokens, (2, B); None: nowhere."""

    def forward(self, logits: Tensor, targets: Tensor | None) -> Tensor:
        """The summed loss, or the (capped) logits where there are no targets.

        A z-loss is for training: only while gradients are recorded is the result (2,), as of cross_entropy_sum().
        """
        if targets is None:
            return capped(logits, self.softcap).to(logits.dtype) if self.softcap else logits
        return cross_entropy_sum(
            logits,
            targets,
            chunks=self.chunks,
            kernels=self.kernels,
            softcap=self.softcap,
            z_loss=self.z_loss if torch.is_grad_enabled() else 0.0,
            rows=self.rows,
        )


def note_rows(rows: Tensor | None, losses: Tensor, counts: Tensor) -> None:
    """Write the sums over each row of tokens to `rows`, (2, B), if there is one. losses, counts: (B T,)."""
    if rows is not None:
        rows.copy_(torch.stack([losses.detach(), counts]).unflatten(1, (rows.shape[1], -1)).sum(-1))


def cross_entropy_sum(
    logits: Tensor,
    targets: Tensor,
    *,
    chunks: int = 1,
    kernels: Kernels = EAGER,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    rows: Tensor | None = None,
) -> Tensor:
    """Sum over all targets of -log softmax(logits)[target], in nats, computed in float32.

    logits: (B, T, V) of any float type; targets: (B, T) integers, IGNORED where there is no target. The sum, not the
    mean: only the trainer knows how many targets the global batch has. softcap: the logits are capped() by it. With a
    z_loss, the result is (2,): that sum, and the sum of z_loss x log(Z)^2, Z being the sum of exp(logits) of a row with
    a target (PaLM, section 5). With more than one chunk, compiled kernels, a softcap or a z_loss, no float32 copy of
    all logits exists (but for one chunk of eager kernels, for a moment); the backward pass then overwrites the logits
    with their gradient, so it cannot run twice. rows: as SummedLoss.rows.
    """
    flat, targets = logits.flatten(0, 1), targets.flatten()  # (R, V), (R,)
    counts = targets != IGNORED
    if chunks == 1 and kernels is EAGER and not softcap and not z_loss:
        shares = log_softmax(flat.to(torch.float32), -1)
        if rows is not None:
            note_rows(rows, nll_loss(shares.detach(), targets, ignore_index=IGNORED, reduction="none"), counts)
        return nll_loss(shares, targets, ignore_index=IGNORED, reduction="sum")
    found = Targets(targets.where(counts, 0), counts, counts)
    return loss_in_chunks(flat, found, chunks=chunks, kernels=kernels, softcap=softcap, z_loss=z_loss, rows=rows)


class Targets(NamedTuple):
    """The targets of rows of logits, of which a process may have some columns; (R,) each."""

    columns: Tensor
    """Which of these columns is the target; any of them where none is."""
    own: Tensor
    """Whether one of these columns is the target."""
    counts: Tensor
    """Whether there is a target."""


Combine = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Turns the largest logits, the sums of exponentials and the targets' logits, (R,) each, into those of whole rows."""


def loss_in_chunks(
    logits: Tensor,
    targets: Targets,
    *,
    chunks: int,
    kernels: Kernels = EAGER,
    combine: Combine = lambda *whole: whole,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    rows: Tensor | None = None,
) -> Tensor:
    """The sums of cross_entropy_sum(), keeping only the logits, in the projection's own type, for the backward pass.

    The projection itself is not chunked: its products need no float32 copies, float8 and FSDP expect it to be called
    once, and its weight's gradient is one product, rounded once. Chunking it too would avoid storing the logits, but
    would need a float32 sum of that gradient instead, which is as large once tokens = 2 D (D model width).

    Args:
        logits: (R, V), or some columns of them.
        targets: of these rows.
        chunks: number of parts of about R / chunks rows, one after the other.
        kernels: what runs over the logits of a chunk.
        combine: for logits of which this process has some columns.
        softcap, z_loss, rows: as of cross_entropy_sum().
    """
    whole = logits.contiguous()  # torch.compile refuses to write into anything else
    return cast(Tensor, _InChunks.apply(whole, *targets, chunks, kernels, combine, softcap, z_loss, rows))


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
        softcap: float,
        z_loss: float,
        rows: Tensor | None,
    ) -> Tensor:
        ctx.chunks, ctx.kernels, ctx.softcap, ctx.z_loss = chunks, kernels, softcap, z_loss
        cap = (softcap,) if softcap else ()
        found = [kernels.sum_exponentials(chunk, *cap) for chunk in logits.tensor_split(chunks)]
        largest, sums = (torch.cat(parts) for parts in zip(*found, strict=True))  # (R,)
        at_target = capped(logits.gather(-1, columns[:, None])[:, 0], softcap).where(own, 0)
        largest, sums, at_target = combine(largest, sums, at_target)
        ctx.save_for_backward(logits, columns, own, counts, largest, sums)
        losses = (sums.log() + (largest - at_target)).where(counts, 0)
        note_rows(rows, losses, counts)
        loss = losses.sum()
        if not z_loss:
            return loss
        return torch.stack([loss, z_loss * (sums.log() + largest).where(counts, 0).square().sum()])

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Overwrite the logits with scale x (softmax(logits) - one-hot target), or 0 where there is no target.

        A z-loss adds its scale x 2 z_loss log(Z) x softmax(logits); a softcap multiplies all by its slope.
        """
        saved, columns, own, counts, largest, sums = ctx.saved_tensors
        logits = saved.detach()  # else autograd asks whether a chunk's view is as old as what became of another one
        scale, *scale_of_z = scale.unbind() if ctx.z_loss else [scale]
        scales = scale * counts  # (R,)
        at = torch.arange(len(columns), device=columns.device), columns
        values = capped(logits[at], ctx.softcap)  # (R,)
        shares = (values - largest).exp() / sums
        at_target = (shares - own.to(torch.float32)) * scales  # (R,)
        for scale_of_squares in scale_of_z:
            pulls = scale_of_squares * counts * 2 * ctx.z_loss * (sums.log() + largest)
            at_target, scales = at_target + shares * pulls, scales + pulls
        if ctx.softcap:
            at_target = at_target * (1 - (values / ctx.softcap).square())
        cap = (ctx.softcap,) if ctx.softcap else ()
        for chunk in zip(*(part.tensor_split(ctx.chunks) for part in (logits, largest, scales / sums)), strict=True):
            ctx.kernels.overwrite_by_exponentials(*chunk, *cap)
        logits[at] = at_target.to(logits.dtype)
        return logits, *[None] * 9
