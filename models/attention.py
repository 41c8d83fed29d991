"""Causal grouped-query attention over PyTorch's scaled_dot_product_attention.

B batch, T tokens, S tokens seen so far and new ones, N query heads, K key/value heads, H head width.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(H)) V where a token sees itself and what came before.

    query: (B, N, T, H); key, value: (B, K, T, H) with N a multiple of K. Returns (B, N, T, H).
    """
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


def attention_to_cached(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same for the last T of S tokens, whose keys and values are there already.

    query: (B, N, T, H); key, value: (B, K, S, H), S >= T. Returns (B, N, T, H).
    """
    new, seen = query.shape[2], key.shape[2]
    if new == seen:
        return causal_attention(query, key, value)
    # A single token sees everything. Of several, scaled_dot_product_attention's own causal mask would place the first
    # at the beginning of the S, not the last at their end.
    # (T, S), True = sees
    mask = None if new == 1 else torch.ones(new, seen, dtype=torch.bool, device=query.device).tril(seen - new)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1])
