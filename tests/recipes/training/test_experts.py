"""Runs with experts through faults: NaN in one of them, a killed process, another number of processes."""

import json
import math
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.files.exit_codes import CORRUPTED, FINISHED
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from tests.commands import run_command
from tests.processes import run_processes
from tests.scripts.nodes import ROOT, arguments, environment, losses
from tests.training import change, run_all, training

pytestmark = pytest.mark.slow

STEPS = 8
MODEL = {"experts": 4, "experts_per_token": 2, "expert_width": 32, "router_bias": True}


@pytest.fixture(scope="module")
def recipe(small: Recipe) -> Recipe:
    """Eight steps of biases that move, saved after every second."""
    options = {"experts": {"balance": "bias", "bias_rate": 0.01}, "mesh": {"expert": 2}}
    return change(small, run={"steps": STEPS, "max_skipped_steps": 2}, model=MODEL, **options)


def train_with_nan(recipe: Recipe) -> tuple[int, str, list[bool], bool]:
    """Exit code, last line, which steps were skipped and whether biases moved in these. Rank 1 has NaN from step 4."""
    from parallel.dist import start, stop

    world = start("cpu", seed=0)
    skipped: list[bool] = []
    lines: list[str] = []
    moved = False
    with training(recipe, world) as trainer:
        model, take_step, log = trainer.built.model, trainer.take_step, trainer.console.log

        def biases() -> list[torch.Tensor]:
            return [bias.clone() for name, bias in model.named_buffers() if name.endswith(".bias")]

        def step() -> Any:
            nonlocal moved
            if trainer.step == 3 and world.rank == 1:
                matrices = dict(model.named_parameters())["blocks.1.feed_forward.experts.down_proj"]
                matrices.to_local().detach()[:, 0, 0] = math.nan
            before = biases()
            found = take_step()
            skipped.append(not math.isfinite(found.norm.item()))
            different = not all(torch.equal(*pair) for pair in zip(before, biases(), strict=True))
            moved |= skipped[-1] and different
            assert skipped[-1] or different
            return found

        trainer.take_step = step
        trainer.console.log = lambda text="", **style: (lines.append(text), log(text))[1]
        code = trainer.run()
    stop()
    return code, lines[-1], skipped, moved


def test_nan_in_an_expert_of_one_rank_skips_steps_on_all_and_is_named(recipe: Recipe) -> None:
    for code, line, skipped, moved in run_processes(2, train_with_nan, change(recipe, run={"name": "nan"})):
        assert code == CORRUPTED
        assert skipped == [False, False, False, True]
        assert not moved
        name = "model.blocks.1.feed_forward.experts.down_proj"
        assert f"{name} has NaN or infinite values on rank 1 on {platform.node()}" in line


def test_a_killed_run_with_experts_restarts_and_ends_with_the_same_bytes(tmp_path: Path, corpus: Path) -> None:
    fields = [(f"--model.{key}", str(value)) for key, value in MODEL.items()]
    fields += [("--experts.balance", "bias"), ("--mesh.expert", "2"), ("--run.steps", "12")]
    config, *overrides = arguments(tmp_path, corpus, "run", *(word for field in fields for word in field))
    words = [str(ROOT / config), *overrides, "--run.name"]
    assert run_processes(2, run_all, [load(words[0], [*words[1:], "well"])]) == [[FINISHED]] * 2
    launcher = [sys.executable, ROOT / "scripts/launch.py", "--standalone", "--nproc-per-node=2"]
    ill = [ROOT / "tests/ill_train.py", "killed_once", "1", "6", ROOT / "train.py", *words, "killed"]
    code, _, err = run_command("scripts/supervise.py", *launcher, *ill, cwd=tmp_path, env=environment(RESTARTS="2"))
    assert code == FINISHED, err
    assert "attempt 1 crashed" in err
    assert dict(losses(tmp_path, "killed")) == dict(losses(tmp_path, "well"))
    ends = [
        json.loads((tmp_path / "runs" / name / "checkpoints/step-00000012/manifest.json").read_text())["files"]
        for name in ("well", "killed")
    ]
    assert ends[0] == ends[1]
