"""What is wrong with tasks and with what the best checkpoint is chosen by, and what to write instead."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from recipes.checkpoint.config import CheckpointConfig
from recipes.evaluation.config import ValidationConfig
from recipes.recipe.load import load
from recipes.recipe.rules_tasks import best_problems, require_row, task_problems
from tests.training import DEBUG


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tasks": ("x",)}, "write validation.every = 1000, for example"),
        ({"every": 1, "task_limit": 5}, 'is for tasks; write tasks = ["NAME"], or 0'),
        ({"every": 1, "tasks": ("gone.yaml",)}, "'gone.yaml' does not exist; write the path of a YAML file"),
        ({"every": 1, "tasks": ("gone/folder",)}, "'gone/folder' does not exist"),
    ],
)
def test_tasks_that_cannot_be_evaluated_are_refused(fields: dict[str, Any], message: str) -> None:
    [(_, problem)] = task_problems(ValidationConfig(**fields), encoder_decoder=False)
    assert message in problem


def test_encoder_decoder_models_are_refused(tmp_path: Path) -> None:
    validation = ValidationConfig(every=1, tasks=(str(tmp_path), "hellaswag"))
    assert not [*task_problems(validation, encoder_decoder=False)]
    [(field, problem)] = task_problems(validation, encoder_decoder=True)
    assert field == "tasks" and "not for encoder-decoder models; omit them" in problem


@pytest.mark.parametrize(
    ("keep_best", "fields", "message"),
    [
        ("validation_loss", {"every": 0}, "write checkpoint.every and validation.every"),
        ("validation_loss", {"every": 3}, "a multiple of validation.every = 3, instead of 4"),
        ("validation_los", {"every": 2}, 'is not a row of this run; write "validation_loss", or "max:'),
        (
            "validation_loss/c",
            {"every": 2, "sources": {"a": "x", "b": "y"}},
            '"validation_loss/a" or "validation_loss/b"',
        ),
        ("validation_average_loss", {"every": 2}, 'is not a row of this run; write "validation_loss"'),
        ("max:validation_average_loss", {"every": 2, "average": 2}, "would keep the worst checkpoint"),
        ("validation_task/x/acc", {"every": 2, "tasks": ("x",)}, 'write "max:validation_task/x/acc", or "min:"'),
        ("max:validation_task/x/acc", {"every": 2}, "names a task, but there are none"),
    ],
)
def test_best_by_a_value_that_never_comes_is_refused(keep_best: str, fields: dict[str, Any], message: str) -> None:
    checkpoint = CheckpointConfig(every=4, keep_best=keep_best)
    problems = [*best_problems(checkpoint, ValidationConfig(**fields))]
    assert message in problems[0]


@pytest.mark.parametrize(
    ("keep_best", "message"),
    [
        ("max:validation_task/x/acc", ""),
        ("min:validation_task/x/unknown", ""),
        ("min:validation_task/x/acc", "higher values are better; write 'max:validation_task/x/acc'"),
        ("max:validation_task/y/acc", 'the tasks have "validation_task/x/acc" or "validation_task/x/unknown"'),
    ],
)
def test_score_that_the_tasks_do_not_have_is_refused(keep_best: str, message: str) -> None:
    scores = {"x/acc": True, "x/unknown": None}
    if not message:
        require_row(keep_best, scores)
        return
    with pytest.raises(UserError) as caught:
        require_row(keep_best, scores)
    assert message in str(caught.value)


def test_recipe_with_a_wrong_task_names_its_field(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"validation\.tasks = \[.*\n.*gone\.yaml' does not exist"):
        load(DEBUG, ["--validation.every", "2", "--validation.tasks", "gone.yaml"])


def test_the_highest_validation_loss_is_not_kept_as_the_best() -> None:
    checkpoint = CheckpointConfig(every=10, keep_best="max:validation_loss")
    [problem] = best_problems(checkpoint, ValidationConfig(every=10))
    assert problem == 'would keep the worst checkpoint: lower losses are better; write "validation_loss"'
    assert not [*best_problems(replace(checkpoint, keep_best="min:validation_loss"), ValidationConfig(every=10))]
