"""Causal grouped-query attention over PyTorch's kernels, and rotary position embeddings.

B batch, T tokens with queries, S tokens with keys, of which the T are the last, K key/value heads, N query heads (a
multiple of K), H head width.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from models.config import ModelConfig

if TYPE_CHECKING:
    from models.documents import Restriction


class InnerAttention(nn.Module):
    """The part of attention that looks at other tokens. It has no parameters: context parallelism replaces it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: "Restriction | None" = None) -> Tensor:
        """query: (B, N, T, H); key, value: (B, K, T, H). Returns (B, N, T, H)."""
        if documents is None:
            return causal_attention(query, key, value)
        return attention_in_documents(query, key, value, documents)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(H)) V, causal. query: (B, N, T, H); key, value: (B, K, T, H). Returns (B, N, T, H)."""
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


def attention_to_cached(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of the last T of S. query: (B, N, T, H); key, value: (B, K, S, H). Returns (B, N, T, H)."""
    new, seen = query.shape[2], key.shape[2]
    if new == seen:
        return causal_attention(query, key, value)
    # A single token attends to everything. For several, scaled_dot_product_attention's own causal mask would align the
    # first new token with the first key; the last new token must be aligned with the last key.
    # (T, S), True = attends
    mask = None if new == 1 else torch.ones(new, seen, dtype=torch.bool, device=query.device).tril(seen - new)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1])


def attention_in_documents(query: Tensor, key: Tensor, value: Tensor, documents: "Restriction") -> Tensor:
    """Causal attention inside documents. query: (B, N, T, H); key, value: (B, K, S, H). Returns (B, N, T, H).

    S is T, or more where the documents say so: see of_chunk() in models/documents.py.
    """
    from models.documents import Mask  # most runs have no documents

    if isinstance(documents, Mask):
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, attn_mask=documents.sees, enable_gqa=grouped)
    from models.varlen import attention_by_lengths  # imported late: see models/varlen.py

    return attention_by_lengths(query, key, value, documents)


def rope_tables(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of positions, (T,) or (B, T) integers: float32, positions.shape + (H / 2,) each.

    Recomputed in each forward pass: this costs a few small kernels and avoids a buffer that meta initialization,
    precision policies or sharding could corrupt.
    """
    frequencies = _inverse_frequencies(config, positions.device)  # (H/2,)
    angles = positions.to(torch.float32)[..., None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + H/2]), as Hugging Face checkpoints pair them, by its position's angle, in float32.

    x: (B, T, N, H); cos, sin: (T, H/2) or (B, T, H/2).
    """
    cos, sin = cos[..., None, :], sin[..., None, :]  # ((B,) T, 1, H/2)
    first, second = x.float().chunk(2, dim=-1)  # (B, T, N, H/2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _inverse_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians per token for each pair, (H/2,) float32."""
    exponent = torch.arange(0, config.head_width, 2, dtype=torch.float32, device=device) / config.head_width
    frequencies = 1.0 / config.rope_theta**exponent
    if config.rope_scaling == "none":
        return frequencies
    # Llama 3.1: wavelengths longer than the original context are stretched by `factor`, short ones are unchanged, and
    # those between are interpolated (The Llama 3 Herd of Models; apply_scaling in the llama-models reference code).
    wavelengths = 2 * math.pi / frequencies
    low, high = config.rope_low_frequency_factor, config.rope_high_frequency_factor
    keep = ((config.rope_original_length / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / config.rope_factor
