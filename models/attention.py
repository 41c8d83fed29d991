"""Causal grouped-query attention over PyTorch's kernels.

B batch, T tokens, S all tokens, cached and new, N query heads, K key/value heads, H head width.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from models.documents import Lengths, Mask


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(H)) V, where each token attends to itself and to earlier tokens.

    query: (B, N, T, H); key, value: (B, K, T, H) with N a multiple of K. Returns (B, N, T, H).
    """
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


def attention_to_cached(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention for the last T of S tokens, given the keys and values of all S.

    query: (B, N, T, H); key, value: (B, K, S, H), S >= T. Returns (B, N, T, H).
    """
    new, seen = query.shape[2], key.shape[2]
    if new == seen:
        return causal_attention(query, key, value)
    # A single token attends to everything. For several, scaled_dot_product_attention's own causal mask would align the
    # first new token with the first key; the last new token must be aligned with the last key.
    # (T, S), True = attends
    mask = None if new == 1 else torch.ones(new, seen, dtype=torch.bool, device=query.device).tril(seen - new)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1])


def attention_in_documents(query: Tensor, key: Tensor, value: Tensor, documents: Mask | Lengths) -> Tensor:
    """Causal attention, where each token attends only to itself and to earlier tokens of its document.

    query: (B, N, T, H); key, value: (B, K, T, H) with N a multiple of K. Returns (B, N, T, H).
    """
    if isinstance(documents, Mask):
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, attn_mask=documents.sees, enable_gqa=grouped)
    from models.varlen import attention_by_lengths  # imported late: see models/varlen.py

    return attention_by_lengths(query, key, value, documents)
