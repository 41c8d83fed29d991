"""Which checkpoint a run keeps as the best, and what the list of checkpoints says of it."""

from pathlib import Path

import pytest

from parallel.dist import World
from recipes.checkpoint.config import Best
from recipes.checkpoint.look import find, table
from recipes.recipe.schema import Recipe
from tests.training import change, rows, train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("text", "row", "highest"),
    [
        ("validation_loss", "validation_loss", False),
        ("min:validation_loss/web", "validation_loss/web", False),
        ("max:validation_task/x/acc", "validation_task/x/acc", True),
        ("validation_loss/max:x", "validation_loss/max:x", False),
    ],
)
def test_direction_is_written_before_the_name(text: str, row: str, highest: bool) -> None:
    best = Best.named(text)
    assert (best.row, best.highest) == (row, highest)


def test_best_checkpoint_of_a_run_outlives_restarts_and_is_listed(small: Recipe, alone: World) -> None:
    """The highest loss, which the first validation has, so that a run without keep_best would delete it."""
    recipe = change(
        small,
        run={"name": "best", "steps": 4},
        validation={"every": 2, "batches": 1},
        checkpoint={"every": 2, "keep": 1, "keep_best": "max:validation_loss"},
    )
    assert train(recipe, alone) == 0
    longer = change(recipe, run={"steps": 8})
    assert train(longer, alone) == 0
    losses = {row["step"]: row["validation_loss"] for row in rows(longer) if "validation_loss" in row}
    assert max(losses, key=lambda step: losses[step]) == 2
    paths = find(recipe.run.folder)
    assert [path.name for path in paths] == ["step-00000002", "step-00000008"]
    for thorough in (False, True):
        _, best, newest = (line for line, sound in table(paths, thorough=thorough))
        assert best.endswith(f", best validation_loss: {losses[2]:.6g}") and "best" not in newest


def test_checkpoint_of_a_step_without_validation_has_no_value(small: Recipe, alone: World) -> None:
    """Of a run that was stopped between two validations, for example: it is the newest, but not the best."""
    recipe = change(
        small,
        run={"name": "unvalidated", "steps": 3},
        validation={"every": 0},
        checkpoint={"every": 3, "keep": 1, "keep_best": "validation_loss"},
    )
    assert train(recipe, alone) == 0
    [_, (line, code)] = table(find(Path(recipe.run.folder)), thorough=False)
    assert code == 0 and line.endswith("complete")


def test_the_checkpoints_of_the_best_average_are_kept_and_listed(small: Recipe, alone: World) -> None:
    """The highest loss, which the first average has."""
    recipe = change(
        small,
        run={"name": "average", "steps": 5},
        validation={"every": 2, "batches": 1, "average": 2},
        checkpoint={"every": 2, "keep": 2, "keep_best": "max:validation_average_loss"},
    )
    assert train(recipe, alone) == 0
    longer = change(recipe, run={"steps": 12})
    assert train(longer, alone) == 0
    losses = {row["step"]: row["validation_average_loss"] for row in rows(longer) if "validation_average_loss" in row}
    assert max(losses, key=lambda step: losses[step]) == 4
    paths = find(recipe.run.folder)
    assert [path.name[-2:] for path in paths] == ["02", "04", "10", "12"]
    [_, _, (line, _), *_] = table(paths, thorough=False)
    assert line.endswith(f", best validation_average_loss: {losses[4]:.6g} of steps 2 and 4")
