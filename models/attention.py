"""Causal grouped-query attention over PyTorch's scaled_dot_product_attention.

B batch, T tokens, N query heads, K key/value heads, H head width.
"""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(H)) V where a token sees itself and what came before.

    query: (B, N, T, H); key, value: (B, K, T, H) with N a multiple of K. Returns (B, N, T, H).
    """
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])
