"""Tasks at the validations of a run: their rows, on any mesh, after a restart, and of the exported model."""

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from parallel.dist import World, start, stop
from parallel.errors import UserError
from recipes.schema import Recipe
from tests.meshes import mesh_config
from tests.processes import run_processes
from tests.tasks import write_tasks
from tests.training import change, rows, run_all, train

pytestmark = pytest.mark.slow

pytest.importorskip("lm_eval", reason="the lm-evaluation-harness is not installed: pip install -e '.[evaluation]'")

ROOT = Path(__file__).parents[3]
ROWS = {f"validation_task/{name}" for name in ("choices/acc", "texts/bits_per_byte", "answers/exact_match")}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For this process and for those that it starts."""
    for name, value in (("HF_DATASETS_OFFLINE", "1"), ("HF_HUB_OFFLINE", "1"), ("HF_HOME", str(tmp_path / "hf"))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def recipe(small: Recipe, tmp_path: Path) -> Recipe:
    tasks = write_tasks(tmp_path / "tasks")
    return change(
        small,
        run={"output": str(tmp_path / "runs"), "steps": 4},
        batch={"sequence_length": 64},
        validation={"every": 2, "batches": 1, "tasks": (str(tasks),), "task_limit": 4},
        checkpoint={"every": 2, "keep": 1, "keep_best": "min:validation_task/texts/bits_per_byte", "export_hf": True},
    )


def scores(recipe: Recipe) -> list[dict[str, float]]:
    return [row for row in rows(recipe) if any(name.startswith("validation_task/") for name in row)]


def on_mesh(mesh: str, recipe: Recipe) -> Recipe:
    return change(recipe, run={"name": f"on {mesh}"}, mesh={**vars(mesh_config(mesh))})


def evaluated(model: Path, recipe: Recipe, *, processes: int) -> dict[str, float]:
    """What scripts/evaluate.py finds."""
    words = [str(model), "--tasks", recipe.validation.tasks[0], "--limit", "4", "--device", "cpu"]
    words += ["--output", str(model.parent / "found.json")]
    if processes > 1:
        (code, said), *_ = run_processes(processes, evaluate, words)
        assert code == 0
    else:
        command = [sys.executable, ROOT / "scripts/evaluate.py", *words]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    results = json.loads((model.parent / "found.json").read_text())["results"]
    found = {
        f"validation_task/{task}/{key.removesuffix(',none')}": value
        for task, metrics in results.items()
        for key, value in metrics.items()
        if key.endswith(",none") and "stderr" not in key
    }
    assert all(f"|{task}" in said for task in results), "the table"
    return found


def evaluate(words: list[str]) -> tuple[int, str]:
    """What scripts/evaluate.py does in this process: its exit code, and what it prints."""
    from scripts.evaluate import main

    with redirect_stdout(StringIO()) as said:
        return main(words), said.getvalue()


def test_rows_are_those_of_the_exported_model_and_of_the_checkpoint(recipe: Recipe, alone: World) -> None:
    assert train(recipe, alone) == 0
    assert [row["step"] for row in scores(recipe)] == [2, 4]
    last = {name: scores(recipe)[-1][name] for name in ROWS}
    for model, processes in ((recipe.run.folder / "hf", 1), (recipe.run.folder, 2)):
        assert evaluated(model, recipe, processes=processes) == pytest.approx(last, rel=1e-6), model


def test_rows_after_a_restart_are_those_without_one(recipe: Recipe, alone: World) -> None:
    whole = change(recipe, run={"name": "whole"})
    for part in (change(recipe, run={"steps": 2}), recipe, whole):
        assert train(part, alone) == 0
    assert scores(recipe) == scores(whole)


def test_rows_with_tensor_and_context_parallelism_are_those_of_one_process(recipe: Recipe, alone: World) -> None:
    assert train(recipe, alone) == 0
    expected = scores(recipe)
    assert len(expected) == 2 and {*expected[0]} == {"step", "tokens", *ROWS}
    # Each process loads the harness, which takes seconds.
    meshes = [on_mesh(mesh, recipe) for mesh in ("1.1.1.2", "1.1.2.1")]
    assert run_processes(2, run_all, meshes) == [[0, 0]] * 2
    for mesh in meshes:
        assert scores(mesh) == [pytest.approx(row, rel=1e-5) for row in expected]


def refused(recipe: Recipe) -> str:
    world = start("cpu", seed=0)
    with pytest.raises(UserError) as caught:
        train(recipe, world)
    stop()
    return str(caught.value)


def test_task_without_its_data_is_refused_on_all_processes_and_leaves_nothing(recipe: Recipe) -> None:
    os.remove(Path(recipe.validation.tasks[0]) / "questions.jsonl")
    first, second = run_processes(2, refused, recipe)
    assert "cannot be loaded: FileNotFoundError" in first and second == "rank 0 failed and reports it"
    assert not (recipe.run.folder / "recipe.toml").exists()


def test_run_without_the_harness_is_refused_with_what_to_install(
    recipe: Recipe, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.evaluation.tasks.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "lm-eval>=0\.4\.13"'):
        train(recipe, alone)
