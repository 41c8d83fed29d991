"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all heads are linear in
one narrow latent of a token, and a part of each key, the rotated one, is the same in all heads.

B batch, T tokens, D model width, N heads, H width of a query's and a key's head, R of its rotated part, V of a value's,
L width of the latent, Q of what queries are linear in: a latent of their own, or x with Q = D.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from models.attention import InnerAttention, attend, rotate
from models.config import ModelConfig

EPS = 1e-6
"""Of the norms of latents, whatever config.json says: as in transformers, and in DeepSeek's own code."""


class LatentAttention(nn.Module):
    """The attention of a layer. Latents are of each token by itself; in `heads` tokens see each other."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        query, latent = config.query_latent_width, config.latent_width
        self.widths = (latent, config.rope_width)
        self.q_a_proj = nn.Linear(config.width, query, bias=False) if query else nn.Identity()
        self.q_a_layernorm = nn.RMSNorm(query, eps=EPS) if query else nn.Identity()
        self.kv_a_proj_with_mqa = nn.Linear(config.width, sum(self.widths), bias=False)
        self.kv_a_layernorm = nn.RMSNorm(latent, eps=EPS)
        self.heads = LatentHeads(config)

    def forward(self, x: Tensor, *further: Any) -> Tensor:
        """x: (B, T, D) -> (B, T, D). further: as models.decoder.Attention takes it."""
        latent, key = self.kv_a_proj_with_mqa(x).split(self.widths, dim=-1)  # (B, T, L), (B, T, R)
        read = self.q_a_layernorm(self.q_a_proj(x)), torch.cat((self.kv_a_layernorm(latent), key), dim=-1)
        return self.heads(read, *further)


class LatentHeads(nn.Module):
    """Queries, keys and values of all heads, attention, and its projection into the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, query, key, value = config.heads, config.query_latent_width, config.head_width, config.value_width
        self.of_latents = (config.latent_width, config.rope_width)
        self.of_heads = (key - config.rope_width, value)
        self.q_proj = None if query else nn.Linear(config.width, heads * key, bias=False)
        self.q_b_proj = nn.Linear(query, heads * key, bias=False) if query else None
        self.kv_b_proj = nn.Linear(config.latent_width, heads * sum(self.of_heads), bias=False)
        self.o_proj = nn.Linear(heads * value, config.width, bias=False)
        self.shared = nn.Identity()  # what every head reads: tensor parallelism adds up its gradients there
        longer = 1 + config.rope_mscale * math.log(config.rope_factor) / 10  # of queries, and of keys
        self.inner = InnerAttention(scale=longer**2 / math.sqrt(key) if config.rope_mscale else None)
        self.head_width, self.reach = key, self.inner.reach  # as in models.decoder.Attention

    def forward(
        self, read: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, cache: Any = None, documents: Any = None
    ) -> Tensor:
        """read: (B, T, Q) and (B, T, L + R). Returns (B, T, D)."""
        latent, key = read[1].split(self.of_latents, dim=-1)
        # -1 infers the number of heads, so that a tensor-parallel rank needs no change here.
        query = (self.q_proj or self.q_b_proj)(read[0]).unflatten(-1, (-1, self.head_width))  # type: ignore[misc]
        turned = _turned(query[..., self.of_heads[0] :], cos, sin)  # (B, T, N, R)
        query = torch.cat((query[..., : self.of_heads[0]], turned), dim=-1)  # (B, T, N, H)
        keys, value = self.kv_b_proj(latent).unflatten(-1, (-1, sum(self.of_heads))).split(self.of_heads, dim=-1)
        turned = _turned(self.shared(key).unsqueeze(2), cos, sin).expand(-1, -1, keys.shape[2], -1)
        keys = torch.cat((keys, turned), dim=-1)  # (B, T, N, H)
        query, keys, value = (heads.transpose(1, 2) for heads in (query, keys, value))  # (B, N, T, H or V)
        if cache is not None:
            out = attend(query, *cache.append(keys, value), **self.reach)  # (B, N, T, V)
        else:
            out = self.inner(query, keys, value, documents)  # (B, N, T, V)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As rotate(), of each pair (x[2 i], x[2 i + 1]), which it takes apart: queries and keys alike."""
    return rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)
