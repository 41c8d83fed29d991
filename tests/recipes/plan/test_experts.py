"""What a plan says of routed experts, against steps whose storages are counted and sums by hand."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from torch import Tensor

import parallel.experts
from parallel.config import MeshDegrees
from recipes.lab.plan.plan import World, plan
from recipes.lab.plan.search import peak
from recipes.lab.plan.search_space import numerics_of
from recipes.plan.hardware import GPUS
from recipes.plan.memory import predict
from recipes.plan.messages import matrix_params
from recipes.plan.moments import sizes_of
from recipes.plan.rates import RATES
from recipes.plan.stages import parts
from recipes.plan.time import step_time, time_of
from recipes.plan.work import work_of
from recipes.recipe.load import CONFIGS, load
from recipes.recipe.rules import violations
from recipes.recipe.schema import Recipe
from tests.live_bytes import tracked_step

H100 = GPUS["H100"]
SPARSE: dict[str, Any] = {
    **{"experts": 16, "experts_per_token": 4, "expert_width": 96, "layers": 4, "width": 128, "heads": 4},
    **{"feed_forward_width": 256, "key_value_heads": 2, "head_width": 32, "vocabulary": 512},
}
GPT_OSS: dict[str, Any] = {"biases": True, "attention_sinks": True, "activation": "swiglu_clamped"}
SIZES_OF_QWEN: dict[str, Any] = {
    **{"experts": 128, "experts_per_token": 8, "expert_width": 768, "width": 2048, "heads": 32},
    **{"key_value_heads": 4, "head_width": 128, "vocabulary": 151_936, "layers": 4},
}
WORDS = ["--run.device=cpu", "--compile.enabled=false", "--fsdp.param_dtype=bfloat16", "--batch.loss_chunks=8"]
LONG = ["--batch.micro_batch_size=1", "--batch.sequence_length=4096", "--batch.global_batch_size=16"]


def recipe_of(*words: str, **model: Any) -> Recipe:
    sizes = ["--batch.micro_batch_size=2", "--batch.sequence_length=256", "--batch.global_batch_size=8"]
    recipe = load(CONFIGS / "llama3_debug.toml", [*WORDS, *sizes, *words], rules=False)
    return replace(recipe, model=replace(recipe.model, **SPARSE | model))


def mode(name: str) -> str:
    return f"--activation_checkpointing.mode={name}"


def told(exchange: Callable[..., Tensor], imbalance: float) -> Callable[..., Tensor]:
    """All-to-all on tensors without values, which say not how many rows come: so many times as many as are sent."""

    def told_exchange(rows: Tensor, sizes: Tensor, back: bool, count: int, group: str) -> Tensor:
        return exchange(rows, sizes, back, int(imbalance * len(rows)) if count < 0 else count, group)

    return told_exchange


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "words", "model", "imbalance"),
    [
        (MeshDegrees(replicate=1, shard=4), [], {}, 1.0),
        (MeshDegrees(replicate=1, shard=4, expert=2), [], {}, 1.0),
        (MeshDegrees(replicate=1, shard=4, expert=4), [], {}, 1.5),
        (MeshDegrees(replicate=1, shard=4, expert=2), [mode("full")], {}, 1.0),
        (MeshDegrees(replicate=1, shard=4, expert=2), [mode("selective")], {}, 1.0),
        (MeshDegrees(replicate=1, shard=2, tensor=2, expert=4), ["--batch.global_batch_size=4"], {}, 1.0),
        (MeshDegrees(replicate=1, shard=2, context=2, expert=2), ["--batch.global_batch_size=4"], {}, 1.0),
        (MeshDegrees(replicate=2, shard=2, expert=2), [], {}, 1.0),
        (MeshDegrees(replicate=1, shard=4, expert=2), ["--batch.global_batch_size=24"], {"experts": 64}, 1.0),
        (
            MeshDegrees(replicate=1, shard=4, expert=2),
            ["--fsdp.reshard_after_forward=false"],
            {"shared_experts": 2, "dense_layers": 1},
            1.0,
        ),
        (
            MeshDegrees(replicate=1, shard=4, expert=2),
            [mode("full"), "--activation_checkpointing.blocks=2"],
            {"shared_experts": 2, "further_dense_layers": (1, 2)},
            1.0,
        ),
        (MeshDegrees(replicate=1, shard=4, expert=2), [], GPT_OSS, 1.0),
        (MeshDegrees(replicate=1, shard=2, tensor=2, expert=2), ["--batch.global_batch_size=4"], GPT_OSS, 1.0),
        (MeshDegrees(replicate=1, shard=16, expert=8), [*LONG, mode("full")], SIZES_OF_QWEN, 1.0),
        (
            MeshDegrees(replicate=1, shard=16),
            [*LONG, mode("full"), "--batch.global_batch_size=32"],
            SIZES_OF_QWEN,
            1.0,
        ),
    ],
    ids=str,
)
def test_the_predicted_peak_of_a_step_with_experts_is_that_of_a_step(
    degrees: MeshDegrees, words: list[str], model: dict[str, Any], imbalance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel.experts, "exchange", told(parallel.experts.exchange, imbalance))
    recipe = recipe_of(*words, **model)
    predicted = predict(recipe, degrees, context=False, imbalance=imbalance)
    seen = tracked_step(recipe, degrees.processes, degrees=degrees)
    assert predicted.peak == pytest.approx(seen.peak, rel=0.03), f"{predicted.fullest} here, {seen.fullest} there"


def qwen(*words: str) -> Recipe:
    return load(CONFIGS / "qwen3_30b_a3b_16x8h100.toml", words, processes=128, nodes=16, elsewhere=True)


def test_parameters_and_moments_of_experts_are_those_of_a_process_and_the_rest() -> None:
    recipe = qwen()
    degrees = recipe.mesh.fit(128, nodes=16)
    pieces = predict(recipe, degrees).pieces
    of_experts = 48 * 128 * 3 * 2048 * 768 // 128
    assert pieces["parameters of experts"] == 4 * of_experts and pieces["moments of experts"] == 8 * of_experts
    assert pieces["parameters"] == pytest.approx(4 * (recipe.model.num_params() / 128 - of_experts), rel=0.01)


def test_active_parameters_are_those_that_compute_a_token() -> None:
    model = qwen().model
    idle = 48 * 120 * 3 * 2048 * 768
    assert model.active_params() == model.num_params() - idle == pytest.approx(3.35e9, rel=0.01)
    assert matrix_params(model) == 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 3 * 2048 * 768)
    dense = load(CONFIGS / "llama3_debug.toml").model
    assert dense.active_params() == dense.num_params()


def test_experts_whose_number_does_not_divide_are_cut_by_rows_and_not_padded() -> None:
    recipe = recipe_of(experts=8)
    assert sizes_of(recipe, MeshDegrees(replicate=1, shard=16)).experts.whole == 8 * 3 * 128 * 96


def test_a_step_sends_each_row_there_and_back_forward_and_backward_inside_a_node() -> None:
    recipe = qwen("--batch.micro_batch_size", "1", mode("none"), "--activation_checkpointing.blocks", "all")
    found = step_time(recipe, recipe.mesh.fit(128, nodes=16), gpu=H100)
    sent = 4096 * 8 * 2048 * 2 * 7 / 8  # by a GPU, each way
    least = 8 * 48 * 4 * sent / (RATES.link * H100.link)  # micro-batches, layers, messages
    assert "messages: expert, inside nodes" not in found.hidden
    assert least < found.seconds["messages: expert, inside nodes"] < 1.2 * least


def test_full_recomputation_sends_rows_again_and_selective_does_not() -> None:
    name = "messages: expert, inside nodes"
    times = [
        step_time(recipe, recipe.mesh.fit(128, nodes=16), gpu=H100).seconds[name]
        for recipe in (
            qwen(mode(kind), "--activation_checkpointing.blocks", "all") for kind in ("none", "selective", "full")
        )
    ]
    assert times[0] == times[1] and times[2] == pytest.approx(1.5 * times[0], rel=0.02)


def test_experts_between_nodes_are_slower_and_gather_less() -> None:
    inside, outside = (
        step_time(recipe, recipe.mesh.fit(128, nodes=16), gpu=H100) for recipe in (qwen(), qwen("--mesh.expert", "16"))
    )
    shards = [{**found.hidden}["messages: expert shard, between nodes"] for found in (inside, outside)]
    assert shards[1] < 0.6 * shards[0]
    exchanges = inside.seconds["messages: expert, inside nodes"], outside.seconds["messages: expert, between nodes"]
    assert exchanges[1] > 4 * exchanges[0]


def test_an_overloaded_process_needs_more_memory_and_time_only_where_experts_are_divided() -> None:
    worst = replace(RATES, imbalance=1.5)
    for degree, more in ((8, True), (1, False)):
        recipe = qwen("--mesh.expert", str(degree))
        equal, unequal = (plan(recipe, World(H100, 128, 16, rates)) for rates in (RATES, worst))
        assert (unequal.memory.peak > equal.memory.peak) == more
        assert (unequal.time.step_seconds > 1.1 * equal.time.step_seconds) == more


def test_flops_are_those_of_active_parameters() -> None:
    recipe = qwen()
    found = plan(recipe, World(H100, 128, 16))
    products = 6 * (recipe.model.active_params() - recipe.model.vocabulary * 2048)
    attention = 6 * 48 * 4096 * 4096
    assert found.mfu("causal") == pytest.approx(
        found.time.tokens_per_second * (products + attention) / H100.bf16_peak, rel=1e-3
    )


@pytest.mark.parametrize("dense", [{"dense_layers": 1}, {"further_dense_layers": (2,)}], ids=str)
def test_the_experts_of_stages_add_up_to_all(dense: dict[str, Any]) -> None:
    recipe = recipe_of("--mesh.pipeline=2", **dense)
    found = [part for _, part in parts(recipe, MeshDegrees(pipeline=2, replicate=1, shard=2, expert=2))]
    sparse = [part.recipe.model.layers - len(part.recipe.model.dense) for part in found]
    of_experts = [part.state_by_kind["parameters of experts"] for part in found]
    assert sum(sparse) == 3 and sum(of_experts) == 4 * 3 * 16 * 3 * 128 * 96 // 2
    assert found[1].moments() is not None and predict(recipe, MeshDegrees(pipeline=2, replicate=1, shard=2)).where


@pytest.mark.parametrize("share", ["all", 0.25])
@pytest.mark.parametrize("dense", [{}, {"dense_layers": 2}, {"further_dense_layers": (2, 3, 8)}], ids=str)
def test_the_peak_alone_is_that_of_all_moments(share: str | float, dense: dict[str, Any]) -> None:
    for kind, reshard, count in product(("none", "selective", "full"), ("true", "false"), (8, 32)):
        way = [mode(kind), *([f"--activation_checkpointing.blocks={share}"] if kind != "none" else [])]
        words = [*way, f"--fsdp.reshard_after_forward={reshard}", f"--batch.global_batch_size={count}"]
        recipe = recipe_of(*words, layers=9, **dense)
        for degrees in (MeshDegrees(replicate=1, shard=4, expert=4), MeshDegrees(replicate=1, shard=2, tensor=2)):
            assert peak(recipe, degrees) == predict(recipe, degrees).peak


def test_a_search_tries_no_sums_in_bfloat16_that_fsdp_refuses_for_experts() -> None:
    names = [name for name, _ in numerics_of(qwen(), gpu=H100, fixed=frozenset())]
    assert "bf16 moments" in names and "bf16 sums" not in names


@pytest.mark.parametrize("fixed", [frozenset[str](), frozenset({"float8.exclude"})])
def test_a_search_tries_float8_for_experts_as_the_rules_allow_it(fixed: frozenset[str]) -> None:
    found = dict(numerics_of(qwen(), gpu=H100, fixed=fixed))
    assert set(found) == ({"bf16 moments"} if fixed else {"float8", "float8 rowwise", "bf16 moments", "all of these"})
    for recipe in found.values():
        assert not [*violations(recipe, None, processes=128, nodes=16, elsewhere=True)]


def test_experts_as_many_as_one_cost_about_what_a_dense_layer_does() -> None:
    """All experts chosen, each of a part of the width: the same products, and besides them routing and rows."""
    dense = recipe_of(*LONG, "--run.device=cuda", "--compile.enabled=true", **SIZES_OF_QWEN | {"experts": 0})
    dense = replace(dense, model=replace(dense.model, feed_forward_width=8 * 768))
    sparse = replace(dense, model=replace(dense.model, experts=8, experts_per_token=8, expert_width=768))
    times = [time_of(work_of(recipe, MeshDegrees(replicate=1, shard=4)), gpu=H100) for recipe in (dense, sparse)]
    assert 1.0 < times[1].seconds["products"] / times[0].seconds["products"] < 2.5
    assert times[1].seconds["weights"] == pytest.approx(times[0].seconds["weights"], rel=1e-6)


def test_sinks_and_biases_of_gpt_oss_are_in_its_time_and_its_state() -> None:
    recipe = load(CONFIGS / "published" / "gpt_oss_20b.toml", elsewhere=True)
    degrees = recipe.mesh.fit(128, nodes=16)
    plain = replace(recipe, model=replace(recipe.model, attention_sinks=False, biases=False))
    with_both, without = (step_time(one, degrees, gpu=H100).seconds["fused kernels"] for one in (recipe, plain))
    assert 1.1 < with_both / without < 1.6
    found = [predict(one, degrees).pieces["parameters of experts"] for one in (recipe, plain)]
    assert found[0] - found[1] == 4 * 24 * 32 * 3 * 2880 // 128
    assert work_of(recipe, degrees).kernel == "flash"
    exact = replace(recipe, fsdp=replace(recipe.fsdp, param_dtype="float32"))
    assert work_of(exact, degrees).kernel == "math" and "scores of attention" in predict(exact, degrees).not_counted
