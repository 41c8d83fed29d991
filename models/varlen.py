"""Attention kernels for documents of varying lengths in one row. Importing this takes almost a second: import it late.

B batch, T tokens, S tokens with keys, N query heads, K key/value heads, H head width.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from models.documents import Lengths

# torch 2.12 and later require this argument for grouped queries; 2.11 does not have it and takes them as they are.
ASKS_FOR_GROUPED_QUERIES = "enable_gqa" in signature(varlen_attn).parameters


def attention_by_lengths(
    query: Tensor, key: Tensor, value: Tensor, documents: Lengths, *, window: int = 0, scale: float | None = None
) -> Tensor:
    """Causal attention inside documents on CUDA, in bfloat16 or float16. Shapes, window and scale as in attend().

    The last query of a document is aligned with its last key, where it has fewer queries than keys.
    """
    out = _computed(query, key, value, documents, window=window, scale=scale)
    assert isinstance(out, Tensor)  # it returns a tuple only on request
    return out.unflatten(0, (len(query), -1)).transpose(1, 2)  # (B, N, T, H)


def attention_and_sums(
    query: Tensor, key: Tensor, value: Tensor, documents: Lengths, *, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The same, and each query's log-sum-exp, (B, N, T), which has no gradient (torch 2.13)."""
    out, sums = _computed(query, key, value, documents, window=window, scale=scale, return_aux=AuxRequest(lse=True))
    return out.unflatten(0, (len(query), -1)).transpose(1, 2), sums.unflatten(1, (len(query), -1)).transpose(0, 1)


def _computed(
    query: Tensor, key: Tensor, value: Tensor, documents: Lengths, *, window: int, scale: float | None, **options: Any
) -> Any:
    length, longest_keys = query.shape[2], key.shape[2]
    options |= {"enable_gqa": query.shape[1] != key.shape[1]} if ASKS_FOR_GROUPED_QUERIES else {}
    options |= {} if scale is None else {"scale": scale}
    query, key, value = _flat(query, key, value)
    # The longest document is at most a row. Its exact length would have to come from the device, at every step.
    return varlen_attn(
        query,
        key,
        value,
        documents.cumulative,
        documents.cumulative if documents.of_keys is None else documents.of_keys,
        length,
        longest_keys,
        window_size=(window - 1, 0),  # tokens before and after each one: -1 = all, 0 after it = causal
        **options,
    )


def gradients_by_lengths(*heads: Tensor, documents: Lengths, window: int, scale: float) -> list[Tensor]:
    """The gradients of query, key and value. heads: gradient, query, key, value, output, log-sum-exp; the last two as
    attention_and_sums() has them, or with sinks (models/sinks.py)."""
    *others, sums = heads
    of_queries, of_keys = documents
    lengths = of_queries, of_queries if of_keys is None else of_keys, others[1].shape[2], others[2].shape[2]
    of_dropout = torch.zeros(2, dtype=torch.uint64, device=sums.device)  # which there is none of
    found = torch.ops.torch_attn._varlen_attn_backward(
        *_flat(*others), sums.transpose(0, 1).flatten(1), *lengths, window == 0, of_dropout, scale, [window - 1, 0]
    )
    return [one.unflatten(0, (len(sums), -1)).transpose(1, 2) for one in found]


def _flat(*heads: Tensor) -> list[Tensor]:
    """(B, N or K, T or S, H) -> (B T or S, N or K, H), of each."""
    return [x.transpose(1, 2).flatten(0, 1) for x in heads]
