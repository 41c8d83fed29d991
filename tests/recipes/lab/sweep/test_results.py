"""Numbers, table and page of curves made from run folders with known contents."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from models.sizes import SIZES
from parallel.errors import UserError
from recipes.files.layout import REPORT
from recipes.lab.sweep.grid import Sweep, read_sweep
from recipes.lab.sweep.loop import write_sweep_page
from recipes.lab.sweep.results import append, current_results, loss_gaps, mean_gap, read_results, result_of, table
from recipes.lab.sweep.runner import Ended
from recipes.recipe.load import CONFIGS

DEVICE = "NVIDIA H100 80GB HBM3"
TEXT = f"""
base = "{CONFIGS}/smollm3_debug.toml"
skip_steps = 4
[fixed]
metrics.every = 4
run.steps = 18
schedule.warmup_steps = 1
schedule.decay_steps = 1
[[runs]]
name = "bf16"
[[runs]]
name = "fp8"
float8.recipe = "tensorwise"
[[runs]]
name = "longer"
batch.sequence_length = 512
[[runs]]
name = "too large"
batch.micro_batch_size = 8
[[runs]]
name = "not yet"
optimizer.lr = 1.0
"""
SECONDS = {1: 30.0, 4: 3.0, 8: 0.5, 12: 0.4, 16: 0.6, 18: 0.7}  # per step, by the last step of its window


def logged(
    folder: Path, *, tokens_per_step: int, offset: float, nan_at: int | None = None, **more: float | None
) -> None:
    """Write what a run leaves behind, with losses 5 - step / 10 + offset."""
    folder.mkdir(parents=True)
    rows = [
        {
            "step": step,
            "tokens": step * tokens_per_step,
            "loss": None if step == nan_at else 5 - step / 10 + offset,
            "step_seconds": seconds,
            "data_seconds": 0.01,
            "peak_memory_gib": 1 + step / 100,
            **more,
        }
        for step, seconds in SECONDS.items()
    ]
    lines = [
        *map(json.dumps, rows),
        json.dumps({"step": 18, "validation_loss": 9.0}),
        "5",
        '"a loss"',
        '{"step": Infinity, "loss": 1.0}',
        '{"step": 19, "lo',
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    environment = {
        "device": DEVICE,
        "packages": {"torch": "2.13.0", "torchao": "0.18.0"},
        "git_commit": "0123456789abcdef",
        "git_uncommitted_changes": False,
    }
    (folder / "environment.json").write_text(json.dumps(environment))


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Three finished rows, one that failed and one that has not run."""
    (tmp_path / "mine.toml").write_text(TEXT)
    sweep = read_sweep(tmp_path / "mine.toml", output=tmp_path, processes=2)
    for row, offset in zip(sweep.rows, (0.0, 0.02, -1.0), strict=False):
        tokens = row.recipe.batch.global_batch_size * row.recipe.batch.sequence_length
        logged(row.recipe.run.folder, tokens_per_step=tokens, offset=offset)
        append(sweep.folder, result_of(row, Ended("done", "", 40.0)))
    failed = Ended("out of memory", "OutOfMemoryError: tried", 5.0)
    append(sweep.folder, result_of(sweep.rows[3], failed))
    return sweep


def test_a_finished_row_is_measured_over_its_windows(sweep: Sweep) -> None:
    result = current_results(sweep)["bf16"]
    assert result["windows"] == [
        [4, 8, 0.5],
        [8, 12, 0.4],
        [12, 16, 0.6],
        [16, 18, 0.7],
    ]  # not 30.0 and 3.0, the warm-up
    assert (result["step_seconds"], result["step_seconds_least"], result["step_seconds_most"]) == (0.55, 0.4, 0.7)
    assert result["first_step_seconds"] == 30.0
    rate = 16 * 256 / 0.55 / 2
    assert result["tokens_per_second_per_device"] == pytest.approx(rate)
    model = SIZES["smollm3_debug"]
    assert result["tflops_per_device"] == pytest.approx(rate * model.flops_per_token(256, "causal") / 1e12)
    assert result["mfu"] == pytest.approx(rate * model.flops_per_token(256, "causal") / 989.4e12)
    assert result["mfu_full"] == pytest.approx(rate * model.flops_per_token(256, "full") / 989.4e12)
    assert result["peak_memory_gib"] == pytest.approx(1.18)
    assert result["final_loss"] == pytest.approx(3.2)
    assert result["curve"][0] == [1, 4096, 4.9]
    assert len(result["curve"]) == len(SECONDS)


def test_flops_count_attention_at_the_document_length_that_the_run_logged(sweep: Sweep) -> None:
    row = sweep.rows[4]
    logged(row.recipe.run.folder, tokens_per_step=4096, offset=0.0)
    path = row.recipe.run.folder / "metrics.jsonl"
    lengths = {1: 1.0, 4: 1.0, 8: 100.0, 12: 50.0, 16: 60.0, 18: 140.0}
    rows = [json.loads(line) for line in path.read_text().splitlines()[: len(SECONDS)]]
    path.write_text("\n".join(json.dumps(row | {"attention_length": lengths[row["step"]]}) for row in rows))
    result = result_of(row, Ended("done", "", 40.0))
    mean = (4 * 100 + 4 * 50 + 4 * 60 + 2 * 140) / 14  # over the measured steps
    assert result["attention_length"] == pytest.approx(mean)
    rate, model = result["tokens_per_second_per_device"], SIZES["smollm3_debug"]
    assert result["tflops_per_device"] == pytest.approx(rate * model.flops_per_token(mean, "causal") / 1e12)
    assert result["mfu"] == pytest.approx(rate * model.flops_per_token(mean, "causal") / 989.4e12)
    assert result["mfu_full"] == pytest.approx(rate * model.flops_per_token(mean, "full") / 989.4e12)
    whole = current_results(sweep)["bf16"]
    assert whole["attention_length"] == 256 and result["tflops_per_device"] < whole["tflops_per_device"]
    assert "docs/benchmarks/README.md says how numbers are measured" in table(sweep, {})


def test_rates_of_pairs_are_those_that_the_run_logged_at_the_median_pace(sweep: Sweep) -> None:
    row = sweep.rows[4]
    data = replace(row.recipe.data, prompt_field="question", answer_field="answer")
    row = replace(row, recipe=replace(row.recipe, data=data))
    rates = {"tokens_per_second_per_device": 100.0, "tflops_per_device": None, "mfu": None, "mfu_full": 0.5}
    logged(row.recipe.run.folder, tokens_per_step=4096, offset=0.0, **rates)
    result = result_of(row, Ended("done", "", 40.0))
    mean_seconds = (4 * 0.5 + 4 * 0.4 + 4 * 0.6 + 2 * 0.7) / 14
    assert result["tokens_per_second_per_device"] == pytest.approx(100 * mean_seconds / 0.55)
    assert result["mfu_full"] == pytest.approx(0.5 * mean_seconds / 0.55)
    assert result["tflops_per_device"] is result["mfu"] is None
    assert "| unknown | unknown | 48.1 |" in table(sweep, {row.label: result})


def test_speeds_are_relative_to_the_first_measured_row(sweep: Sweep) -> None:
    results = current_results(sweep)
    assert "Speed-up: over row bf16." in table(sweep, results)
    results["bf16"] = results["bf16"] | {"outcome": "crashed", "reason": "x"}
    page = table(sweep, results)
    assert "Speed-up: over row fp8." in page
    assert [line[1] for line in cells(page).values()] == ["speed-up", "", "1.00", "2.00", "", ""]
    assert "Speed-up: over nothing yet." in table(sweep, {})


def test_a_speed_up_within_the_spread_of_its_steps_is_noise(sweep: Sweep) -> None:
    results = current_results(sweep)
    results["fp8"] = results["fp8"] | {"tokens_per_second_per_device": 1.2 * 16 * 256 / 0.55 / 2}
    assert cells(table(sweep, results))["fp8"][1] == "noise"
    results["fp8"] = results["fp8"] | {f"step_seconds_{end}": 0.55 for end in ("least", "most")}
    assert cells(table(sweep, results))["fp8"][1] == "1.20"


def test_rows_are_ranked_by_validation_loss_where_a_number_is_swept(sweep: Sweep) -> None:
    results = current_results(sweep)
    results["longer"] = results["longer"] | {"validation_loss": 2.5}
    results["fp8"] = results["fp8"] | {"validation_loss": None}
    assert "\nBy validation loss: longer (2.5000), bf16 (9.0000).\n" in table(sweep, results)
    words_alone = replace(sweep, rows=sweep.rows[:2])
    assert "By validation loss" not in table(words_alone, current_results(sweep))


def test_the_page_lists_skipped_steps(sweep: Sweep) -> None:
    row = sweep.rows[1]
    with (row.recipe.run.folder / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 7, "tokens": 7, "skipped": true, "grad_norm": null}\n{"step": 9, "skipped": true}\n')
    append(sweep.folder, result_of(row, Ended("done", "", 40.0)))
    results = current_results(sweep)
    assert [results[label]["skipped_steps"] for label in ("bf16", "fp8")] == [[], [7, 9]]
    assert "Rows that skipped optimizer steps" in table(sweep, results) and "\n- fp8: 7, 9\n" in table(sweep, results)


@pytest.mark.parametrize("line", ['{"outcome": "done"}', "[1]", "3", '{"label": "a", "fingerprint": "b"}'])
def test_a_line_that_is_not_a_result_is_refused(line: str, sweep: Sweep) -> None:
    with (sweep.folder / "results.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=r"results\.jsonl: a line is not a result of a sweep: .*; remove it, or write"):
        read_results(sweep.folder)


def test_only_rows_on_the_same_batches_have_a_loss_gap(sweep: Sweep) -> None:
    gaps = loss_gaps(sweep, current_results(sweep))
    assert list(gaps) == ["bf16", "fp8"]  # the longer one saw other sequences
    assert [step for step, _ in gaps["fp8"]] == list(SECONDS)
    assert all(gap == pytest.approx(0.02) for _, gap in gaps["fp8"])


def test_the_mean_gap_is_over_the_last_quarter() -> None:
    assert mean_gap([(1, 9.0), (2, 9.0), (3, 9.0), (4, 1.0), (5, 1.0), (6, 1.0), (7, 2.0), (8, 4.0)]) == 3.0
    assert mean_gap([]) is None


def cells(page: str) -> dict[str, list[str]]:
    """First cell -> the other cells, for every line of the table."""
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


def test_the_table_has_every_row_and_the_reasons_of_failures(sweep: Sweep) -> None:
    page = table(sweep, current_results(sweep))
    found = cells(page)
    assert list(found) == ["run", "bf16", "fp8", "longer", "too large", "not yet"]
    assert {len(line) for line in found.values()} == {10}
    assert found["bf16"][:4] == ["3,724", "1.00", "0.55", "-27.3 to +27.3"]
    assert found["longer"][:2] == ["7,447", "2.00"]
    assert [found[name][-1] for name in ("bf16", "fp8", "longer")] == ["+0.0000", "+0.0200", "not comparable"]
    assert all(math.isfinite(float(cell.replace(",", ""))) for cell in found["fp8"][4:])
    assert found["too large"] == ["out of memory", *[""] * 9]
    assert found["not yet"] == ["not run yet", *[""] * 9]
    assert "- too large: out of memory: OutOfMemoryError: tried (no step was logged)\n" in page
    assert f"device: 2 x {DEVICE}. torch: 2.13.0." in page and "commit: 0123456789ab." in page


def test_a_loss_that_is_not_finite_is_marked(sweep: Sweep) -> None:
    row = sweep.rows[1]
    row.recipe.run.folder.rename(sweep.folder / "before")
    logged(row.recipe.run.folder, tokens_per_step=4096, offset=0.0, nan_at=18)
    append(sweep.folder, result_of(row, Ended("done", "", 40.0)))
    results = current_results(sweep)
    assert cells(table(sweep, results))["fp8"][-2:] == ["not finite", "+0.0000"]


def test_the_reason_of_a_failed_run_includes_its_last_logged_step(sweep: Sweep) -> None:
    result = result_of(sweep.rows[0], Ended("timed out", "no end after 9 s", 9.0))
    assert result["reason"] == "no end after 9 s (last logged step 18 of 18)"
    assert "step_seconds" not in result


def test_a_finished_run_whose_log_lost_steps_on_a_full_disk_is_a_failed_row(sweep: Sweep) -> None:
    row = sweep.rows[0]
    file = row.recipe.run.folder / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    found = result_of(row, Ended("done", "", 1.0))
    assert found["outcome"] == "crashed" and found["reason"].startswith("the run ended well, but its log lacks steps")


def test_the_newest_result_of_the_current_recipe_is_used(sweep: Sweep) -> None:
    row = sweep.rows[3]
    with (sweep.folder / "results.jsonl").open("a") as file:
        file.write('{"label": "cut o')
    logged(row.recipe.run.folder, tokens_per_step=4096, offset=0.0)
    append(sweep.folder, result_of(row, Ended("done", "", 1.0)))
    assert current_results(sweep)["too large"]["outcome"] == "done"
    changed = replace(row, recipe=replace(row.recipe, batch=replace(row.recipe.batch, micro_batch_size=4)))
    other = replace(sweep, rows=(*sweep.rows[:3], changed, sweep.rows[4]))
    assert list(current_results(other)) == ["bf16", "fp8", "longer"]


def test_the_page_of_curves_has_the_finished_rows_whose_folders_are_there(sweep: Sweep) -> None:
    write_sweep_page(sweep)
    page = (sweep.folder / REPORT).read_text()
    assert page.count("<label") == 3 and "loss, last tenth" in page and "too large" not in page
    sweep.rows[1].recipe.run.folder.rename(sweep.folder / "elsewhere")
    write_sweep_page(sweep)
    assert (sweep.folder / REPORT).read_text().count("<label") == 2


def test_a_sweep_without_a_finished_row_has_a_table_alone(sweep: Sweep) -> None:
    (sweep.folder / "results.jsonl").unlink()
    write_sweep_page(sweep)
    assert (sweep.folder / "table.md").exists() and not (sweep.folder / REPORT).exists()
