"""Causal grouped-query attention over PyTorch's kernels, and rotary position embeddings.

B batch, T tokens with queries, S tokens with keys, of which the T are the last, K key/value heads, N query heads (a
multiple of K), H head width.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from models.config import ModelConfig

if TYPE_CHECKING:
    from models.documents import Restriction


class Sinks(nn.Module):
    """A logit of each query head in the denominator of its softmax. A module, which tensor groups cut as norms."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def forward(self, query: Tensor) -> Tensor:
        """query: (B, T, N, H). Returns (N,)."""
        return self.weight


class InnerAttention(nn.Module):
    """The part of attention that looks at other tokens. It has no parameters: context parallelism replaces it."""

    def __init__(self, *, window: int = 0, scale: float | None = None) -> None:
        """window, scale: as of attend()."""
        super().__init__()
        # attention.backend, chosen before a model is built; a compiled block cannot ask.
        self.reach: dict[str, Any] = {
            "window": window,
            "scale": scale,
            "flash": torch.backends.cuda.flash_sdp_enabled(),
        }
        self.largest: Tensor | None = None  # (N,) float32: the largest logit of each head in training, if asked for

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, documents: "Restriction | None" = None, *sinks: Tensor
    ) -> Tensor:
        """query: (B, N, T, H); key, value: (B, K, S, H); sinks: (N,), if any. Returns (B, N, T, H)."""
        if self.largest is not None and torch.is_grad_enabled():
            from models.sinks import note  # most runs do not ask

            note(self.largest, query, key, documents, self.reach)
        return attend(query, key, value, documents, *sinks, **self.reach)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: "Restriction | None" = None,
    sinks: Tensor | None = None,
    *,
    window: int = 0,
    scale: float | None = None,
    flash: bool = True,
) -> Tensor:
    """softmax(Q K^T x scale) V of the last T of S tokens, causal. Returns (B, N, T, H).

    Args:
        query, key, value: (B, N, T, H), (B, K, S, H), and the same, or narrower: the result is as wide as value.
        documents: what keeps attention inside documents; where S is more than T, of_chunk() has made it.
        sinks: (N,), if heads have them.
        window: tokens that a token sees, itself and those before it; 0 = all.
        scale: None = 1 / sqrt(H).
        flash: whether windows may be computed by flash kernels for lengths, where the device has them.
    """
    if narrower := query.shape[-1] - value.shape[-1]:  # few kernels take that: they get zeros beside it
        out = attend(query, key, pad(value, (0, narrower)), documents, sinks, window=window, scale=scale, flash=flash)
        return out[..., :-narrower]
    new, seen = query.shape[2], key.shape[2]
    window = 0 if window >= seen else window
    mask = None  # (B or 1, 1, T, S), True = attends
    if documents is not None or window or sinks is not None:  # most runs have neither
        from models.documents import Lengths, has_kernel_for_lengths, whole_rows

        if documents is None and flash and has_kernel_for_lengths(query):
            documents = whole_rows(query, key)  # for kernels that take lengths, every row is one document
        if isinstance(documents, Lengths) and sinks is not None:
            from models.sinks import with_sinks  # most models have none

            return with_sinks(query, key, value, sinks, None, *documents, window, scale or query.shape[-1] ** -0.5)[0]
        if isinstance(documents, Lengths):
            from models.varlen import attention_by_lengths  # imported late: see models/varlen.py

            return attention_by_lengths(query, key, value, documents, window=window, scale=scale)
        mask = None if documents is None else documents.sees
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if sinks is None and mask is None and not window and new == seen:
        return scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    if window:
        near = min(seen, window + new - 1)  # keys that some query sees
        key, value, mask = key[:, :, -near:], value[:, :, -near:], None if mask is None else mask[..., -near:]
        index = torch.arange(near, device=query.device)
        distance = index[near - new :, None] - index  # (T, near)
        inside = (distance >= 0) & (distance < window)
        mask = inside if mask is None else mask & inside
    elif mask is None and new > 1 and new != seen:
        # scaled_dot_product_attention's own causal mask would align the first new token with the first key; the last
        # new token must be aligned with the last key. A single token attends to everything.
        mask = torch.ones(new, seen, dtype=torch.bool, device=query.device).tril(seen - new)
    if sinks is not None:
        from models.sinks import attend_with_sinks

        return attend_with_sinks(query, key, value, sinks, mask, scale)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def rope_tables(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of positions, (T,) or (B, T) integers: float32, positions.shape + (H / 2,) each.

    Recomputed in each forward pass: this costs a few small kernels and avoids a buffer that meta initialization,
    precision policies or sharding could corrupt.
    """
    frequencies = _inverse_frequencies(config, positions.device)  # (H/2,)
    angles = positions.to(torch.float32)[..., None] * frequencies
    if config.rope_scaling != "yarn":
        return angles.cos(), angles.sin()
    longer = config.rope_attention_factor or 1 + math.log(config.rope_factor) / 10
    return angles.cos() * longer, angles.sin() * longer


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
    if config.rope_scaling == "linear":
        return frequencies / config.rope_factor
    if config.rope_scaling == "yarn":
        keep = _kept_by_yarn(config, device)
        return keep * frequencies + (1 - keep) * frequencies / config.rope_factor
    # Llama 3.1: wavelengths longer than the original context are stretched by `factor`, short ones are unchanged, and
    # those between are interpolated (The Llama 3 Herd of Models; apply_scaling in the llama-models reference code).
    wavelengths = 2 * math.pi / frequencies
    low, high = config.rope_low_frequency_factor, config.rope_high_frequency_factor
    keep = ((config.rope_original_length / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / config.rope_factor


def _kept_by_yarn(config: ModelConfig, device: torch.device) -> Tensor:
    """How much of each frequency YaRN keeps, (H/2,): 1 for those that turn often within the original length, 0 for
    those that turn less than once or so; it divides these by the factor (Peng et al. 2023, section 3.2)."""

    def pair_that_turns(times: float) -> float:
        turns = config.rope_original_length / (times * 2 * math.pi)
        return config.head_width * math.log(turns) / (2 * math.log(config.rope_theta))

    low, high = pair_that_turns(config.rope_beta_fast), pair_that_turns(config.rope_beta_slow)
    if config.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_width - 1)
    pairs = torch.arange(config.head_width // 2, dtype=torch.float32, device=device)
    return 1 - ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
