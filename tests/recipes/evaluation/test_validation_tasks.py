"""Tasks at the validations of a run: their rows, on any mesh, after a restart, and of the exported model."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from parallel.dist import World, start, stop
from parallel.errors import UserError
from recipes.recipe.schema import Recipe
from tests.meshes import mesh_config
from tests.processes import run_processes
from tests.tasks import write_tasks
from tests.training import change, rows, run_all, train

pytestmark = pytest.mark.slow

pytest.importorskip("lm_eval", reason="the lm-evaluation-harness is not installed: pip install -e '.[evaluation]'")

ROOT = Path(__file__).parents[3]
ROWS = {f"validation_task/{name}" for name in ("choices/acc", "texts/bits_per_byte", "answers/exact_match")}


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For this process and for those that it starts."""
    home = tmp_path_factory.mktemp("hf")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("HF_DATASETS_OFFLINE", "1"), ("HF_HUB_OFFLINE", "1"), ("HF_HOME", str(home))):
            patch.setenv(name, value)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", home / "datasets")
        yield


@pytest.fixture(scope="module")
def recipe(small: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("runs")
    tasks = write_tasks(folder / "tasks")
    return change(
        small,
        run={"output": str(folder), "name": "whole", "steps": 4},
        batch={"sequence_length": 64},
        validation={"every": 2, "batches": 1, "tasks": (str(tasks),), "task_limit": 4},
        checkpoint={"every": 2, "keep": 1, "keep_best": "min:validation_task/texts/bits_per_byte", "export_hf": True},
    )


@pytest.fixture(scope="module")
def whole(recipe: Recipe) -> list[dict[str, float]]:
    """The rows of a run of one process."""
    assert run_all([recipe]) == [0]
    return scores(recipe)


def scores(recipe: Recipe) -> list[dict[str, float]]:
    found = [row for row in rows(recipe) if any(name.startswith("validation_task/") for name in row)]
    return [{name: value for name, value in row.items() if name != "time"} for row in found]


def on_mesh(mesh: str, recipe: Recipe) -> Recipe:
    return change(recipe, run={"name": f"on {mesh}"}, mesh={**vars(mesh_config(mesh))})


def evaluated(model: Path, recipe: Recipe, *, here: bool) -> dict[str, float]:
    """What scripts/evaluate.py finds, in this process or in one of its own."""
    words = [str(model), "--tasks", recipe.validation.tasks[0], "--limit", "4", "--device", "cpu"]
    words += ["--output", str(model.parent / "found.json")]
    if here:
        said = evaluate(words)
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


def evaluate(words: list[str]) -> str:
    """What scripts/evaluate.py prints in this process."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    from scripts.evaluate import main

    signal.signal(signal.SIGINT, on_interrupt)  # which the file sets when it is imported
    with redirect_stdout(StringIO()) as said:
        assert main(words) == 0
    return said.getvalue()


def test_rows_are_those_of_the_exported_model_and_of_the_checkpoint(
    recipe: Recipe, whole: list[dict[str, float]]
) -> None:
    assert [row["step"] for row in whole] == [2, 4]
    last = {name: whole[-1][name] for name in ROWS}
    for model, here in ((recipe.run.folder / "hf", False), (recipe.run.folder, True)):
        assert evaluated(model, recipe, here=here) == pytest.approx(last, rel=1e-6), model


def test_rows_after_a_restart_are_those_without_one(recipe: Recipe, whole: list[dict[str, float]]) -> None:
    again = change(recipe, run={"name": "again"})
    assert run_all([change(again, run={"steps": 2}), again]) == [0, 0]
    assert scores(again) == whole


def on_two_processes(recipes: list[Recipe], without_data: Recipe) -> str:
    """Run recipes; the message with which the last one is refused. Loading the harness takes a process seconds."""
    world = start("cpu", seed=0)
    assert [train(recipe, world) for recipe in recipes] == [0] * len(recipes)
    with pytest.raises(UserError) as caught:
        train(without_data, world)
    stop()
    return str(caught.value)


@pytest.fixture(scope="module")
def on_two(recipe: Recipe) -> tuple[list[Recipe], Recipe, list[str]]:
    """Runs on a mesh of two processes each, one without the data of its task, and what that says on each of them."""
    meshes = [on_mesh(mesh, recipe) for mesh in ("1.1.1.2", "1.1.2.1", "2.1.1.1.1")]
    tasks = write_tasks(Path(recipe.run.output) / "without")
    (tasks / "questions.jsonl").unlink()
    without_data = change(recipe, run={"name": "without data"}, validation={"tasks": (str(tasks),)})
    return meshes, without_data, run_processes(2, on_two_processes, meshes, without_data)


def test_rows_with_tensor_context_and_pipeline_parallelism_are_those_of_one_process(
    whole: list[dict[str, float]], on_two: tuple[list[Recipe], Recipe, list[str]]
) -> None:
    assert len(whole) == 2 and {*whole[0]} == {"step", "tokens", *ROWS}
    for mesh in on_two[0]:
        assert scores(mesh) == [pytest.approx(row, rel=1e-5) for row in whole]


def test_task_without_its_data_is_refused_on_all_processes_and_leaves_nothing(
    on_two: tuple[list[Recipe], Recipe, list[str]],
) -> None:
    _, recipe, (first, second) = on_two
    assert "cannot be loaded: FileNotFoundError" in first and second == "rank 0 failed and reports it"
    assert not (recipe.run.folder / "recipe.toml").exists()


def test_run_without_the_harness_is_refused_with_what_to_install(
    recipe: Recipe, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.evaluation.tasks.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "lm-eval>=0\.4\.13"'):
        train(change(recipe, run={"name": "without the harness"}), alone)
