"""The line of a plan that says what to try next."""

import re
from dataclasses import replace

import pytest

from parallel.errors import UserError
from recipes.lab.plan.hints import hint
from recipes.lab.plan.plan import Plan, plan
from recipes.lab.plan.world import Asked, world_of
from recipes.recipe.load import CONFIGS, load


def planned(*changes: str, file: str = "smollm3_3b_8xh100.toml") -> Plan:
    recipe = load(CONFIGS / file, changes, rules=False)
    return plan(recipe, world_of(recipe, Asked("")))


def test_the_setting_that_is_fastest_alone_is_named_with_what_it_gains() -> None:
    found = planned("--compile.enabled", "false")
    faster = planned()
    gain = faster.time.tokens_per_second / found.time.tokens_per_second - 1
    said = hint(found)
    assert said.startswith(
        f"compile.enabled = true: {gain:.0%} faster, {faster.memory.peak / 1e9:.1f} GB; --plan --sea"
    )


def test_another_number_of_replicas_alone_is_named_where_it_is_fastest() -> None:
    """The search found 5.7% with this mesh when the hint said that no setting alone made it 1% faster."""
    said = hint(planned(file="smollm3_3b_48x8h100.toml"))
    assert re.match(r"mesh.replicate = \d and mesh.shard = -1: [56]% faster", said)


def test_what_makes_a_recipe_fit_comes_first_though_it_is_slower() -> None:
    found = planned("--batch.micro_batch_size", "4")
    assert not found.fits
    assert hint(found).startswith("it fits with ")


def test_a_recipe_that_no_setting_helps_is_told_so() -> None:
    found = planned("--model.layers", "400", "--model.width", "8192")
    assert not found.fits
    assert hint(found).startswith("no setting alone makes it fit; ")


def test_a_setting_whose_time_is_unknown_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned()

    def unknown(*_: object, **__: object) -> Plan:
        raise UserError("unknown")

    monkeypatch.setattr("recipes.lab.plan.hints.plan", unknown)
    assert hint(found).startswith("no setting alone makes it 1% faster; ")


def test_a_setting_that_the_rules_refuse_is_not_named() -> None:
    found = planned("--batch.global_batch_size", "8")
    slow = replace(found, time=replace(found.time, seconds={"products": 1e9}))
    assert "micro_batch_size = 2" not in hint(slow)
