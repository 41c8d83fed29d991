"""Keys and values of the tokens that a model has seen, so that each further token costs one token's work.

B batch, T new tokens, S tokens in all, K key/value heads, H head width.
"""

import torch
from torch import Tensor

from models.config import ModelConfig


class LayerCache:
    """The part of one attention layer."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        """key, value: uninitialized (B, K, max_length, H)."""
        self.key, self.value = key, value
        self.length = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take in the keys and values of new tokens, (B, K, T, H) each. Returns those of all tokens: (B, K, S, H).

        Keys come in already turned by their positions. Raises ValueError where there is no room left.
        """
        end = self.length + key.shape[2]
        if end > self.key.shape[2]:
            raise ValueError(f"the cache has room for {self.key.shape[2]} tokens, not for {end}")
        self.key[:, :, self.length : end] = key
        self.value[:, :, self.length : end] = value
        self.length = end
        return self.key[:, :, :end], self.value[:, :, :end]


class KeyValueCache:
    """One LayerCache per block, in their order; allocated once, filled from the left. For use without gradients."""

    def __init__(
        self, config: ModelConfig, *, batch: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """max_length: tokens, those of the prompt included. dtype: what the model computes in."""
        shape = (config.layers, 2, batch, config.key_value_heads, max_length, config.head_width)
        self.layers = [LayerCache(key, value) for key, value in torch.empty(shape, dtype=dtype, device=device)]

    @property
    def length(self) -> int:
        """Tokens seen so far, by the last layer: in the middle of a forward pass it is still without the new ones."""
        return self.layers[-1].length
