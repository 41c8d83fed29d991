"""float8.jsonl, written by whole runs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from parallel.config import Float8Config
from parallel.dist import start, stop
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from tests.processes import run_processes
from tests.training import change, run_all, train

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[3] / "configs/sweeps/cpu/tiny.toml"
ROWS = 14 * 6  # per sampled step: the linears of two blocks, with six casts each
Rows = list[dict[str, Any]]


class Runs(NamedTuple):
    """What was in the run folders after each run."""

    metrics: Rows
    shares: Rows
    plain_metrics: Rows
    plain_wrote_shares: bool
    resumed_shares: Rows
    resumed_without_sampling: Rows
    shares_of_two_processes: Rows


def rows(recipe: Recipe, file: str) -> Rows:
    return [json.loads(line) for line in (recipe.run.folder / file).read_text().splitlines()]


def all_on_one_process(sampled: Recipe, plain: Recipe) -> list[Any]:
    """Train both, then resume the first from step 2 with sampling, and then without."""
    world = start("cpu", seed=0)
    assert train(sampled, world) == 0
    assert train(plain, world) == 0
    shares = "float8.jsonl"
    found: list[Any] = [rows(sampled, "metrics.jsonl"), rows(sampled, shares), rows(plain, "metrics.jsonl")]
    found.append((plain.run.folder / shares).exists())
    for resumed in (sampled, replace(sampled, float8=plain.float8)):
        shutil.rmtree(sampled.run.folder / "checkpoints/step-00000004")
        assert train(resumed, world) == 0
        found.append(rows(sampled, shares))
    stop()
    return found


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Four steps, two of them sampled, and a checkpoint after each sampled step."""
    folder = tmp_path_factory.mktemp("float8")
    recipe = load(TINY)
    sampled = replace(
        recipe,
        run=replace(recipe.run, name="sampled", steps=4, output=str(folder / "runs")),
        data=replace(recipe.data, source=str(corpus), cache=str(folder / "cache")),
        batch=replace(recipe.batch, sequence_length=32, global_batch_size=4, micro_batch_size=2),
        float8=Float8Config("rowwise", emulate=True, sample_every=2),
        checkpoint=replace(recipe.checkpoint, every=2),
        metrics=replace(recipe.metrics, every=1),
    )
    plain = change(sampled, run={"name": "plain"}, float8={"sample_every": 0})
    found = all_on_one_process(sampled, plain)
    two = change(sampled, run={"name": "two"})
    assert run_processes(2, run_all, [two]) == [[0], [0]]
    return Runs(*found, rows(two, "float8.jsonl"))


def test_sampling_does_not_change_losses_and_gradient_norms(runs: Runs) -> None:
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in runs.metrics] == [row[name] for row in runs.plain_metrics]


def test_each_sampled_step_writes_a_row_for_every_cast(runs: Runs) -> None:
    assert [row["step"] for row in runs.shares] == [2] * ROWS + [4] * ROWS
    assert all(row.keys() == {"step", "linear", "tensor", "overflow", "underflow"} for row in runs.shares)
    assert {row["linear"] for row in runs.shares[:6]} == {"blocks.0.attention.q_proj"}


def test_a_run_without_sampling_writes_no_file(runs: Runs) -> None:
    assert not runs.plain_wrote_shares


def test_a_resumed_run_replaces_the_rows_of_repeated_steps(runs: Runs) -> None:
    assert runs.resumed_shares == runs.shares


def test_resuming_without_sampling_removes_the_rows_of_repeated_steps(runs: Runs) -> None:
    assert runs.resumed_without_sampling == runs.shares[:ROWS]


def test_two_processes_find_the_shares_of_one(runs: Runs) -> None:
    one, two = runs.shares, runs.shares_of_two_processes
    for name in ("step", "linear", "tensor", "overflow"):
        assert [row[name] for row in two] == [row[name] for row in one]
    assert [row["underflow"] for row in two] == pytest.approx([row["underflow"] for row in one], abs=2e-3)
