"""Routed experts against a loop over tokens, and what a model says of its routers."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from models.config import ModelConfig
from models.decoder import build_model
from models.experts import Routers, SparseFeedForward
from models.sizes import SIZES
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.optimizer import build_optimizer, matrices_of

DEBUG = replace(SIZES["llama3_debug"], layers=2, width=32, vocabulary=64)
SPARSE = replace(DEBUG, experts=8, experts_per_token=2, expert_width=16)
LIKE_DEEPSEEK = {"router": "sigmoid", "router_bias": True, "router_scale": 2.5, "shared_experts": 1}
GROUPS = {"expert_groups": 4, "groups_per_token": 2, "experts_per_token": 3}
SHAPES: dict[str, dict[str, Any]] = {
    "softmax, normalized": {},
    "softmax": {"normalize_scores": False},
    "sigmoid with a bias and a shared expert": LIKE_DEEPSEEK,
    "groups": LIKE_DEEPSEEK | GROUPS,
    "all experts for each token": {"experts_per_token": 8},
    "one expert for each token": {"experts_per_token": 1, "normalize_scores": False},
}


def made(config: ModelConfig) -> tuple[SparseFeedForward, Tensor, Tensor | None, Tensor]:
    """A feed-forward with random values, weight and bias of its router, and tokens (2, 24, D)."""
    generator = torch.Generator().manual_seed(0)
    model = cast(SparseFeedForward, build_model(config).blocks[0].feed_forward)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    weight = torch.randn(config.experts, config.width, generator=generator).requires_grad_()
    bias = torch.randn(config.experts, generator=generator) / 8 if config.router_bias else None
    return model, weight, bias, torch.randn(2, 24, config.width, generator=generator)


def by_a_loop(model: SparseFeedForward, weight: Tensor, bias: Tensor | None, x: Tensor) -> tuple[Tensor, list[int]]:
    """Token by token, after the paper (DeepSeek-V3, section 2.1.2). Returns the output, and how often experts met."""
    config, out, loads = model.config, [], [0] * model.config.experts
    for token in x.flatten(0, 1):
        scores = linear(token, weight)  # (E,)
        scores = scores.sigmoid() if config.router == "sigmoid" else scores.softmax(0)
        wanted = {e: scores[e].item() + (float(bias[e]) if bias is not None else 0.0) for e in range(config.experts)}
        size = config.experts // config.expert_groups
        of_groups = {
            g: sum(sorted(wanted[e] for e in range(g * size, (g + 1) * size))[-2:]) for g in range(config.expert_groups)
        }
        kept = sorted(of_groups, key=lambda g: -of_groups[g])[: config.groups_per_token]
        allowed = [e for e in wanted if e // size in kept]
        chosen = sorted(allowed, key=lambda e: -wanted[e])[: config.experts_per_token]
        total = sum(scores[e] for e in chosen) if config.normalize_scores else 1.0
        y = torch.zeros(config.width)
        for e in chosen:
            loads[e] += 1
            gate, up, down = (m[e] for m in (model.experts.gate_proj, model.experts.up_proj, model.experts.down_proj))
            y = y + scores[e] / total * config.router_scale * linear(
                silu(linear(token, gate)) * linear(token, up), down
            )
        out.append(y)
    whole = torch.stack(out).view_as(x)
    return whole if model.shared_experts is None else whole + model.shared_experts(x), loads


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_loads_and_gradients_are_those_of_a_loop(shape: str) -> None:
    model, weight, bias, x = made(replace(SPARSE, **SHAPES[shape]))
    found: dict[str, list[Tensor]] = {}
    for name in ("ours", "loop"):
        inputs = x.clone().requires_grad_()
        if name == "ours":
            y, (hits, shares, _) = model(inputs, weight, bias)
            assert hits.shape == shares.shape == (2, 8)
            torch.testing.assert_close(shares.sum(), torch.tensor(48.0))
        else:
            y, loads = by_a_loop(model, weight, bias, inputs)
            assert hits.sum(0).tolist() == loads
        gradients = torch.autograd.grad(y.square().sum(), [inputs, weight, *model.parameters()])
        found[name] = [y, *gradients]
    for ours, theirs in zip(found["ours"], found["loop"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("favourite", [0, 7])
def test_all_tokens_to_one_expert_leave_the_others_without_gradients(favourite: int) -> None:
    model, weight, _, x = made(replace(SPARSE, router_bias=True, experts_per_token=1))
    y, (hits, _, _) = model(x, weight, torch.zeros(8).index_fill(0, torch.tensor(favourite), 100.0))
    y.sum().backward()
    assert hits[:, favourite].tolist() == [24, 24] and hits.sum() == 48
    for parameter in model.experts.parameters():
        alone = parameter.grad.flatten(1).any(1).nonzero().flatten().tolist()
        assert alone == [favourite] and parameter.grad.isfinite().all()


def test_layers_are_what_their_intervals_and_lists_say() -> None:
    model = replace(SPARSE, layers=6, dense_layers=1, sparse_every=2, further_dense_layers=(3,), window=8)
    model = replace(model, full_attention_every=3, full_attention_layers=(0,), no_rope_every=4, no_rope_layers=(1,))
    layers = range(6)
    assert not model.problems() and model.dense == (0, 2, 3, 4)
    assert [model.is_sparse(layer) for layer in layers] == [False, True, False, False, False, True]
    assert [model.window_of(layer) for layer in layers] == [0, 8, 0, 8, 8, 0]
    assert [model.uses_rope(layer) for layer in layers] == [True, False, True, False, True, True]
    shorter = model.shortened(3)
    assert (shorter.layers, shorter.further_dense_layers, shorter.dense) == (3, (), (0, 2))
    assert set(build_model(model).routers.places) == {1, 5}
    assert replace(model, experts=0).dense == () and replace(SPARSE, layers=10**12).problems()


def test_a_balance_loss_over_the_batch_counts_all_micro_batches_so_far() -> None:
    """arXiv 2501.11873: E / (K T) x counts x mean scores, whose counts are those of the step, not of a row."""
    routers = Routers(SPARSE, [0])
    routers.balance_weight, routers.sum_of_batch = 0.5, torch.nn.Identity()
    routers.begin(torch.tensor(4.0))
    parts = [(torch.randint(0, 9, (2, 8)).float(), torch.rand(2, 8, requires_grad=True)) for _ in range(2)]
    x, so_far, expected = torch.zeros(1, requires_grad=True), torch.zeros(8), 0.0
    for hits, scores in parts:
        routers.noted(0, x, (hits, scores, torch.zeros(()))).sum().backward()
        so_far = so_far + hits.sum(0)
        expected += float((8 * so_far / so_far.sum() * scores.detach().sum(0)).sum())
        torch.testing.assert_close(scores.grad, 0.5 / 4 * (8 * so_far / so_far.sum()).expand(2, 8))
    assert float(routers.found[0, -2]) == pytest.approx(expected) and torch.equal(routers.found[0, :8], so_far)


def test_a_model_has_routers_for_its_sparse_layers_only_and_counts_its_parameters() -> None:
    config = replace(SPARSE, layers=3, dense_layers=1, **LIKE_DEEPSEEK)
    with torch.device("meta"):
        model = build_model(config)
    names = [name for name, _ in model.named_parameters() if name.startswith("routers.")]
    assert names == ["routers.1.weight", "routers.2.weight"]
    assert config.num_params() == sum(parameter.numel() for parameter in model.parameters())
    active = config.num_params() - 2 * 3 * 16 * 32 * (8 - 2)
    assert config.matmul_params() == active - 7 * 32 - config.vocabulary * 32  # norms; the look-up


def test_muon_takes_experts_and_no_router_and_nothing_but_norms_is_kept_from_decay() -> None:
    """Trap 24: rules for parameters of two dimensions would take the router, and leave experts to AdamW."""
    model = build_model(replace(SPARSE, **LIKE_DEEPSEEK))
    matrices = {id(parameter) for parameter in matrices_of(build_optimizer(model, OptimizerConfig(name="muon"), MESH))}
    chosen = {name for name, parameter in model.named_parameters() if id(parameter) in matrices}
    assert {f"blocks.0.feed_forward.experts.{part}_proj" for part in ("gate", "up", "down")} <= chosen
    assert not any("routers" in name or "norm" in name for name in chosen)
    adamw = build_optimizer(model, OptimizerConfig())
    decayed = {id(parameter) for group in adamw.param_groups if group["weight_decay"] for parameter in group["params"]}
    assert {name for name, p in model.named_parameters() if id(p) not in decayed} == {
        name for name, _ in model.named_parameters() if "norm" in name or name == "embedding.weight"
    }


MESH: Any = object()  # an optimizer that takes no step asks it for nothing


def test_biases_of_routers_start_at_zero_and_experts_as_other_matrices_do() -> None:
    """Trap 24: what has one dimension would start at one, as norms do."""
    model = build_model(replace(SPARSE, **LIKE_DEEPSEEK))
    shapes = {name: tensor.shape for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    values = dict(model.initial_values(shapes, seed=1, device=torch.device("cpu")))
    assert not values["routers.0.bias"].any()
    experts = values["blocks.0.feed_forward.experts.gate_proj"]
    assert abs(experts.std() / 0.02 - 1) < 0.05
    assert abs(values["blocks.0.feed_forward.experts.down_proj"].std() / 0.01 - 1) < 0.05  # / sqrt(2 x 2 layers)


PROBLEMS = {
    "experts_per_token": {"experts_per_token": 9},
    "dense_layers": {"dense_layers": 2},
    "sparse_every": {"sparse_every": 3},
    "further_dense_layers": {"further_dense_layers": (0, 1)},
    "full_attention_layers": {"window": 8, "full_attention_layers": (0, 1)},
    "expert_groups": {"expert_groups": 3},
    "groups_per_token": {"expert_groups": 2, "groups_per_token": 3},
}


@pytest.mark.parametrize("field", PROBLEMS)
def test_shapes_that_no_tokens_can_be_routed_in_are_refused(field: str) -> None:
    assert [name for name, _ in replace(SPARSE, **PROBLEMS[field]).problems()] == [field]
    assert not replace(SPARSE, **LIKE_DEEPSEEK, **GROUPS).problems()
