"""The balance of routed experts: biases, columns of metrics.jsonl, and experts that are named."""

import math
from typing import Any

import pytest
import torch

from parallel.dist import World
from recipes.optimization import after_step
from recipes.recipe.schema import Recipe
from tests.processes import run_processes
from tests.training import change, rows, run_all, take_step, train, training

pytestmark = pytest.mark.slow

EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_width": 32}
COLUMNS = {f"expert_load/{name}" for name in ("largest", "smallest", "entropy", "dead")}
COLUMNS |= {"balance_loss", "router_z_loss"}


def routed(small: Recipe, name: str, *, model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Recipe:
    return change(small, run={"name": name, "steps": 6}, model=EXPERTS | (model or {}), **sections)


def favour(trainer: Any, expert: int) -> None:
    """Send every token of every layer to this expert."""
    for name, bias in trainer.built.model.named_buffers():
        if name.startswith("routers.") and name.endswith(".bias"):
            bias[expert] = 100.0


def test_rows_have_the_loads_and_the_losses_of_routers(alone: World, small: Recipe) -> None:
    recipe = routed(small, "columns", experts={"balance": "loss"})
    assert train(recipe, alone) == 0
    for row in rows(recipe):
        assert row.keys() >= COLUMNS
        assert 0 <= row["expert_load/smallest"] <= 1 <= row["expert_load/largest"] <= 2
        assert 0 < row["expert_load/entropy"] <= 1
        assert row["expert_load/dead"] == 0
        # At the start all scores are about the same: their losses are those of equal loads and of E equal logits.
        assert row["balance_loss"] == pytest.approx(1, abs=0.1)
        assert row["router_z_loss"] == pytest.approx(math.log(4) ** 2, rel=0.2)


def test_all_tokens_to_one_expert_train_and_are_named(
    alone: World, small: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(after_step, "LONG", 3)
    recipe = routed(small, "one_expert", model={"experts_per_token": 1, "router_bias": True})
    with training(recipe, alone) as trainer:
        favour(trainer, 1)
        assert trainer.run() == 0
    last = rows(recipe)[-1]
    assert (last["expert_load/largest"], last["expert_load/smallest"], last["expert_load/entropy"]) == (4, 0, 0)
    assert [row["expert_load/dead"] for row in rows(recipe)] == [0, 0, 6, 6, 6, 6]  # of two layers
    assert all(math.isfinite(row["loss"]) for row in rows(recipe))
    names = trainer.built.balance
    names._quiet = 0
    dead, over = names.lines()
    assert dead.startswith("DEAD EXPERTS: layer 0 expert 0, layer 0 expert 2, layer 0 expert 3, layer 1 expert 0")
    assert over == "OVERLOADED EXPERTS: layer 1 expert 1: 4.0x the mean, layer 0 expert 1: 4.0x the mean"
    assert names.lines() == []  # not at every row


def test_loads_are_means_over_the_steps_since_the_row_before(alone: World, small: Recipe) -> None:
    seldom = routed(small, "seldom", metrics={"every": 3})
    often = routed(small, "often")
    assert [train(recipe, alone) for recipe in (seldom, often)] == [0, 0]
    of_steps = [row["balance_loss"] for row in rows(often)]
    *_, fourth, sixth = rows(seldom)
    assert (fourth["step"], sixth["step"]) == (3, 6)
    assert sixth["balance_loss"] == pytest.approx(sum(of_steps[3:]) / 3)


def test_a_bias_moves_against_the_load_of_its_expert(alone: World, small: Recipe) -> None:
    recipe = routed(small, "moves", model={"router_bias": True}, experts={"balance": "bias", "bias_rate": 0.5})
    with training(recipe, alone) as trainer:
        favour(trainer, 1)
        take_step(trainer)
        biases = [bias for name, bias in trainer.built.model.named_buffers() if name.endswith(".bias")]
    assert len(biases) == 2
    for bias in biases:
        assert bias[1] == 99.5
        assert {abs(value) for value in bias[[0, 2, 3]].tolist()} <= {0.0, 0.5}


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_columns_are_equal_in_a_pipeline_with_divided_experts(small: Recipe, dense_layers: int) -> None:
    """With a dense layer, the first stage has no experts."""
    several = {
        "batch": {"micro_batch_size": 2},
        "experts": {"balance": "loss"},
        "model": {"dense_layers": dense_layers},
    }
    whole = routed(small, f"whole{dense_layers}", **several)
    mesh = {"pipeline": 2, "shard": 2, "expert": 2}
    cut = routed(small, f"cut{dense_layers}", **several, mesh=mesh, fsdp={"reshard_after_forward": False})
    assert run_processes(1, run_all, [whole]) == [[0]]
    assert run_processes(4, run_all, [cut]) == [[0]] * 4
    assert len(rows(whole)) == 6
    for alone, together in zip(rows(whole), rows(cut), strict=True):
        for column in COLUMNS:
            assert together[column] == pytest.approx(alone[column], rel=1e-5), column


def test_a_process_that_is_slow_because_of_its_experts_is_said_to_be(alone: World, small: Recipe) -> None:
    with training(routed(small, "slow"), alone) as trainer:
        own = trainer.built.balance
    own._degree, own._shares = 2, torch.tensor([[2.0, 1.0, 0.5, 0.5], [1.5, 1.5, 0.5, 0.5]])
    slow = [{"rank": rank, "phase": phase} for rank in (2, 3) for phase in ("compute", "data")]
    assert [*own.causes(slow)] == ["OVERLOADED EXPERTS: those of rank 2 have 1.5x the mean load"]


def test_a_skipped_step_moves_no_bias_and_counts_no_load(alone: World, small: Recipe) -> None:
    options = {"experts": {"balance": "bias"}, "metrics": {"every": 100}}
    with training(routed(small, "skips", model={"router_bias": True}, **options), alone) as trainer:
        for _ in range(2):
            take_step(trainer)
            trainer.clock.count_step()
        own = trainer.built.balance
        before = {name: value.clone() for name, value in trainer.built.model.named_buffers()}
        counted = own._counted.clone()
        own.move(torch.tensor(1.0), is_logged=False)
        for name, value in trainer.built.model.named_buffers():
            assert torch.equal(value, before[name]), name
    assert torch.equal(own._counted, counted)
