"""The largest logits of attention, and QK-clip; tests/recipes/training/test_columns.py has both on meshes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import sinks
from models.config import ModelConfig
from models.documents import Documents, Lengths, Mask
from models.sizes import SIZES
from recipes.optimization.after_step import AttentionLogits
from tests.build import build_model, cpu_mesh

HEADS, KEYS, LENGTH, WIDTH = 4, 2, 24, 8
MODEL = replace(
    SIZES["llama3_debug"],
    **{"layers": 1, "width": 64, "heads": 4, "key_value_heads": 4, "head_width": 16, "vocabulary": 64},
    init_std=0.4,
)
LATENT: dict[str, Any] = {"attention": "latent", "head_width": 24, "latent_width": 32, "rope_width": 8}
MODELS = {
    "a key of each head": MODEL,
    "keys of two heads": replace(MODEL, key_value_heads=2),
    "biases": replace(MODEL, biases=True, attention_sinks=True),
    "latent": replace(MODEL, **LATENT, value_width=16, query_latent_width=40),
    "latent, without one of queries": replace(MODEL, **LATENT, value_width=12),
}
KEPT = torch.tensor(0.0)


# What is measured


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, LENGTH, WIDTH, generator=generator) for heads in (HEADS, KEYS))
    return query, key


def by_definition(query: Tensor, key: Tensor, sees: Tensor) -> Tensor:
    scores = query @ key.repeat_interleave(HEADS // KEYS, dim=1).mT
    return torch.where(sees, scores, -torch.inf).amax((0, 2, 3))


@pytest.mark.parametrize("scores", [1, 2 * HEADS * LENGTH * 5, 2**24])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("last", [LENGTH, 9])
@pytest.mark.parametrize("inside", ["rows", "mask", "lengths"])
def test_largest_logits_are_those_of_all_that_a_token_sees(
    scores: int, window: int, last: int, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "SCORES", scores)
    query, key = inputs()
    tokens = torch.ones(2, LENGTH, dtype=torch.int64)
    tokens[0, 7] = tokens[1, 15] = tokens[1, 19] = 0
    documents = Documents.of(tokens, end_of_document=0)
    index = torch.arange(LENGTH)
    sees = (index <= index[:, None]) & (index > index[:, None] - (window or LENGTH))
    mask = documents.for_attention_in(torch.float32)[0]
    expected = by_definition(query, key, sees & mask if inside != "rows" else sees[None, None])
    if last < LENGTH:  # the last queries alone
        expected = by_definition(query[:, :, -last:], key, (sees & mask if inside != "rows" else sees)[..., -last:, :])
    restriction: Any = None
    if inside == "mask":
        restriction = Mask(mask[:, :, -last:])
    elif inside == "lengths":
        whole = documents.cumulative_lengths
        row, place = whole // LENGTH, whole % LENGTH
        restriction = Lengths(row * last + (place - LENGTH + last).clamp(0, last), whole)
    largest = torch.full((HEADS,), 1.5)
    sinks.note(largest, query[:, :, -last:], key, restriction, {"window": window, "scale": 2.0})
    torch.testing.assert_close(largest, (2 * expected).clamp(min=1.5))


# What is scaled


def built(config: ModelConfig, limit: float) -> tuple[nn.Module, AttentionLogits]:
    model, _ = build_model(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.constant_(parameter, 0.5)
    return model, AttentionLogits(model, cpu_mesh(), whole=config, limit=limit)


def largest_of(model: nn.Module, found: AttentionLogits) -> Tensor:
    model(torch.arange(2 * LENGTH).view(2, LENGTH) % 64)
    [largest] = found._seen.values()
    return largest.clone()


@pytest.fixture(autouse=True)
def group(alone: object) -> Iterator[None]:
    yield


@pytest.mark.parametrize("name", MODELS)
def test_clipped_heads_have_the_limit_and_others_what_they_had(name: str) -> None:
    before = largest_of(*built(MODELS[name], 0.0))
    limit = before.sort().values[1].item() * 1.01
    model, found = built(MODELS[name], limit)
    whole = {key: value.full_tensor().clone() for key, value in model.state_dict().items()}
    assert torch.equal(largest_of(model, found), before)
    assert found.after_step(torch.tensor(1.0), is_logged=False) == {}  # a skipped step
    assert all(torch.equal(whole[key], value.full_tensor()) for key, value in model.state_dict().items())
    largest_of(model, found)
    columns = found.after_step(KEPT, is_logged=True)
    assert {key: value.item() for key, value in columns.items()} == {"attention_logit/0": before.max().item()}
    torch.testing.assert_close(largest_of(model, found), before.clamp(max=limit), rtol=1e-5, atol=0)
    changed = {key for key, value in model.state_dict().items() if not torch.equal(whole[key], value.full_tensor())}
    shared = MODELS[name].key_value_heads < HEADS
    assert all(".q_" in key or (".k_proj" in key and not shared) or ".kv_b_proj" in key for key in changed)
    values = {"blocks.0.attention.v_proj.weight", "blocks.0.attention.heads.o_proj.weight"}
    assert changed and not changed & values


def test_nothing_is_computed_where_nothing_is_learned() -> None:
    model, found = built(MODEL, 0.0)
    with torch.no_grad():
        assert largest_of(model, found).max() == -torch.inf
