"""The decoder's mathematics, compared with independent plain formulas."""

import math
from dataclasses import replace

import pytest
import torch

from models.attention import attend, rope_tables, rotate
from models.decoder import Decoder
from models.sizes import SIZES

SMALL = replace(SIZES["smollm3_debug"], vocabulary=97)


def build(config=SMALL, seed: int = 0) -> Decoder:
    model = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            model.init_parameter(name, parameter, generator)
    return model


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def test_rotary_embedding_equals_multiplication_of_complex_numbers() -> None:
    x = torch.randn(1, 5, 2, SMALL.head_width)
    cos, sin = rope_tables(SMALL, torch.arange(5))
    half = SMALL.head_width // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    angles = torch.arange(5)[:, None] * SMALL.rope_theta ** -(torch.arange(half) / half)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat((turned.real, turned.imag), -1))


def test_each_row_of_a_batch_may_have_its_own_positions() -> None:
    x = torch.randn(2, 3, 2, SMALL.head_width)
    positions = torch.tensor([[0, 1, 2], [5, 6, 7]])
    together = rotate(x, *rope_tables(SMALL, positions))
    for row in range(2):
        torch.testing.assert_close(
            together[row : row + 1], rotate(x[row : row + 1], *rope_tables(SMALL, positions[row]))
        )


def test_llama3_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    scaled = replace(SMALL, head_width=128, rope_theta=500_000.0, rope_scaling="llama3", rope_factor=8.0)
    plain = replace(scaled, rope_scaling="none")
    angle = torch.tensor([1e-3])  # small enough for sin(x) = x in float32
    ratio = rope_tables(plain, angle)[1] / rope_tables(scaled, angle)[1]
    wavelengths = 2 * math.pi * plain.rope_theta ** (torch.arange(64) / 64)
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    torch.testing.assert_close(ratio[0, short], torch.ones(int(short.sum())))
    torch.testing.assert_close(ratio[0, long], torch.full((int(long.sum()),), 8.0))
    between = ratio[0, ~short & ~long]
    assert len(between) > 0
    assert ((between > 1) & (between < 8)).all()


def test_grouped_query_attention_equals_the_formula() -> None:
    query, key, value = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 16)
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) / 4
    scores.masked_fill_(torch.ones(7, 7).triu(1).bool(), -math.inf)
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(attend(query, key, value), expected)


def test_projections_into_the_residual_stream_are_initialized_smaller() -> None:
    model = build(replace(SMALL, layers=2))
    block = model.blocks[0]
    assert block.attention.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.feed_forward.down_proj.weight.std().item() == pytest.approx(0.02 / 2, rel=0.05)
    assert (block.attention_norm.weight == 1).all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "parts", [((0, 1), (2, 3)), ((0,), (1, 2, 3)), ((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0,), (1,), (2,), (3,))]
)
def test_the_parts_of_a_model_have_its_parameters_and_compute_what_it_does(
    parts: tuple[tuple[int, ...], ...], tied: bool
) -> None:
    config = replace(SMALL, tied_embeddings=tied)
    models = {layers: filled(Decoder(config, layers=layers)) for layers in (tuple(range(4)), *parts)}
    whole = models.pop(tuple(range(4)))
    expected, found = dict(whole.named_parameters()), {}
    for model in models.values():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name]), name
            assert name not in found or (tied and name == "embedding.weight")  # the first and the last part have it
            found[name] = parameter
    assert found.keys() == expected.keys()

    inputs, targets = tokens(), tokens().roll(-1, 1)
    hidden = None
    for layer in range(4):
        [model] = (model for layers, model in models.items() if layer in layers)
        if layer == 3:
            options = {"layers": range(3, 4), "hidden": hidden}
            assert torch.equal(model(inputs, **options), whole(inputs))
            assert torch.equal(model(inputs, targets, **options), whole(inputs, targets))
        hidden = model(inputs, layers=range(layer, layer + 1), hidden=hidden)


def filled(model: Decoder) -> Decoder:
    """With its initial values, as parallel/fsdp.py fills a part."""
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, values in model.initial_values(shapes, seed=0, device=torch.device("cpu")):
            parameters[name].copy_(values)
    return model
