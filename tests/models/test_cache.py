"""The decoder gives the same results with a key/value cache as without."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.cache import KeyValueCache
from models.config import ModelConfig
from models.decoder import Decoder
from models.sizes import SIZES

SMALL = replace(SIZES["smollm3_debug"], vocabulary=97, init_std=0.1)
CONFIGS = {
    "some layers without RoPE": SMALL,
    "no layer with RoPE": replace(SMALL, no_rope_every=1),
    "one key/value head": replace(SMALL, key_value_heads=1, tied_embeddings=False),
    "all key/value heads": replace(SMALL, key_value_heads=4, head_width=48),
}
LENGTH = 24
# Largest difference between logits of standard deviation 1, from the same sums in another order.
TOLERANCE = 1e-5


def build(config: ModelConfig = SMALL) -> Decoder:
    model = Decoder(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            model.init_parameter(name, parameter, generator)
    return model


def tokens() -> Tensor:
    return torch.randint(SMALL.vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def new_cache(config: ModelConfig = SMALL, max_length: int = LENGTH) -> KeyValueCache:
    return KeyValueCache(config, batch=2, max_length=max_length, dtype=torch.float32, device=torch.device("cpu"))


@torch.no_grad()
def in_pieces(model: Decoder, x: Tensor, pieces: list[int], cache: KeyValueCache) -> Tensor:
    """Logits (B, T, V) of tokens passed in pieces of these lengths."""
    return torch.cat([model(piece, cache=cache) for piece in x.split(pieces, dim=1)], dim=1)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(
    "pieces", [[LENGTH], [10] + [1] * 14, [1] * LENGTH, [5, 7, 1, 11]], ids=["all", "prompt", "single", "chunks"]
)
def test_logits_with_a_cache_equal_those_of_the_whole_sequence(config: ModelConfig, pieces: list[int]) -> None:
    model, x, cache = build(config), tokens(), new_cache(config)
    with torch.no_grad():
        whole = model(x)
    assert whole.std() > 0.9  # otherwise any mistake would be small
    found = in_pieces(model, x, pieces, cache)
    assert cache.length == LENGTH
    torch.testing.assert_close(found, whole, atol=TOLERANCE, rtol=0)


def test_uninitialized_memory_beyond_the_length_changes_nothing() -> None:
    model, x, cache = build(), tokens(), new_cache(max_length=3 * LENGTH)
    for layer in cache.layers:
        layer.key.fill_(float("nan"))
        layer.value.fill_(float("nan"))
    found = in_pieces(model, x, [10] + [1] * 14, cache)
    torch.testing.assert_close(found, model(x), atol=TOLERANCE, rtol=0)


def test_a_full_cache_refuses_further_tokens() -> None:
    model, cache = build(), new_cache(max_length=8)
    in_pieces(model, tokens()[:, :8], [8], cache)
    with pytest.raises(ValueError, match="holds at most 8 tokens, not 9"):
        in_pieces(model, tokens()[:, :1], [1], cache)
