"""What attention's kernels lack: the largest logits, a further product of queries and keys, and sinks, a learned logit
of each query head in the denominator of its softmax (GPT-OSS).

With L the log-sum-exp of a query's scores, s the sink and L' = log(exp(L) + exp(s)), what a token attends to is what it
would be without a sink, times exp(L - L'). So kernels without sinks compute them: their output is scaled, and their
backward pass is given L' and the scaled output, from which it has the shares of attention and their gradients.

B batch, T tokens with queries, S tokens with keys, N query heads, K key/value heads, H head width.
"""

from typing import Any

import torch
from torch import Tensor, library

from models.documents import Lengths

SCORES = 2**24
"""Scores in memory at a time."""


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """What models.attention.attend() returns, with sinks, (N,). mask: (B or 1, 1, T, S) or (T, S) bool, or None for a
    causal one. GPUs have no such kernel: they write all scores into memory."""
    scale = scale or query.shape[-1] ** -0.5
    if query.device.type != "cpu":
        return by_all_scores(query, key, value, sinks, mask, scale)
    return with_sinks(query, key, value, sinks, mask, None, None, 0, scale)[0]


def by_all_scores(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """The same by the definition, with (B, N, T, S) in memory."""
    new, seen = query.shape[2], key.shape[2]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    if mask is None:
        mask = torch.ones(new, seen, dtype=torch.bool, device=query.device).tril(seen - new)
    scores = (scale * (query @ key.mT).float()).masked_fill(~mask, -torch.inf)  # (B, N, T, S)
    beside = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, beside), dim=-1).softmax(-1)[..., :-1].to(value.dtype) @ value


@library.custom_op("shardwright::with_sinks", mutates_args=())
def with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    mask: Tensor | None,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention, (B, N, T, H), and L', (B, N, T) float32: on CPUs with a mask, as above, on GPUs in 16 bits by the two
    parts of Lengths. An operator, so that selective checkpointing keeps what it returns."""
    if of_queries is None:
        options: dict[str, Any] = {"attn_mask": _added(mask, query), "scale": scale}
        causal = mask is None and query.shape[2] > 1
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, **options
        )
    else:
        from models.varlen import attention_and_sums  # imported late: see models/varlen.py

        out, sums = attention_and_sums(query, key, value, Lengths(of_queries, of_keys), window=window, scale=scale)
    whole = torch.logaddexp(sums, sinks.float()[:, None])  # (B, N, T)
    return out.mul_((sums - whole).exp()[..., None]), whole.contiguous()


@with_sinks.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask as what is added to scores, with four axes."""
    if mask is None:
        return None
    mask = mask if mask.dim() == 4 else mask[None, None]
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, sinks, mask, of_queries, of_keys, out, whole = ctx.saved_tensors
    heads, options = (gradient, query, key, value, out, whole), {"scale": ctx.scale}
    if of_queries is None:
        causal, added = mask is None and query.shape[2] > 1, _added(mask, query)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = backward(*heads, 0.0, causal, attn_mask=added, **options)
    else:
        from models.varlen import gradients_by_lengths

        found = gradients_by_lengths(*heads, documents=Lengths(of_queries, of_keys), window=ctx.window, **options)
    share = (sinks.float()[:, None] - whole).exp()  # of the sink, (B, N, T)
    of_sinks = -(share * (gradient * out).sum(-1, dtype=torch.float32)).sum((0, 2)).to(sinks.dtype)
    return *found, of_sinks, None, None, None, None, None


with_sinks.register_autograd(_gradients, setup_context=_keep)


def note(largest: Tensor, query: Tensor, key: Tensor, documents: Any, reach: dict[str, Any]) -> None:
    """Raise `largest`, (N,) float32, to the largest logit of each head. The others: as of models.attention.attend()."""
    sees, *lengths = (getattr(documents, one, None) for one in ("sees", "cumulative", "of_keys"))  # of Mask, or Lengths
    found = largest_products(query.detach(), key.detach(), sees, *lengths, reach["window"])
    largest.copy_(torch.maximum(largest, found * (reach["scale"] or query.shape[-1] ** -0.5)))


# An operator, so that torch.compile does not look into its loop, and selective checkpointing keeps what it returns.
@library.custom_op("shardwright::largest_products", mutates_args=())
def largest_products(
    query: Tensor, key: Tensor, sees: Tensor | None, of_queries: Tensor | None, of_keys: Tensor | None, window: int
) -> Tensor:
    """Of each head, (N,) float32, over query, (B, N, T, H), and key, (B, K, S, H), computed in their type. sees: of a
    Mask. of_queries, of_keys: of Lengths."""
    (batch, heads, new, _), (_, groups, seen, _), device = query.shape, key.shape, query.device
    largest = torch.full((heads,), -torch.inf, device=device)
    index, rows = torch.arange(seen, device=device), torch.arange(batch, device=device)[:, None]
    for own in torch.arange(new, device=device).split(max(1, SCORES // (batch * heads * seen))):  # (C,)
        place = own[:, None] + seen - new
        inside = ((index <= place) & (index > place - (window or seen)))[None, None]  # (B or 1, 1, C, S)
        if sees is not None:
            inside = inside & sees[:, :, own]
        if of_queries is not None:  # each token has the number of its document
            whose = torch.searchsorted(of_queries, rows * new + own, right=True)  # (B, C)
            of_key = torch.searchsorted(of_queries if of_keys is None else of_keys, rows * seen + index, right=True)
            inside = inside & (whose[:, None, :, None] == of_key[:, None, None])
        queries = query[:, :, own].unflatten(1, (groups, -1)).flatten(2, 3)  # (B, K, N / K x C, H)
        scores = (queries @ key.mT).view(batch, heads, -1, seen)  # (B, N, C, S)
        largest = torch.maximum(largest, scores.masked_fill(~inside, -torch.inf).amax((0, 2, 3)).float())
    return largest


largest_products.register_fake(lambda query, *_: query.new_empty(query.shape[1:2], dtype=torch.float32))
