"""Seeds as an axis, runs too short to judge and emulated float8, on made-up numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.lab.sweep.grid import Sweep, read_sweep
from recipes.lab.sweep.numerics import compare, numerics_table
from recipes.lab.sweep.results import Result, by_seed, loss_gaps, table
from recipes.recipe.load import CONFIGS

STEPS = (1, 64, 128)


def read(folder: Path, axes: str, *, steps: int = 128) -> Sweep:
    text = f"""
base = "{CONFIGS}/smollm3_debug.toml"
skip_steps = 2
[fixed]
metrics.every = 2
run.steps = {steps}
run.device = "cpu"
schedule.warmup_steps = 1
schedule.decay_steps = 1
float8.emulate = true
[axes]
{axes}
"""
    (folder / "mine.toml").write_text(text)
    return read_sweep(folder / "mine.toml", output=folder, processes=1)


def results(sweep: Sweep, losses: list[float]) -> dict[str, Result]:
    """Losses of the rows, the same at every step."""
    environment = {"device": "cpu", "packages": {"torch": "2", "torchao": "0"}, "git_commit": "0123"}
    common: dict[str, Any] = {
        **{"outcome": "done", "processes": 1, "skipped_steps": [], "mfu": None, "mfu_full": None},
        **{"tokens_per_second_per_device": 1.0, "tflops_per_device": None, "peak_memory_gib": 1.0, "step_seconds": 1.0},
        **{"step_seconds_least": 1.0, "step_seconds_most": 1.0, "grad_norms": [[step, 1.0] for step in STEPS]},
        "environment": environment | {"git_uncommitted_changes": False},
    }
    return {
        row.label: {
            **common,
            "label": row.label,
            "final_loss": loss,
            "curve": [[step, 1000 * step, loss] for step in STEPS],
        }
        for row, loss in zip(sweep.rows, losses, strict=True)
    }


@pytest.fixture
def seeds(tmp_path: Path) -> tuple[Sweep, dict[str, Result]]:
    """bf16 and float8 with three seeds each."""
    sweep = read(tmp_path, 'float8.recipe = ["none", "tensorwise"]\nrun.seed = [0, 1, 2]')
    return sweep, results(sweep, [4.0, 4.2, 3.9, 4.01, 4.22, 3.91])


def test_rows_are_compared_with_the_reference_of_their_seed(seeds: tuple[Sweep, dict[str, Result]]) -> None:
    gaps = loss_gaps(*seeds)
    assert [gap[-1][1] for gap in gaps.values()] == pytest.approx([0, 0, 0, 0.01, 0.02, 0.01])
    assert [(row.label, row.verdict) for row in compare(*seeds)] == [
        (f"recipe=tensorwise,seed={seed} (emulated)", "pass") for seed in range(3)
    ]
    assert "| against recipe=none, 3 seeds |" in numerics_table(*seeds)


def test_the_spread_over_seeds_is_in_the_table(seeds: tuple[Sweep, dict[str, Result]]) -> None:
    names = {name: len(rows) for name, rows in by_seed(*seeds).items()}
    assert names == {"recipe=none, 3 seeds": 3, "recipe=tensorwise, 3 seeds (emulated)": 3}
    page = table(*seeds)
    assert "| recipe=none, 3 seeds | 4.0333 | 0.3000 |" in page
    assert "| recipe=tensorwise, 3 seeds (emulated) | 4.0467 | 0.3100 |" in page
    assert "to the reference of the same seed" in page and "to row recipe=none, 3 seeds." in page


def test_a_repeated_row_is_no_spread(tmp_path: Path) -> None:
    sweep = read(tmp_path, "run.seed = [0, 1]")
    sweep = replace(sweep, rows=(replace(sweep.rows[0], label="again"), *sweep.rows))
    found = by_seed(sweep, results(sweep, [4.0, 4.0, 4.1]))
    assert {title: len(rows) for title, rows in found.items()} == {"again": 1, "base, 2 seeds": 2}


def test_float8_that_is_emulated_is_called_so_everywhere(tmp_path: Path) -> None:
    sweep = read(tmp_path, 'float8.recipe = ["none", "rowwise"]')
    found = results(sweep, [4.0, 4.0])
    page = table(sweep, found) + numerics_table(sweep, found)
    assert page.startswith("# mine, float8 emulated\n") and page.count("\n| recipe=rowwise (emulated) |") == 2
    assert "\n| recipe=none |" in page and "**Float8 is emulated: its speed and memory say nothing" in page


def test_float8_of_a_gpu_is_not_called_emulated(tmp_path: Path) -> None:
    sweep = read(tmp_path, 'float8.recipe = ["none"]')  # no effect without a recipe
    assert "emulated" not in table(sweep, results(sweep, [4.0]))


@pytest.mark.parametrize(
    ("loss", "skipped", "verdict"),
    [(4.0, [], "too short to judge"), (9.0, [], "too short to judge"), (4.0, [7], "FAIL: skipped step 7")],
)
def test_few_steps_are_too_short_to_judge_losses_but_not_skipped_steps(
    tmp_path: Path, loss: float, skipped: list[int], verdict: str
) -> None:
    sweep = read(tmp_path, 'float8.recipe = ["none", "rowwise"]', steps=99)
    found = results(sweep, [4.0, loss])
    found["recipe=rowwise"]["skipped_steps"] = skipped
    assert [row.verdict for row in compare(sweep, found)] == [verdict]
