"""What a run says of the ladder that predicted its loss."""

import json
from pathlib import Path

import pytest

from parallel.dist import World
from recipes.lab.curves.reading import read_runs
from recipes.lab.curves.report import sections
from recipes.recipe.schema import Recipe
from tests.ladders import constant, write_ladder
from tests.training import change, rows, train

pytestmark = pytest.mark.slow

LOW, HIGH = constant(1.0), constant(100.0)
"""Laws below and above every loss of an untrained model."""


@pytest.fixture
def validated(small: Recipe) -> Recipe:
    return change(small, data={"validation_fraction": 0.05}, validation={"every": 1, "batches": 1})


def with_ladder(recipe: Recipe, file: str, name: str) -> Recipe:
    return change(recipe, run={"name": name}, validation={"ladder": file})


def predicted(recipe: Recipe) -> list[list[str]]:
    """What the report of the run says of its plan and its ladder."""
    [run] = read_runs([recipe.run.folder])
    return [
        [*row] for section in sections(run) if section.title == "Predicted and measured" for row in section.rows[1:]
    ]


def test_a_report_says_what_the_ladder_predicts_for_the_steps_so_far(
    validated: Recipe, alone: World, tmp_path: Path
) -> None:
    """Nothing before its first law, and while the run goes on what one of the whole run has after that share of it."""
    recipe = with_ladder(validated, write_ladder(tmp_path / "ladder.json", validated, {0.5: LOW, 1.0: HIGH}), "beside")
    assert train(recipe, alone) == 0
    *_, last = rows(recipe)
    [[what, interval, measured]] = predicted(recipe)
    assert (what, measured) == ("validation loss at step 8", f"{last['validation_loss']:.3f}")
    assert interval.startswith("100.000 (99.0")
    metrics, kept = recipe.run.folder / "metrics.jsonl", []
    for line in metrics.read_text().splitlines():
        kept += [line] if json.loads(line)["step"] <= 4 else []
    metrics.write_text("\n".join(kept) + "\n")
    [[what, interval, _]] = predicted(recipe)
    assert what == "validation loss at step 4" and interval.startswith("1.000 (0.99")
    metrics.write_text("\n".join(line for line in kept if json.loads(line)["step"] <= 3) + "\n")
    assert predicted(recipe) == []
