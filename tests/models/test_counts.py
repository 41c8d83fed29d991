"""Parameters and FLOPs of models of transformers, against our decoder's formulas and counts by hand."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models import counts
from models.config import ModelConfig
from models.counts import Lengths, forward_flops, step_flops
from models.decoder import build_model
from models.loss import IGNORED
from tests.families import FAMILIES, VOCABULARY, family_config

OURS = ModelConfig(
    name="from_config",
    layers=3,
    width=64,
    feed_forward_width=96,
    heads=4,
    key_value_heads=2,
    head_width=16,
    vocabulary=VOCABULARY,
    tied_embeddings=True,
    norm_eps=1e-6,
    rope_theta=1e4,
)


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_of_transformers_has_the_numbers_of_our_decoder(tied: bool) -> None:
    changes = {"model_type": "llama", "num_hidden_layers": 3, "tie_word_embeddings": tied}
    theirs = family_config("qwen3", **changes)
    ours = ModelConfig(**{**vars(OURS), "tied_embeddings": tied})
    assert theirs.num_params() == ours.num_params()
    assert theirs.matmul_params() == ours.matmul_params()
    for length, attention in product((64, 8192, 77.5), ("causal", "full")):
        assert theirs.flops_per_token(length, attention) == ours.flops_per_token(length, attention)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_parameters_of_its_model(family: str) -> None:
    config = family_config(family)
    with torch.device("meta"):
        names = dict(build_model(config).named_parameters())
    assert config.num_params() == sum(parameter.numel() for parameter in names.values())
    assert 0 < config.matmul_params() <= config.num_params()


def test_flops_of_t5_are_those_of_its_matrices_for_both_kinds_of_tokens() -> None:
    config, width, inner, scores = family_config("t5"), 64, 4 * 16, 4 * 16
    attention, feed_forward = 4 * width * inner, 2 * width * 96
    found = forward_flops(config)
    # The decoder's queries meet the prompt's keys and values, which are made of the encoder's tokens.
    assert found.encoder == 2 * (2 * (attention + feed_forward) + 2 * (attention // 2))
    assert found.decoder == 2 * (2 * (attention + feed_forward) + 2 * (attention // 2) + VOCABULARY * width)
    assert found.encoder_squared == found.decoder_squared == found.crossed == 2 * 2 * 2 * scores


def test_only_the_decoders_attention_to_itself_is_causal() -> None:
    config, lengths = (
        family_config("t5"),
        Lengths(decoder=7, decoder_squared=29, encoder=11, encoder_squared=61, crossed=41),
    )
    less = step_flops(config, lengths, "full") - step_flops(config, lengths, "causal")
    assert less == 3 * forward_flops(config).decoder_squared * 29 / 2


def test_the_flops_of_an_encoder_decoder_per_token_are_those_of_equal_texts() -> None:
    config, pair = family_config("t5"), Lengths(8, 64, 8, 64, 64)
    assert 16 * config.flops_per_token(8, "full") == step_flops(config, pair, "full")


@pytest.mark.parametrize("family", ["gpt2", "t5_gated"])
def test_three_forward_passes_are_the_flops_of_a_real_step(family: str) -> None:
    """Of values, forward and backward, with torch's two products for attention."""
    config, length = family_config(family), 16
    model = build_model(config)
    for tensor in [*model.parameters(), *model.buffers()]:
        torch.nn.init.zeros_(tensor.detach())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        inputs = counts._inputs(length if config.is_encoder_decoder else 0, length)
        model(inputs, torch.full((1, length), IGNORED)).backward()
    squares = length**2 * config.is_encoder_decoder
    lengths = Lengths(length, length**2, length * config.is_encoder_decoder, squares, squares)
    assert counter.get_total_flops() == step_flops(config, lengths, "full")


@pytest.fixture
def cubic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A counter that finds more than products of two lengths."""
    found = iter([1, 8, 27])
    monkeypatch.setattr(FlopCounterMode, "get_total_flops", lambda counter: next(found))
    yield


def test_a_model_whose_products_do_not_follow_from_lengths_is_refused(cubic: None) -> None:
    config = family_config("gpt2", n_head=2)
    with pytest.raises(
        ValueError, match='the FLOPs of a "gpt2" are not those of linears and of attention to whole texts'
    ):
        forward_flops(config)
