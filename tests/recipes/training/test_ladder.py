"""What a run says of the ladder that predicted its loss."""

from pathlib import Path

import pytest

from parallel.dist import World
from recipes.recipe.schema import Recipe
from tests.ladders import constant, write_ladder
from tests.processes import untimed
from tests.training import change, rows, train

pytestmark = pytest.mark.slow

LOW, HIGH = constant(1.0), constant(100.0)
"""Laws below and above every loss of an untrained model."""


@pytest.fixture
def validated(small: Recipe) -> Recipe:
    return change(small, data={"validation_fraction": 0.05}, validation={"every": 1, "batches": 1})


def with_ladder(recipe: Recipe, file: str, name: str) -> Recipe:
    return change(recipe, run={"name": name}, validation={"ladder": file})


def said(recipe: Recipe) -> list[str]:
    """The lines of the log that name the ladder."""
    log = untimed((recipe.run.folder / "log.txt").read_text()).splitlines()
    return [" ".join(line.split()) for line in log if "ladder" in line]


def test_a_loss_above_the_interval_twice_in_a_row_is_warned_of_once_until_it_returns(
    validated: Recipe, alone: World, tmp_path: Path
) -> None:
    laws = {0.25: LOW, 0.375: LOW, 0.5: HIGH, 0.625: LOW, 1.0: LOW}
    recipe = with_ladder(validated, write_ladder(tmp_path / "ladder.json", validated, laws), "above")
    assert train(recipe, alone, silent=False) == 0
    first, second, last = said(recipe)
    assert first.startswith("step 3 validation loss ") and second.startswith("step 6 validation loss ")
    assert first.endswith("is above the ladder's 95% (0.991 to 1.010) since step 2")
    assert second.endswith("since step 5")
    assert last.startswith("step 8 the ladder predicted 1.000 (0.991 to 1.010); the loss is ")


def test_the_end_of_a_run_tells_how_far_off_its_ladder_was(validated: Recipe, alone: World, tmp_path: Path) -> None:
    texts = validated.data.source
    two = change(validated, validation={"sources": {"a": texts, "b": ""}, "every": 8})
    recipe = with_ladder(two, write_ladder(tmp_path / "ladder.json", two, {1.0: HIGH}), "below")
    assert train(recipe, alone, silent=False) == 0
    *_, a, b, last = rows(recipe)
    mean = (a["validation_loss/a"] + b["validation_loss/b"]) / 2
    assert last["step"] == 8 and last["ladder_loss"] == pytest.approx(100)
    assert last["ladder_low"] == pytest.approx(99, abs=0.1) and last["ladder_high"] == pytest.approx(101, abs=0.1)
    assert last["ladder_error"] == pytest.approx(mean / 100 - 1)
    silent, line = said(recipe)
    assert silent.endswith("has a law of the last losses only: nothing is compared before the end")
    assert line.endswith(f"the loss is {mean:.3f}, {1 - mean / 100:.1%} below")


def test_resumed_runs_and_forks_are_compared_too(validated: Recipe, alone: World, tmp_path: Path) -> None:
    file = write_ladder(tmp_path / "ladder.json", validated, {0.5: LOW, 1.0: LOW})
    begun = change(validated, run={"name": "resumed", "steps": 4}, checkpoint={"keep_every": 4})
    assert train(begun, alone) == 0
    resumed = change(with_ladder(validated, file, "resumed"), checkpoint={"keep_every": 4})
    start = f"{begun.run.folder}@4"
    fork = change(with_ladder(validated, file, "fork"), run={"continue_from": start})
    for recipe in (resumed, fork):
        assert train(recipe, alone, silent=False) == 0
        assert [row["step"] for row in rows(recipe) if "ladder_loss" in row] == [8]
        assert "since step 5" in said(recipe)[0]
    assert train(resumed, alone) == 0
    assert [row["step"] for row in rows(resumed) if "ladder_loss" in row] == [8], "a finished run keeps its row"
