"""Keys and values of the tokens seen so far, so that each new token costs only its own computation.

B batch, T new tokens, S all tokens, K key/value heads, H head width.
"""

import torch
from torch import Tensor

from models.config import ModelConfig


class LayerCache:
    """The keys and values of one attention layer."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        """key, value: uninitialized (B, K, max_length, H), of values as wide as theirs."""
        self.key, self.value = key, value
        self.length = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, (B, K, T, H) each. Returns those of all tokens: (B, K, S, H).

        Keys already have their rotary embedding applied. Raises ValueError if the cache would overflow.
        """
        end = self.length + key.shape[2]
        if end > self.key.shape[2]:
            raise ValueError(f"the cache holds at most {self.key.shape[2]} tokens, not {end}")
        self.key[:, :, self.length : end] = key
        self.value[:, :, self.length : end] = value
        self.length = end
        return self.key[:, :, :end], self.value[:, :, :end]


class KeyValueCache:
    """One LayerCache per block, in order; allocated once, filled from the left. For use without gradients."""

    def __init__(
        self, config: ModelConfig, *, batch: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """batch: sequences. max_length: tokens of each, including the prompt. dtype: the type the model computes in."""
        # Of latent attention, too, keys and values of all heads: products of latents would be computed again.
        shape, width = (config.layers, batch, config.key_value_heads, max_length), config.head_width
        each = (torch.empty(*shape, one, dtype=dtype, device=device) for one in (width, config.value_width or width))
        self.layers = [LayerCache(key, value) for key, value in zip(*each, strict=True)]

    @property
    def length(self) -> int:
        """Tokens the last layer has seen. During a forward pass this does not yet include the new tokens."""
        return self.layers[-1].length
