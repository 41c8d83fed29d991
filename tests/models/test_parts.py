"""Parts of the decoder that a plug-in registers: a gated attention, a feed-forward without a gate, LayerNorm."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from models import registry
from models.attention import rope_tables, rotate
from models.cache import KeyValueCache
from models.config import ModelConfig
from models.decoder import Decoder, build_model
from models.hf import beyond_hf, layout_of, parameter_shapes
from models.registry import FAMILIES, Part
from models.sizes import SIZES
from parallel.dist import World
from parallel.errors import UserError
from recipes.evaluation.generate import generate, open_model
from recipes.evaluation.opened import Sampling
from recipes.lab.plan.plan import Asked, plan, world_of
from recipes.plan.memory import predict
from recipes.plan.work import work_of
from recipes.plugins.loading import load_plugins
from recipes.recipe.load import load, to_toml
from recipes.recipe.plugins import with_plugins
from recipes.recipe.rules import violations
from recipes.recipe.schema import Recipe
from recipes.training.build import plain_model
from recipes.weights.convert import export_checkpoint
from recipes.weights.locate import find_weights
from tests.live_bytes import tracked_step
from tests.processes import run_processes
from tests.training import DEBUG, change, small_recipe, train

FOLDER = Path(__file__).parents[1] / "plugins"
NAMES = {"gated_attention.py": ("attention", "gated"), "other_parts.py": ("feed_forward", "squared_relu")}
SMALL = {"layers": 2, "width": 32, "feed_forward_width": 48, "heads": 4, "key_value_heads": 2, "head_width": 8}
LOADS = ["--plugins.modules", *(str(FOLDER / file) for file in NAMES)]
ALL = {"attention": "gated", "feed_forward": "squared_relu", "norm": "layer"}


def register() -> None:
    load_plugins(str(FOLDER / file) for file in NAMES)


def part(place: Any, name: str, builder: Any, **facts: Any) -> None:
    registry.put("part", f"{place}.{name}", registry.checked(place, name, builder, **facts))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The parts of the files in tests/plugins, until the test ends."""
    monkeypatch.setattr(registry, "_parts", dict(registry._parts))
    before = dict(FAMILIES)
    register()
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


def gated(**fields: Any) -> ModelConfig:
    return replace(SIZES["smollm3_debug"], **{**SMALL, "vocabulary": 64, "attention": "gated", **fields})


def filled(config: ModelConfig) -> Decoder:
    model = build_model(config)
    assert isinstance(model, Decoder)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    with torch.no_grad():
        for name, values in model.initial_values(shapes, seed=1, device=torch.device("cpu")):
            model.get_parameter(name).copy_(values)
    return model


def problems(recipe: Recipe, **sections: dict[str, Any]) -> dict[str, str]:
    found = dict(violations(change(recipe, **sections), None, processes=4, elsewhere=True))
    found.pop("plugins.modules", None)  # the parts of these recipes are loaded by the tests
    return found


# What they compute


def plain_logits(model: Decoder, tokens: Tensor) -> Tensor:
    """The gated decoder by its formula, with another head order and no code of ours but rotations. tokens: (T,)."""
    config, weights = model.config, dict(model.named_parameters())
    x, cos, sin = weights["embedding.weight"][tokens], *rope_tables(config, torch.arange(len(tokens)))
    for layer in range(config.layers):
        own = {name.removeprefix(f"blocks.{layer}."): one for name, one in weights.items()}
        normed = rms_norm(x, x.shape[-1:], own["attention_norm.weight"], config.norm_eps)
        query, key, value = (
            (normed @ own[f"attention.{name}_proj.weight"].T).unflatten(-1, (-1, config.head_width)) for name in "qkv"
        )  # (T, N or K, H)
        if config.uses_rope(layer):
            query, key = rotate(query[None], cos, sin)[0], rotate(key[None], cos, sin)[0]
        copies = config.heads // config.key_value_heads
        heads = [
            scaled_dot_product_attention(query[:, n], key[:, n // copies], value[:, n // copies], is_causal=True)
            for n in range(config.heads)
        ]
        gate = (normed @ own["attention.gate_proj.weight"].T).sigmoid()
        x = x + (torch.cat(heads, -1) * gate) @ own["attention.o_proj.weight"].T
        normed = rms_norm(x, x.shape[-1:], own["feed_forward_norm.weight"], config.norm_eps)
        up = normed @ own["feed_forward.up_proj.weight"].T
        x = x + (silu(normed @ own["feed_forward.gate_proj.weight"].T) * up) @ own["feed_forward.down_proj.weight"].T
    return rms_norm(x, x.shape[-1:], weights["norm.weight"], config.norm_eps) @ weights["embedding.weight"].T


def test_gated_attention_is_its_formula() -> None:
    model, tokens = filled(gated(init_std=0.3)), torch.arange(12) * 5 % 64
    torch.testing.assert_close(model(tokens[None])[0], plain_logits(model, tokens), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_gated_attention_generates_from_its_cache_what_it_computes_without() -> None:
    model, tokens = filled(gated(init_std=0.3)), torch.arange(12)[None] * 5 % 64
    cache = KeyValueCache(model.config, batch=1, max_length=12, dtype=torch.float32, device=torch.device("cpu"))
    pieces = torch.cat([model(piece, cache=cache) for piece in tokens.split([5, 1, 4, 2], dim=1)], dim=1)
    torch.testing.assert_close(pieces, model(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [name for name in SIZES if name.endswith("_debug")])
def test_tensors_and_counts_follow_from_what_parts_say(size: str) -> None:
    others = {} if SIZES[size].experts or size.startswith("gemma") else ALL
    config = replace(SIZES[size], **{"attention": "gated", **others})
    with torch.device("meta"):
        built = {name: tuple(one.shape) for name, one in build_model(config).named_parameters()}
    assert dict(parameter_shapes(config)) == built
    assert [*layout_of(config).tensors][: len(built)] == [*dict(parameter_shapes(config))]
    assert config.num_params() == sum(map(lambda shape: torch.Size(shape).numel(), built.values()))
    gate = config.heads * config.head_width * config.width
    if not others:
        more = config.flops_per_token(64, "causal") - SIZES[size].flops_per_token(64, "causal")
        assert more == 6 * config.layers * gate


def test_costs_of_attention_replace_those_of_ours() -> None:
    part("attention", "linear", "nowhere:x", tensors=lambda c, n: {}, costs=registry.Costs(flops=lambda c, n, s: 10.0))
    config = replace(gated(), attention="linear")
    assert config.flops_per_token(99, "full") == 6 * config.matmul_params() + 3 * 2 * 10
    assert config.uncounted() is None
    assert config.uncounted(by_plan=True) == 'attention = "linear"'


def test_initial_values_are_those_that_a_part_says() -> None:
    register_sinks = {"tensors": lambda c, n: {"sinks": (4,), "out.weight": (2, 2)}, "initial": {"sinks": -3.0}}
    part("attention", "sinks", "nowhere:x", row=("out",), column=("in",), **register_sinks)
    model = filled(gated())
    model.config = replace(model.config, attention="sinks", init_std=1.0)
    generator, found = torch.Generator(), {name: torch.empty(400, 400) for name in ("sinks", "out.weight", "in.weight")}
    for name, values in found.items():
        model.init_parameter(f"blocks.0.attention.{name}", values, generator)
    assert (found["sinks"] == -3).all()
    assert found["out.weight"].std().item() == pytest.approx(0.5, rel=0.02)  # into the residual stream
    assert found["in.weight"].std().item() == pytest.approx(1, rel=0.02)


# What they may do


def test_recipe_refuses_a_part_that_is_not_registered() -> None:
    with pytest.raises(UserError, match=r'model.attention = "gatd".*\n.*registered by no module.*mean "gated"\?'):
        load(DEBUG, [*LOADS, "--model.attention", "gatd"])
    assert load(DEBUG, [*LOADS, "--model.attention", "gated"]).model.attention == "gated"


def test_resolved_recipe_and_older_ones_load(tmp_path: Path) -> None:
    recipe = load(DEBUG, [*LOADS, "--model.attention", "gated"])
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(recipe), encoding="utf-8")
    assert load(file) == recipe
    file.write_text(re_without(to_toml(recipe), *ALL), encoding="utf-8")
    assert load(file) == replace(recipe, model=replace(recipe.model, attention="default"))


def re_without(text: str, *names: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith(tuple(f"{name} = " for name in names)))


def test_part_is_refused_where_it_does_not_say_what_is_needed() -> None:
    recipe = load(DEBUG, rules=False)
    part("attention", "shy", "nowhere:x", tensors=lambda config, layer: {"w.weight": (4, 4)})
    shy = {"attention": "shy", "no_rope_every": 0}
    assert problems(recipe, model=shy) == {}
    assert "parts that say where" in problems(recipe, model=shy, mesh={"tensor": 2})["mesh.tensor"]
    assert "tokens see each other" in problems(recipe, model=shy, mesh={"context": 2})["mesh.context"]
    assert "other documents" in problems(recipe, model=shy, data={"document_mask": True})["model.attention"]
    assert "to balance" in problems(recipe, model=shy, mesh={"pipeline": 2})["pipeline.split"]
    assert "mesh.tensor" not in problems(recipe, model={"attention": "gated"}, mesh={"tensor": 2})
    with pytest.raises(UserError, match='attention = "shy": it does not say its costs'):
        predict(change(recipe, model=shy), recipe.mesh.fit(1))
    with pytest.raises(ValueError, match='attention = "shy" does not say its costs'):
        change(recipe, model=shy).model.flops_per_token(8, "full")
    assert "attention = gated" in str(beyond_hf(gated()))
    assert "export_hf" in str([*problems(recipe, model={"attention": "gated"}, checkpoint={"export_hf": True})])


def test_part_refuses_fields_that_it_does_not_read() -> None:
    part("attention", "shy", "nowhere:x", tensors=lambda config, layer: {})
    assert "no_rope_every" in dict(gated(attention_scale_width=3).problems() or [("no_rope_every", "")])
    found = dict(replace(gated(window=4), attention="shy").problems())
    assert found["window"] == 'is not read by attention = "shy"; write 0'
    assert "no_rope_every" in found
    assert gated(window=4).problems() == []
    moe = replace(SIZES["moe_debug"], feed_forward="squared_relu")
    assert dict(moe.problems())["experts"] == 'is not read by feed_forward = "squared_relu"; write 0'
    assert "no norm of all heads" in dict(gated(norm="layer", qk_norm="all").problems())["norm"]


def test_tensor_group_needs_equal_parts_of_a_matrix() -> None:
    shapes = {"a.weight": (96, 8), "b.weight": (8, 90)}
    part("feed_forward", "odd", "nowhere:x", tensors=lambda config, layer: shapes, column=("a",), row=("b",))
    recipe = load(DEBUG, rules=False)
    found = problems(recipe, model={"feed_forward": "odd", "key_value_heads": 4}, mesh={"tensor": 4})
    assert "4 processes cannot share the 90 of feed_forward.b" in found["mesh.tensor"]
    assert "mesh.tensor" not in problems(recipe, model={"feed_forward": "odd"}, mesh={"tensor": 2})


@pytest.mark.parametrize(
    ("arguments", "facts", "message"),
    [
        (("place", "x", "a:b"), {"tensors": dict}, "there is no such place"),
        (("attention", "default", "a:b"), {"tensors": dict}, "it is ours"),
        (("attention", "x", "a:b"), {}, "says no tensors"),
        (("attention", "x", "a:b"), {"tensors": dict, "reads": ("windows",)}, "it can read qk_norm, window"),
        (("attention", "x", "a:b"), {"tensors": dict, "column": ("q",)}, "both column and row"),
    ],
)
def test_registration_refuses(arguments: Any, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        part(*arguments, **facts)


def test_builder_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r'"models\.decoder:Attentive" of a part cannot be imported'):
        Part("models.decoder:Attentive").make()


def test_module_with_other_tensors_than_it_says_is_refused() -> None:
    part("feed_forward", "liar", "models.decoder:FeedForward", tensors=lambda c, n: {"up_proj.weight": (1, 2)})
    recipe = change(load(DEBUG, rules=False), model={"feed_forward": "liar"})
    with pytest.raises(UserError, match=r"feed_forward.down_proj.weight: .* say None, but its module has"):
        plain_model(recipe, device_type="cpu")
    plain_model(change(recipe, model={"feed_forward": "squared_relu"}), [1], device_type="cpu")


def test_family_gives_sizes_and_parts() -> None:
    registry.put("family", "gated_debug", gated())
    recipe = load(DEBUG, ["--model.name", "gated_debug", "--model.layers", "3"], rules=False)
    assert recipe.model == replace(gated(), name="gated_debug", layers=3)
    with pytest.raises(UserError, match='did you mean "gated_debug"'):
        load(DEBUG, ["--model.name", "gated_debg"], rules=False)


# What they cost


@pytest.mark.slow
@pytest.mark.parametrize("changes", ["none 1", "selective 2", "none 2 tensor"])
def test_memory_of_gated_attention_is_predicted(changes: str) -> None:
    mode, processes, *axis = changes.split()
    flags = ["--run.device=cpu", "--compile.enabled=false", "--fsdp.param_dtype=bfloat16"]
    flags += ["--batch.micro_batch_size=2", f"--activation_checkpointing.mode={mode}", "--model.attention=gated"]
    flags += ["--batch.sequence_length=64", *(["--mesh.tensor=2"] if axis else [])]
    recipe = load(DEBUG.with_name("llama3_debug.toml"), flags, rules=False)
    live = tracked_step(recipe, int(processes))
    predicted = predict(recipe, recipe.mesh.fit(int(processes)), context=False)
    assert predicted.peak == pytest.approx(live.peak, rel=1e-4), f"{predicted.fullest} here, {live.fullest} there"


def test_time_of_gated_attention_is_planned() -> None:
    file = DEBUG.parent / "benchmarks" / "llama3_8b_8xh100.toml"
    plain = load(file, rules=False)
    recipe = change(plain, model={"attention": "gated"})
    world = world_of(recipe, Asked(file.stem))
    before, after = plan(plain, world), plan(recipe, world)
    work = work_of(recipe, recipe.mesh.fit(8))
    assert work.block_params - work_of(plain, recipe.mesh.fit(8)).block_params == 4096 * 4096
    assert [*work.linears][:2] == ["attention.q_proj", "attention.k_proj"] and [*work.linears][
        -1
    ] == "feed_forward.down_proj"
    more = recipe.model.flops_per_token(8192, "full") / plain.model.flops_per_token(8192, "full")
    assert more < after.time.step_seconds / before.time.step_seconds < more**2
    assert after.memory.peak > before.memory.peak


def test_linears_of_a_part_that_float8_excludes_are_planned_as_plain_ones() -> None:
    file = DEBUG.parent / "benchmarks" / "llama3_8b_8xh100.toml"
    recipe = change(load(file, rules=False), model={"attention": "gated"}, float8={"recipe": "tensorwise"})
    names = {f"attention.{one}_proj" for one in ("q", "k", "v", "o", "gate")}
    for exclude, found in {"attention": names, "k_proj": {"attention.k_proj"}}.items():
        work = work_of(change(recipe, float8={"exclude": (exclude,)}), recipe.mesh.fit(8))
        assert work.plain_linears == found <= work.linears.keys()


def test_page_shows_the_file_that_is_tested() -> None:
    page = (DEBUG.parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
    assert (FOLDER / "gated_attention.py").read_text(encoding="utf-8") in page


# What they train


@pytest.mark.slow
def test_gated_attention_trains_saves_resumes_and_generates(corpus: Path, tmp_path: Path, alone: World) -> None:
    recipe = change(small_recipe(corpus, tmp_path, steps=6), model={"attention": "gated"})

    def losses(name: str, *ends: int) -> list[float]:
        for steps in ends:
            assert train(change(recipe, run={"name": name, "steps": steps}), alone) == 0
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [row["loss"] for row in map(json.loads, lines) if "loss" in row]

    assert losses("resumed", 4, 6) == losses("whole", 6)
    run = tmp_path / "runs" / "whole"
    assert find_weights(run).model.attention == "gated"
    opened = open_model(run, dtype=torch.float32, device=torch.device("cpu"))
    tokens = [*generate(cast(Decoder, opened.model), [5, 6], Sampling(max_tokens=3, temperature=0))]
    for count, token in enumerate(tokens, start=2):
        assert opened.model(torch.tensor([[5, 6, *tokens][:count]]))[0, -1].argmax() == token
    with pytest.raises(UserError, match="the model cannot be a Hugging Face folder: attention = gated"):
        export_checkpoint(find_weights(run).path, tmp_path / "export")
    registry._parts.pop(("attention", "gated"))
    with pytest.raises(UserError, match="is registered by no module"):
        _ = find_weights(run).model


def test_generation_without_a_cache_is_refused() -> None:
    part("attention", "shy", "nowhere:x", tensors=lambda config, layer: {})
    model = filled(gated())
    model.config = replace(model.config, attention="shy")
    with pytest.raises(UserError, match='attention = "shy" has no cache'):
        next(generate(model, [1], Sampling(max_tokens=1)))


def verdicts_with_parts(recipes: list[Recipe]) -> list[dict[str, Any]]:
    from tests.proofs import verdicts

    kind = with_plugins(load_plugins(str(FOLDER / file) for file in NAMES))
    return verdicts([kind(**vars(recipe)) for recipe in recipes])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("1.1.2.2:documents", "attention"),
        ("2.1.2.1.1:plain", "attention feed_forward"),
        ("1.2.1.2:selective", "attention feed_forward norm"),
        pytest.param("1.1.1.2:olmo", "attention", marks=pytest.mark.exhaustive),
        pytest.param("1.1.1.2:tensorwise,compile", "attention feed_forward", marks=pytest.mark.exhaustive),
    ],
)
def test_parts_are_proved(case: str, parts: str, tmp_path: Path) -> None:
    from tests.proofs import processes_of, recipe_of

    recipe = change(recipe_of(case, tmp_path), model={place: ALL[place] for place in parts.split()})
    (verdict,) = run_processes(processes_of(case), verdicts_with_parts, [recipe])[0]
    assert verdict["verdict"] == "proved", verdict
