"""The small recipes of a ladder: their shapes, rates, batches and schedules."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from models.sizes import SIZES
from parallel.errors import UserError
from recipes.lab.ladder.rungs import Budget, budgets, require_scalable, rung_sizes, scaled
from recipes.lab.ladder.runs import runs_of
from recipes.recipe.fields import with_values
from recipes.recipe.load import CONFIGS, load, to_toml

LARGE = CONFIGS / "smollm3_debug_8m.toml"


def ladder(*changes: str, folder: Path = Path("ladder"), **options: Any) -> list[Budget]:
    asked = {"tokens": (10, 20, 40), "per_parameter": True, "seeds": 1, "rates": (), "processes": 1} | options
    recipe = load(LARGE, changes, rules=False)
    return budgets(recipe, rung_sizes(recipe, 5), folder=folder, **asked)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("share", [8, 64])
def test_each_size_has_smaller_ones_of_its_shape(name: str, share: int) -> None:
    large = SIZES[name]
    wanted = large.non_embedding_params() // share
    small = scaled(large, wanted)
    assert small.problems() == []
    assert small.non_embedding_params() == pytest.approx(wanted, rel=0.25)
    assert small.head_width % (8 if small.head_width > 64 else 2) == 0
    kept = ("vocabulary", "experts", "experts_per_token", "qk_norm", "norms", "tied_embeddings", "rope_theta")
    assert [getattr(small, field) for field in kept] == [getattr(large, field) for field in kept]
    assert small.heads / small.key_value_heads == large.heads / large.key_value_heads
    if large.width > 500:  # below, whole heads and layers are coarse
        ratio = small.width / small.layers / (large.width / large.layers)
        assert 0.6 < ratio < 1.7


def test_rates_and_batches_follow_the_stated_powers_of_the_size() -> None:
    large = load(LARGE, ["--batch.global_batch_size", "4096"], rules=False)
    for budget in ladder("--batch.global_batch_size", "4096"):
        ratio = budget.rung.parameters / large.model.non_embedding_params()
        for recipe in budget.recipes:
            assert recipe.optimizer.lr == pytest.approx(large.optimizer.lr * ratio ** (-1 / 3))
            assert recipe.batch.global_batch_size == pytest.approx(4096 * ratio ** (2 / 3), rel=0.02)
            seen = recipe.validation.batches * recipe.batch.global_batch_size
            assert seen == pytest.approx(large.validation.batches * 4096, rel=0.02)  # sequences


def test_budgets_share_a_trunk_and_decay_on_forks() -> None:
    found = ladder("--schedule.min_lr_ratio", "0.1")
    assert len(runs_of(found)) == 5 * (1 + 3)
    for budget in found:
        trunk, fork = budget.recipes
        branch = int(fork.run.continue_from.rpartition("@")[2])
        assert fork.run.continue_from == f"{trunk.run.folder}@{branch}"
        assert branch % trunk.checkpoint.keep_every == 0 and branch % trunk.validation.every == 0
        assert (fork.run.steps - branch) / fork.run.steps == pytest.approx(0.2, abs=0.01)  # as in the large recipe
        rates = [
            one.schedule.learning_rate(step, peak=1.0, steps=one.run.steps)
            for one, steps in ((trunk, range(branch)), (fork, range(branch, fork.run.steps)))
            for step in steps
        ]
        assert max(abs(now - before) for before, now in pairwise(rates)) < 0.1  # no jump
        assert rates[-1] < 0.2 and max(rates) == 1.0
    last = found[-1]
    assert last.tokens == pytest.approx(40 * last.rung.parameters, rel=0.02)


@pytest.mark.parametrize(("kind", "runs"), [("cosine", 3), ("linear", 3), ("constant", 1)])
def test_a_rate_that_never_stays_has_whole_runs_and_a_constant_one_a_single_run(kind: str, runs: int) -> None:
    found = ladder("--schedule.kind", kind, "--schedule.decay_steps", "0")
    assert len(runs_of(found)) == 5 * runs
    assert len({budget.tokens for budget in found if budget.rung == found[0].rung}) == 3
    for budget in found:
        assert [recipe.schedule.kind for recipe in budget.recipes] == [kind]
        assert budget.steps % budget.recipes[0].validation.every == 0 or budget.steps == budget.recipes[0].run.steps


@pytest.mark.parametrize("decay", ["1172", "0"])
def test_a_decay_that_is_the_whole_run_or_nothing_has_runs_of_each_length(decay: str) -> None:
    found = ladder("--schedule.warmup_steps", "0", "--schedule.decay_steps", decay)
    assert len({(budget.rung.name, budget.tokens) for budget in found}) == 15
    assert {len(budget.recipes) for budget in found} == {1}


def test_a_native_model_of_a_config_has_rungs_of_its_own_shape() -> None:
    recipe = load(CONFIGS / "qwen3_debug.toml")
    small = scaled(recipe.model, recipe.model.non_embedding_params() // 4)
    assert (recipe.model.config != "", small.config, small.qk_norm) == (True, "", recipe.model.qk_norm)


def test_three_rungs_try_other_rates_on_their_shortest_run() -> None:
    found = ladder(rates=(0.5, 2.0))
    tried = [budget for budget in found if budget.tries]
    usual = {budget.rung.name: budget.recipes[0].optimizer.lr for budget in found if not budget.tries}
    assert [bool(one.tries) for one in found] == sorted((bool(one.tries) for one in found), reverse=True)  # first
    factors = [budget.recipes[0].optimizer.lr / usual[budget.rung.name] for budget in tried]
    assert factors == pytest.approx([0.5, 2.0] * 3)
    for budget in tried:
        shortest = min(one.tokens for one in found if one.rung == budget.rung and not one.tries)
        assert budget.tokens == pytest.approx(shortest, rel=0.02)


def test_every_written_recipe_passes_all_rules(tmp_path: Path) -> None:
    for number, recipe in enumerate(runs_of(ladder(folder=tmp_path, seeds=2, rates=(0.5,), processes=2))):
        file = tmp_path / f"{number}.toml"
        file.write_text(to_toml(recipe))
        assert load(file, processes=2) == recipe


def test_a_batch_is_divided_by_the_processes() -> None:
    for budget in ladder("--batch.global_batch_size", "64", processes=8):
        batch = budget.recipes[0].batch
        assert batch.global_batch_size % (8 * batch.micro_batch_size) == 0


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (LARGE, {"model.weights": "somewhere"}, "continues from trained weights, but rungs start at random"),
        (LARGE, {"run.continue_from": "runs/trunk"}, "continues from trained weights"),
        (LARGE, {"data.validation_fraction": 0.0}, r"has no text to validate on; write data\.validation_fraction"),
        (CONFIGS / "smollm3_debug_stages.toml", {}, "has stages, but a ladder predicts one text and length"),
    ],
)
def test_recipes_that_have_no_ladder_are_refused(file: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        require_scalable(with_values(load(file, rules=False), change), file)


def test_rungs_that_are_one_model_are_refused() -> None:
    recipe = load(LARGE)
    with pytest.raises(UserError, match=r"come out as 0.989M, 0.989M; name fewer, or others"):
        budgets(recipe, [1_000_000, 1_000_100], folder=Path("x"), tokens=(1,), per_parameter=True, seeds=1)
