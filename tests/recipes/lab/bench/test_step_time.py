"""The page of the predicted goals and its command; tests/recipes/plan/test_time.py checks the model."""

from pathlib import Path

import pytest

from recipes.lab.bench import step_time
from recipes.lab.sweep.grid import read_sweep
from recipes.recipe.load import CONFIGS


@pytest.mark.slow
def test_the_pages_tables_are_up_to_date() -> None:
    text = step_time.PAGE.read_text(encoding="utf-8")
    assert text == step_time.with_tables(text), "run python scripts/bench.py --suite step_time --write-docs"


@pytest.mark.slow
def test_no_change_to_a_recipe_makes_its_step_slower() -> None:
    for goal in step_time.GOALS:
        speeds = [goal.predicted(number).tokens_per_second for number in range(len(step_time.CHANGES) + 1)]
        assert speeds == sorted(speeds) and speeds[-1] > 1.04 * speeds[0], goal.title


def test_the_goals_are_predicted_within_a_tenth() -> None:
    for goal in step_time.GOALS:
        found = goal.predicted(len(step_time.CHANGES))
        assert 0.9 * goal.target < found.tokens_per_second < 1.1 * goal.target, goal.title


def test_the_goals_are_the_rows_that_the_gpu_suite_measures(tmp_path: Path) -> None:
    sweep = read_sweep(CONFIGS / "sweeps/gpu_bench.toml", output=tmp_path, processes=1)
    rows = {row.label: row.recipe for row in sweep.rows}
    sections = ("model", "batch", "attention", "float8", "activation_checkpointing", "compile", "fsdp", "mesh")
    for goal in step_time.GOALS:
        now = goal.recipe(len(step_time.CHANGES))
        for section in sections:
            assert getattr(rows[goal.row], section) == getattr(now, section), (goal.title, section)
        assert rows[goal.row].optimizer == now.optimizer


def test_the_command_prints_the_pieces_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "benchmarks/smollm3_3b_8xh100.toml")
    assert step_time.main(["--recipe", path, "--processes", "8", "--device", "H100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("on 8 x H100, predicted, not measured")
    pieces = [line[:32].strip() for line in lines[1:-1]]
    assert pieces[0] == "products" and pieces[-1] == "messages: shard, inside nodes"
    assert lines[-1].startswith("step ") and lines[-1].endswith(" tokens/s per GPU")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--float8.recipe", "tensorwise"], "overrides need a recipe"),
        (["--recipe", str(step_time.BASE), "--processes", "0"], "must be 1 or more"),
        (["--recipe", str(step_time.BASE), "--write-docs"], "leave out --recipe"),
        (["--recipe", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_wrong_words_get_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert step_time.main(words) == 2
    assert message in capsys.readouterr().err
