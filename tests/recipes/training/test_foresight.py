"""How far a run says that its plan was off."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from parallel.errors import UserError
from recipes.plan.hardware import GPUS
from recipes.recipe.load import CONFIGS, load
from recipes.recipe.schema import Recipe
from recipes.training.foresight import Foresight, foresight
from tests.processes import run_processes
from tests.training import change, rows, run_all

pytestmark = pytest.mark.slow


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The environment of a run on H100s whose pre-flight measured no messages."""
    path = tmp_path / "h100.json"
    path.write_text(json.dumps({"device": "NVIDIA H100", "preflight": {"links": []}}))
    return path


def run_as_on_gpus(recipe: Recipe) -> list[int]:
    """Run on a CPU, with the plan of GPUs: a CPU has none."""
    with patch("recipes.training.foresight.gpu_of", lambda device: GPUS["H100"]):
        return run_all([recipe])


def test_calibrated_run_says_how_far_its_plan_was_off(small: Recipe, file: Path) -> None:
    run = {"name": "foreseen", "steps": 6}
    recipe = change(small, run=run, metrics={"calibrated_by": str(file)}, checkpoint={"every": 0})
    assert run_processes(2, run_as_on_gpus, recipe) == [[0], [0]]
    *steps, last = rows(recipe)
    plan = last["plan"]
    assert plan["ratio"] == pytest.approx(plan["measured_seconds"] / plan["predicted_seconds"])
    assert plan["calibrated"] == "by h100.json: its network's speed"
    seconds = sorted(row["step_seconds"] for row in steps[1:])  # the first one compiles
    assert plan["measured_seconds"] == seconds[len(seconds) // 2]
    assert (
        Foresight(1.0, last["plan"]["calibrated"])
        .line(last)
        .endswith("times as long; by h100.json: its network's speed)")
    )
    links = json.loads((recipe.run.folder / "environment.json").read_text())["preflight"]["links"]
    assert [link["axis"] for link in links] == ["shard"]


def recipe_with(file: str = "") -> Recipe:
    return load(CONFIGS / "smollm3_3b_8xh100.toml", ["--metrics.calibrated_by", file] if file else [])


def test_known_gpu_has_a_plan_and_an_unknown_one_or_a_cpu_none() -> None:
    recipe = recipe_with()
    degrees = recipe.mesh.fit(8)
    found = foresight(recipe, degrees, device="NVIDIA H100 80GB HBM3", nodes=1)
    assert found is not None and 0.1 < found.predicted < 10 and found.by == ""
    for device in ("Voodoo", "cpu"):
        assert foresight(recipe, degrees, device=device, nodes=1) is None


def test_record_of_another_device_is_refused(file: Path) -> None:
    recipe = recipe_with(str(file))
    for device in ("NVIDIA H200", "Voodoo"):
        with pytest.raises(UserError, match="measured on"):
            foresight(recipe, recipe.mesh.fit(2), device=device, nodes=1)


def test_too_few_steps_are_compared_with_nothing() -> None:
    assert Foresight(1.0, "", [9.0, 1.0, 1.0]).row() == {}
    assert Foresight(2.0, "", [9.0, 1.0, 1.0, 1.0]).row()["plan"]["ratio"] == 0.5
