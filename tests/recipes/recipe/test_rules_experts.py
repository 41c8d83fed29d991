"""Every rule about routed experts: what triggers it, its message, and that its remedy works."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel.config import CompileConfig, Float8Config, FSDPConfig, MeshConfig
from parallel.errors import UserError
from recipes.optimization.config import ExpertsConfig
from recipes.recipe import rules_experts
from recipes.recipe.load import CONFIGS, load, to_toml
from recipes.recipe.schema import Recipe
from tests.recipes.recipe.test_rules_pipeline import broken_by


def routed(*, model: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    """A recipe of 8 experts, 2 for each token."""
    plain = Recipe()
    shape = {"experts": 8, "experts_per_token": 2, "expert_width": 64} | (model or {})
    return replace(plain, model=replace(plain.model, **shape), **sections)


@pytest.mark.parametrize(
    ("recipe", "processes", "key", "message"),
    [
        (Recipe(mesh=MeshConfig(expert=2)), None, "mesh.expert", "the model has none (model.experts = 0); write 1"),
        (routed(mesh=MeshConfig(expert=3)), None, "mesh.expert", "model.experts = 8 equally; write 1 or 2"),
        (routed(mesh=MeshConfig(expert=6)), 12, "mesh.expert", "6 processes cannot share model.experts = 8 equally"),
        (routed(model={"experts": 2}, mesh=MeshConfig(expert=8)), 8, "mesh.expert", "write 1 or 2"),
        (routed(mesh=MeshConfig(expert=4)), 2, "mesh.expert", "must divide shard 2 x context 1 x tensor 1 = 2"),
        (routed(mesh=MeshConfig(-1, 2, expert=4)), None, "mesh.expert", "must divide shard 2"),
        (routed(experts=ExpertsConfig(balance="bias")), None, "experts.balance", "write router_bias = true, or"),
        (routed(model={"expert_width": 60}), None, "model.expert_width", "a multiple of 8 in bfloat16"),
        (routed(model={"width": 132}), None, "model.width", "rows of 16 bytes each; write 136"),
        (routed(model={"experts": 2**20}), None, "model.experts", "is more than 16,384"),
        (
            routed(mesh=MeshConfig(expert=2), fsdp=FSDPConfig(reduce_dtype="bfloat16")),
            2,
            "fsdp.reduce_dtype",
            'a model with experts and mesh.expert > 1; write "float32"',
        ),
        (
            routed(mesh=MeshConfig(tensor=2), fsdp=FSDPConfig(symmetric_memory=True)),
            2,
            "fsdp.symmetric_memory",
            "experts and mesh.tensor > 1; write false",
        ),
        (
            routed(float8=Float8Config(recipe="rowwise", emulate=True)),
            None,
            "float8.exclude",
            'add "experts", so that all other linears are converted',
        ),
        (
            routed(float8=Float8Config(recipe="tensorwise", all_gather=True)),
            None,
            "float8.all_gather",
            "was not tried with experts; write false",
        ),
        (
            routed(mesh=MeshConfig(tensor=2, overlap_tensor=True), compile=CompileConfig(enabled=True)),
            2,
            "mesh.overlap_tensor",
            "was not tried with experts; write false",
        ),
    ],
)
def test_what_experts_cannot_do_is_refused_with_a_remedy(
    recipe: Recipe, processes: int | None, key: str, message: str
) -> None:
    assert message in broken_by(recipe, processes=processes).get(key, "nothing")


@pytest.mark.parametrize("mesh", [MeshConfig(expert=4), MeshConfig(shard="node", expert=4), MeshConfig(2, expert=2)])
def test_an_expert_axis_is_accepted_before_the_processes_are_known(mesh: MeshConfig) -> None:
    assert not broken_by(routed(mesh=mesh))


def test_float32_allows_rows_of_half_the_length() -> None:
    assert not broken_by(routed(model={"expert_width": 60}, fsdp=FSDPConfig(param_dtype="float32")))


def test_float8_is_accepted_where_experts_are_excluded() -> None:
    """Trap 24: only linears would be converted, and nothing would say so."""
    assert not broken_by(routed(float8=Float8Config(recipe="rowwise", emulate=True, exclude=("lm_head", "experts"))))


def test_fields_of_experts_are_refused_without_experts_where_the_recipe_itself_writes_them(tmp_path: Path) -> None:
    words = ["--model.experts=0", "--model.router=sigmoid", "--model.shared_experts=1", "--model.router_scale=1"]
    for elsewhere in (False, True):
        with pytest.raises(UserError, match=r"(?s)2 problems.*shared_experts = 1 .*has no effect.* or 0 here") as found:
            load(CONFIGS / "moe_debug.toml", words, elsewhere=elsewhere)
        assert 'has no effect without experts; write experts = 8 or so, or "softmax" here' in str(found.value)
    dense = load(CONFIGS / "moe_debug.toml", words[:1])
    assert dense.model.experts_per_token == 2, "those of the size may be left"
    resolved = tmp_path / "recipe.toml"
    resolved.write_text(to_toml(dense))
    assert load(resolved) == dense


def test_a_bias_that_nothing_moves_is_accepted_for_weights_that_have_one() -> None:
    assert not broken_by(routed(model={"router_bias": True}))


def test_experts_on_one_process_reduce_in_bfloat16_and_need_no_new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_experts, "version", lambda name: "2.11.0+cu130")
    assert not broken_by(routed(fsdp=FSDPConfig(reduce_dtype="bfloat16")), processes=2)
    problem = broken_by(routed(mesh=MeshConfig(expert=2)), processes=2)["mesh.expert"]
    assert problem == "in a model with experts needs torch 2.12 or later, and this is 2.11.0+cu130; write 1"
