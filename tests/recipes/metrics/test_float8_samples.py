"""float8.jsonl of whole runs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel.config import Float8Config
from recipes.load import load
from recipes.schema import Recipe
from tests.processes import run_processes
from tests.training import run_all

TINY = Path(__file__).parents[3] / "configs/sweeps/cpu/tiny.toml"


def rows(recipe: Recipe, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (recipe.run.folder / file).read_text().splitlines()]


@pytest.fixture(scope="module")
def sampled(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Four steps, two of them sampled, and a checkpoint after each of those."""
    folder = tmp_path_factory.mktemp("numerics")
    recipe = load(TINY)
    return replace(
        recipe,
        run=replace(recipe.run, name="sampled", steps=4, output=str(folder / "runs")),
        data=replace(recipe.data, source=str(corpus), cache=str(folder / "cache")),
        batch=replace(recipe.batch, micro_batch_size=2),
        float8=Float8Config("rowwise", emulate=True, sample_every=2),
        checkpoint=replace(recipe.checkpoint, every=2),
        metrics=replace(recipe.metrics, every=1),
    )


def test_sampled_steps_are_written_and_change_nothing(sampled: Recipe) -> None:
    plain = replace(
        sampled,
        run=replace(sampled.run, name="plain"),
        float8=replace(sampled.float8, sample_every=0),
    )
    assert run_processes(1, run_all, [sampled, plain]) == [[0, 0]]
    assert not (plain.run.folder / "float8.jsonl").exists()
    numbers = [
        [(row["loss"], row["grad_norm"]) for row in rows(recipe, "metrics.jsonl")] for recipe in (sampled, plain)
    ]
    assert numbers[0] == numbers[1]
    found = rows(sampled, "float8.jsonl")
    assert [row["step"] for row in found] == [2] * 14 * 6 + [4] * 14 * 6
    assert all(row.keys() == {"step", "linear", "tensor", "overflow", "underflow"} for row in found)
    assert {row["linear"] for row in found[:6]} == {"blocks.0.attention.q_proj"}

    # Two processes, and a run that goes on from step 2: the rows of step 4 are written anew, not once more.
    two = replace(sampled, run=replace(sampled.run, name="two"))
    assert run_processes(2, run_all, [two]) == [[0], [0]]
    shutil.rmtree(sampled.run.folder / "checkpoints/step-00000004")
    assert run_processes(1, run_all, [sampled]) == [[0]]
    assert rows(sampled, "float8.jsonl") == found
    # Nor do they stay where the run goes on without sampling.
    shutil.rmtree(sampled.run.folder / "checkpoints/step-00000004")
    assert run_processes(1, run_all, [replace(sampled, float8=plain.float8)]) == [[0]]
    assert rows(sampled, "float8.jsonl") == found[: 14 * 6]
    elsewhere = rows(two, "float8.jsonl")
    for name in ("step", "linear", "tensor", "overflow"):
        assert [row[name] for row in elsewhere] == [row[name] for row in found]
    assert [row["underflow"] for row in elsewhere] == pytest.approx([row["underflow"] for row in found], abs=2e-3)
