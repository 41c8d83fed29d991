"""`train.py RECIPE --plan`: what it prints, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from recipes.load import load
from recipes.plan import command
from recipes.plan.hardware import gpu_named
from recipes.plan.memory import predict
from recipes.plan.time import step_time

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs"
RECIPES = sorted([*CONFIGS.glob("*.toml"), *(CONFIGS / "benchmarks").glob("*.toml")])
DEBUG = str(CONFIGS / "smollm3_debug.toml")
NODE = str(CONFIGS / "smollm3_3b_8xh100.toml")
LARGE = str(CONFIGS / "llama3_405b_128x8h100.toml")


@pytest.fixture(autouse=True)
def _no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every machine."""
    monkeypatch.setattr("recipes.plan.world._devices", lambda: iter(()))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command.answer([*arguments, "--plan"]) == 0
    return capsys.readouterr().out


def numbers(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed(capsys, *arguments, "--json"))
    return found


def refused(*arguments: str) -> str:
    with pytest.raises(UserError) as error:
        command.answer([*arguments, "--plan"])
    return str(error.value)


def test_plan_is_one_screen_on_standard_output_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    found = subprocess.run(
        [sys.executable, ROOT / "train.py", NODE, "--plan", "--price", "2.5"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stderr) == (0, "")
    lines = found.stdout.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["torch"]  # nothing was written


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_has_a_plan_that_fits_the_screen(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, str(file), "--price", "2.5").splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100


def test_numbers_are_those_of_memory_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load(NODE)
    degrees = recipe.mesh.fit(8)
    found = numbers(capsys, NODE, "--tokens", "2M", "--price", "3")
    assert found["peak_memory_gib"] * 2**30 == predict(recipe, degrees).peak
    time = step_time(recipe, degrees, gpu=gpu_named("H100"))
    assert found["step_seconds"] == time.step_seconds
    assert found["tokens_per_second_per_device"] == time.tokens_per_second
    assert found["tokens_per_second"] == 8 * time.tokens_per_second
    assert found["mfu"] == time.tokens_per_second * recipe.model.flops_per_token(8192, "causal") / 989.4e12
    assert found["mfu_full"] == time.tokens_per_second * recipe.model.flops_per_token(8192, "full") / 989.4e12
    assert sum(found["seconds"].values()) == pytest.approx(found["step_seconds"])
    least, most = found["step_seconds_range"]
    assert least < found["step_seconds"] < most
    cost = found["cost"]
    assert cost["days"] * 86_400 == pytest.approx(2e6 / found["tokens_per_second"])
    assert cost["money"] == pytest.approx(3 * cost["gpu_hours"]) == pytest.approx(3 * 8 * 24 * cost["days"])


def test_cost_is_that_of_the_steps_of_the_recipe_unless_tokens_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = numbers(capsys, NODE)
    assert found["cost"]["tokens"] == 10_000 * 128 * 8192
    assert found["cost"]["money"] is None
