"""The comparison of float8 rows with the reference, and the pass rule, on made-up numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.lab.sweep.grid import Sweep, read_sweep
from recipes.lab.sweep.numerics import (
    HOW_TO_READ,
    LARGEST_LOSS_GAP,
    LARGEST_NOISE,
    NORM_RATIO,
    compare,
    numerics_table,
)
from recipes.lab.sweep.results import LEAST_STEPS, Result, result_of
from recipes.lab.sweep.runner import Ended
from recipes.recipe.load import CONFIGS

TEXT = f"""
base = "{CONFIGS}/smollm3_debug.toml"
skip_steps = 16
[fixed]
metrics.every = 16
run.steps = 128
schedule.warmup_steps = 1
schedule.decay_steps = 1
[[runs]]
name = "bf16"
[[runs]]
name = "fp8"
float8.recipe = "tensorwise"
[[runs]]
name = "again"
fsdp.reduce_dtype = "bfloat16"
[[runs]]
name = "other"
float8.recipe = "rowwise"
optimizer.lr = 1.0
"""
STEPS = (1, 16, 32, 48, 64, 80, 96, 112, 128)  # the last quarter of nine: two


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    (tmp_path / "mine.toml").write_text(TEXT)
    return read_sweep(tmp_path / "mine.toml", output=tmp_path, processes=1)


def result(label: str, *, losses: Any = (4.0,) * 9, norms: Any = (1.0,) * 9, skipped: Any = ()) -> Result:
    return {
        "label": label,
        "outcome": "done",
        "curve": [[step, 100 * step, loss] for step, loss in zip(STEPS, losses, strict=True)],
        "grad_norms": [list(point) for point in zip(STEPS, norms, strict=True)],
        "skipped_steps": list(skipped),
        "processes": 1,
        "environment": {"device": "cpu"},
    }


def verdict(sweep: Sweep, **numbers: Any) -> str:
    [row] = compare(sweep, {"bf16": result("bf16"), "fp8": result("fp8", **numbers)})
    return row.verdict


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, "pass"),
        ({"losses": (9.0,) * 7 + (4.0, 4.039)}, "pass"),  # only the last quarter counts, and its mean is within 0.02
        ({"losses": (4.0,) * 7 + (4.0, 4.041)}, "FAIL: loss"),
        ({"losses": (4.0,) * 7 + (4.0, 3.959)}, "FAIL: loss"),  # a much lower loss is not the same training either
        ({"losses": (4.0,) * 3 + (None,) + (4.0,) * 5}, "FAIL: not finite"),
        ({"losses": (None,) * 9}, "FAIL: not finite, loss"),
        ({"norms": (1.09,) * 5 + (9.0,) * 4}, "pass"),
        ({"norms": (1.11,) * 5 + (0.9,) * 4}, "FAIL: gradient norm"),
        ({"norms": (0.89,) * 5 + (1.0,) * 4}, "FAIL: gradient norm"),
        ({"norms": (1.0,) * 8 + (None,)}, "FAIL: not finite"),
        ({"losses": (5.0,) * 9, "norms": (2.0,) * 9}, "FAIL: loss, gradient norm"),
        ({"skipped": [7]}, "FAIL: skipped step 7"),
        (
            {"skipped": [1, 2, 3, 4, 5, 6, 7], "losses": (5.0,) * 9},
            "FAIL: skipped steps 1, 2, 3, 4, 5 and 2 more, loss",
        ),
    ],
)
def test_a_row_passes_or_fails_by_the_rule(sweep: Sweep, numbers: dict[str, Any], expected: str) -> None:
    assert verdict(sweep, **numbers) == expected


def test_a_comparison_has_gap_and_norm_ratio(sweep: Sweep) -> None:
    noisy = result("fp8", losses=(4.0, 3.5, *(4.01,) * 7), norms=(2.0, *(1.05,) * 8))
    results = {"bf16": result("bf16"), "fp8": noisy, "again": result("again"), "other": result("other")}
    fp8, again = compare(sweep, results)  # "other" has another learning rate
    assert (fp8.label, again.label) == ("fp8", "again")
    assert fp8.loss_gap == pytest.approx(0.0025)
    assert fp8.largest_loss_gap == (16, -0.5)
    assert fp8.norm_ratio == 1.05
    assert (again.limit, again.verdict) == (None, "yardstick")
    page = numerics_table(sweep, results)
    cells = "+0.250 | 0.500 | -0.5000 at step 16 | 1.050 | pass |"
    assert f"| fp8 | {cells}\n| again | +0.000 | none | " in page and HOW_TO_READ in page


def test_the_page_that_says_when_a_row_passes_has_the_numbers_of_the_rule() -> None:
    page = " ".join((CONFIGS.parent / "docs/benchmarks/README.md").read_text(encoding="utf-8").split())
    low, high = NORM_RATIO
    assert f"the **limit**: {LARGEST_LOSS_GAP:.1%} (" in page and f"is between {low} and {high}." in page
    assert f"more than {LARGEST_NOISE:.0%} away" in page
    assert f"Fewer than {LEAST_STEPS} steps are judged by the first alone" in page


def verdicts(sweep: Sweep, again: Result, fp8: float) -> list[tuple[float | None, str]]:
    """(limit, verdict) of a float8 row whose losses are `fp8` above the reference's, and of the bf16 row `again`."""
    rows = {"bf16": result("bf16"), "fp8": result("fp8", losses=(4 + fp8,) * 9), "again": again}
    return [(row.limit, row.verdict) for row in compare(sweep, rows)]


def test_a_bf16_row_that_rounds_elsewhere_sets_the_limit(sweep: Sweep) -> None:
    """The reference's losses are 4, so a gap of 0.04 is 1%."""
    far = result("again", losses=(3.96,) * 9)
    assert verdicts(sweep, far, 0.039) == [(pytest.approx(0.01), "pass"), (None, "yardstick")]
    assert verdicts(sweep, far, 0.041) == [(pytest.approx(0.01), "FAIL: loss"), (None, "yardstick")]
    near = result("again", losses=(4.001,) * 9)
    assert verdicts(sweep, near, 0.019) == [(0.005, "pass"), (None, "yardstick")]
    assert verdicts(sweep, near, 0.021) == [(0.005, "FAIL: loss"), (None, "yardstick")]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"losses": (4.21,) * 9}, "loss"),
        ({"losses": (3.96,) * 8 + (None,)}, "not finite"),
        ({"losses": (3.96,) * 9, "norms": (1.2,) * 9}, "gradient norm"),
        ({"losses": (3.96,) * 9, "skipped": [5]}, "skipped step 5"),
    ],
)
def test_a_bf16_row_that_breaks_the_rule_is_no_yardstick(sweep: Sweep, wrong: dict[str, Any], why: str) -> None:
    expected = [(0.005, "FAIL: loss"), (None, f"no yardstick: {why}")]
    assert verdicts(sweep, result("again", **wrong), 0.03) == expected


def test_no_row_passes_if_the_reference_skipped_steps(sweep: Sweep) -> None:
    rows = {"bf16": result("bf16", skipped=[3, 4]), "fp8": result("fp8"), "again": result("again")}
    why = "the reference skipped steps 3, 4"
    assert [row.verdict for row in compare(sweep, rows)] == [f"FAIL: {why}", f"no yardstick: {why}"]


@pytest.mark.parametrize(
    "results",
    [
        {"bf16": result("bf16"), "again": result("again")},
        {"fp8": result("fp8")},
        {"bf16": result("bf16"), "fp8": result("fp8") | {"outcome": "crashed"}},
    ],
)
def test_the_page_has_no_numerics_without_float8_or_a_reference(sweep: Sweep, results: dict[str, Result]) -> None:
    assert compare(sweep, results) == [] and numerics_table(sweep, results) == ""


def test_a_result_has_gradient_norms(sweep: Sweep) -> None:
    row = sweep.rows[1]
    folder = row.recipe.run.folder
    folder.mkdir(parents=True)
    common = {"loss": 4.0, "step_seconds": 1.0, "data_seconds": 0.0, "peak_memory_gib": 1.0}
    rows = [{"step": step, "tokens": step, "grad_norm": step / 2, **common} for step in STEPS]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "environment.json").write_text('{"device": "cpu"}')
    found = result_of(row, Ended("done", "", 1.0))
    assert found["grad_norms"] == [[step, step / 2] for step in STEPS]
