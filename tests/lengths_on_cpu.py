"""The code path of GPUs for documents by their lengths, on the CPU: its kernel is replaced by the same mathematics."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from unittest.mock import patch

import torch
from torch import Tensor

from models.documents import Documents, Lengths

Ends = tuple[Tensor, Tensor]
"""Cumulative lengths of the documents' queries and of their keys."""


def probabilities(query: Tensor, key: Tensor, scale: float | None, window: Sequence[int] | None) -> Tensor:
    """Attention weights of one document: (heads, queries or keys, head width) each -> (heads, queries, keys).

    window: tokens before and after each one that it sees, -1 = all; causal without it.
    """
    return masked_scores(query, key, scale, window).softmax(-1).nan_to_num(0.0)


def masked_scores(query: Tensor, key: Tensor, scale: float | None, window: Sequence[int] | None) -> Tensor:
    """Those of one document, with -inf where a token does not see another."""
    scores = query @ key.mT * scale_of(query, scale)
    before, after = window or (-1, 0)
    assert after == 0
    shift = key.shape[1] - query.shape[1]  # the last are aligned
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + shift)
    if before >= 0:
        hidden |= torch.ones_like(hidden).tril(shift - before - 1)
    return scores.masked_fill(hidden, -math.inf)


def scale_of(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def alone(ends: Ends, query: Tensor, *others: Tensor, by_query: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """(tokens, heads, head width) each -> (heads, length, head width) per document, with equally many heads each.

    by_query: how many of the others have a token for each query, not for each key.
    """
    heads = query.shape[1]
    for queries, keys in zip(*(pairwise(cumulative.tolist()) for cumulative in ends), strict=True):
        spans = [queries] * (1 + by_query) + [keys] * (len(others) - by_query)
        pieces = (x[slice(*span)] for x, span in zip((query, *others), spans, strict=True))
        yield tuple(piece.repeat_interleave(heads // piece.shape[1], 1).transpose(0, 1) for piece in pieces)


def forward(query, key, value, cumulative, of_keys, longest, longest_keys, causal, scale=None, window=None, *args):  # type: ignore[no-untyped-def]
    """As torch_attn::_varlen_attn."""
    assert causal or window
    for ends, packed, most in ((cumulative, query, longest), (of_keys, key, longest_keys)):
        assert ends.dtype == torch.int32 and ends[0] == 0 and ends[-1] == len(packed) and ends.diff().max() <= most
    pieces = [probabilities(q, k, scale, window) @ v for q, k, v in alone((cumulative, of_keys), query, key, value)]
    out = torch.cat(pieces, dim=1).transpose(0, 1).contiguous()
    heads = alone((cumulative, of_keys), query, key)
    sums = torch.cat([masked_scores(q, k, scale, window).logsumexp(-1) for q, k in heads], dim=1)
    return out, sums.float(), torch.zeros(2, dtype=torch.uint64)


def backward(gradient, query, key, value, out, lse, cumulative, of_keys, *args):  # type: ignore[no-untyped-def]
    """As torch_attn::_varlen_attn_backward."""
    *_, scale, window = args
    pieces = []
    each = (query, gradient, out, lse.T[..., None], key, value)
    for q, g, o, sums, k, v in alone((cumulative, of_keys), *each, by_query=3):
        p = (masked_scores(q, k, scale, window) - sums.to(q.dtype)).exp().nan_to_num(0.0)  # as the kernels do
        by_scores = p * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale_of(q, scale)
        pieces.append((by_scores @ k, by_scores.mT @ q, p.mT @ g))
    found = (torch.cat(parts, dim=1).transpose(0, 1) for parts in zip(*pieces, strict=True))
    # A key and a value serve several queries and get the sum of their gradients.
    shapes = ((len(x), x.shape[1], -1, x.shape[2]) for x in (query, key, value))
    return tuple(x.reshape(shape).sum(2) for x, shape in zip(found, shapes, strict=True))


@contextmanager
def lengths_on_cpu() -> Iterator[None]:
    """Models take documents by their lengths inside."""
    from torch.nn.attention import varlen

    operators = {varlen._varlen_attn: forward, varlen._varlen_attn_backward: backward}
    for operator, kernel in operators.items():
        operator.register_kernel("cpu", kernel)
        operator._disabled_kernel.discard("cpu")
    torch.compiler.reset()
    with patch.object(Documents, "for_attention_in", lambda self, dtype: Lengths(self.cumulative_lengths)):
        yield
    torch.compiler.reset()
    for operator in operators:  # a CPU has no such kernel for the tests that follow
        operator._disabled_kernel.add("cpu")
