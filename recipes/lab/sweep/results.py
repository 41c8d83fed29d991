"""A sweep's results: one JSON object per row in results.jsonl, and the Markdown table. Imports no torch."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from parallel.errors import UserError
from recipes.files.layout import ENVIRONMENT, METRICS
from recipes.files.markdown import markdown_table
from recipes.files.reading import json_lines, logged_rows
from recipes.lab.sweep.grid import Row, Sweep, windows
from recipes.lab.sweep.runner import Ended
from recipes.metrics.hardware import bf16_peak
from recipes.training.same_run import identity_differences

LEAST_STEPS = 100
"""Steps of a run below which differences between losses are not judged: most of them are warm-up."""
RESULTS = "results.jsonl"
TABLE = "table.md"
COLUMNS = (
    *("run", "tokens/s/device", "speed-up", "step, s", "spread, %", "TFLOP/s", "MFU causal, %", "MFU full, %"),
    *("memory, GiB", "final loss", "loss gap"),
)

RATES = ("tokens_per_second_per_device", "tflops_per_device", "mfu", "mfu_full")

Result = dict[str, Any]
"""A line of results.jsonl: label, fingerprint, overrides, processes, outcome, reason and seconds; if the row is done,
also what measure() returns."""


def result_of(row: Row, ended: Ended) -> Result:
    """The line of results.jsonl for a row that ended."""
    result: Result = {
        "label": row.label,
        "fingerprint": row.fingerprint,
        "overrides": row.overrides,
        "processes": row.processes,
        "outcome": ended.outcome,
        "reason": ended.reason,
        "seconds": round(ended.seconds, 3),
    }
    folder = row.recipe.run.folder
    if ended.outcome == "done":
        try:
            return result | measure(row, folder)
        except (KeyError, ValueError, OSError) as error:  # as after a full disk, on which a run goes on
            return result | {
                "outcome": "crashed",
                "reason": f"the run ended well, but its log lacks steps or cannot be read: {error!r}",
            }
    if ended.outcome in ("timed out", "crashed", "out of memory"):
        rows = _logged(folder / METRICS)
        last = f"last logged step {rows[-1]['step']} of {row.recipe.run.steps}" if rows else "no step was logged"
        result["reason"] += f" ({last})"
    return result


def measure(row: Row, folder: Path) -> Result:
    """The numbers of a finished run, from its folder.

    step_seconds is the median over windows of steps (see grid.windows) of a window's mean; rates follow from it.
    attention_length is the length that FLOPs are counted with: the sequence length or, where documents are masked, the
    mean length of documents that the measured windows logged. Steps on pairs differ in tokens: their rates are what was
    logged. Memory is rank 0's.
    """
    recipe = row.recipe
    rows = {logged["step"]: logged for logged in _logged(folder / METRICS)}
    spans = list(windows(steps=recipe.run.steps, every=recipe.metrics.every, skip=row.skip_steps))
    times = [rows[end]["step_seconds"] for _, end in spans]
    middle = median(times)
    length = recipe.batch.sequence_length
    rate = recipe.batch.global_batch_size * length / middle / row.processes  # tokens/s/device
    lengths = [(end - begin, rows[end].get("attention_length", length)) for begin, end in spans]
    attended = sum(steps * mean for steps, mean in lengths) / sum(steps for steps, _ in lengths)
    flops, flops_full = (recipe.model.flops_per_token(attended, kind) for kind in ("causal", "full"))
    of_validation = [
        [value for key, value in logged.items() if key.split("/")[0] == "validation_loss"]
        for logged in logged_rows(folder / METRICS)
    ]
    last: list[Any] = next(filter(None, reversed(of_validation)), [])
    environment = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
    peak = bf16_peak(environment["device"])
    numbers = {
        "step_seconds": middle,
        "step_seconds_least": min(times),
        "step_seconds_most": max(times),
        "windows": [[begin, end, seconds] for (begin, end), seconds in zip(spans, times, strict=True)],
        "data_seconds": median(rows[end]["data_seconds"] for _, end in spans),
        "first_step_seconds": rows[min(rows)]["step_seconds"],
        "attention_length": attended,
        "tokens_per_second_per_device": rate,
        "tflops_per_device": rate * flops / 1e12,
        "mfu": rate * flops / peak if peak else None,
        "mfu_full": rate * flops_full / peak if peak else None,
        "peak_memory_gib": max(row.get("peak_memory_gib_most", row["peak_memory_gib"]) for row in rows.values()),
        "final_loss": rows[max(rows)]["loss"],
        "validation_loss": fmean(last) if last and None not in last else None,
        "curve": [[step, logged["tokens"], logged["loss"]] for step, logged in sorted(rows.items())],
        "grad_norms": [[step, logged.get("grad_norm")] for step, logged in sorted(rows.items())],
        "skipped_steps": [logged["step"] for logged in logged_rows(folder / METRICS) if "skipped" in logged],
        "environment": environment,
    }
    of_pairs = {name: _at_pace(name, rows, spans, seconds=middle) for name in RATES} if recipe.data.has_pairs else {}
    return numbers | of_pairs


def _at_pace(
    column: str, rows: Mapping[int, Result], spans: Sequence[tuple[int, int]], *, seconds: float
) -> float | None:
    """The mean of a logged rate, if every step of these windows had taken so many seconds; None if it is unknown."""
    if any(rows[end][column] is None for _, end in spans):
        return None
    amount = sum((end - begin) * rows[end][column] * rows[end]["step_seconds"] for begin, end in spans)
    return amount / sum(end - begin for begin, end in spans) / seconds


def read_results(folder: Path) -> list[Result]:
    """The results in results.jsonl, oldest first, except cut-off lines. Raises UserError if another is not a result."""
    path = folder / RESULTS
    results = json_lines(path)
    for result in results:
        if not isinstance(result, dict) or not {"label", "fingerprint", "outcome"} <= set(result):
            start = json.dumps(result)[:60]
            raise UserError(f"{path}: a line is not a result of a sweep: {start}; remove it, or write another --output")
    return results


def append(folder: Path, result: Result) -> None:
    """Add one line to results.jsonl."""
    path = folder / RESULTS
    cut_off = path.is_file() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut_off else "") + json.dumps(result, allow_nan=False) + "\n")


def current_results(sweep: Sweep) -> dict[str, Result]:
    """Label -> the newest result of the row's current recipe, in the order of the rows; omits rows without one."""
    newest = {(result["label"], result["fingerprint"]): result for result in read_results(sweep.folder)}
    return {
        row.label: newest[row.label, row.fingerprint] for row in sweep.rows if (row.label, row.fingerprint) in newest
    }


def reference_row(sweep: Sweep, results: dict[str, Result], *, seed: int | None = None) -> Row | None:
    """The row that losses are compared with: the first finished one without float8. seed: among those with it."""
    rows = (row for row in sweep.rows if row.recipe.float8.recipe == "none" and _is_done(row, results))
    return next((row for row in rows if seed in (None, row.recipe.run.seed)), None)


def loss_gaps(sweep: Sweep, results: dict[str, Result]) -> dict[str, list[tuple[int, float]]]:
    """Label -> (step, loss minus the reference's at that step) for finished rows that saw the same batches.

    A row with another model, data order, batch or learning rate has no gap, since its losses are not comparable. Where
    the seed is an axis, rows are compared with the reference of their seed.
    """
    gaps = {}
    for row in sweep.rows:
        base = reference_row(sweep, results, seed=row.recipe.run.seed)
        if base is None or not _is_done(row, results) or identity_differences(base.recipe, row.recipe):
            continue
        expected = {step: loss for step, _, loss in results[base.label]["curve"]}
        gaps[row.label] = [
            (step, loss - expected[step])
            for step, _, loss in results[row.label]["curve"]
            if loss is not None and expected.get(step) is not None
        ]
    return gaps


def _is_done(row: Row, results: dict[str, Result]) -> bool:
    return bool(results.get(row.label, {}).get("outcome") == "done")


def by_seed(sweep: Sweep, results: dict[str, Result]) -> dict[str, list[Row]]:
    """Title -> finished rows whose labels differ in nothing but the seed; other rows are alone."""
    groups: dict[str, list[Row]] = {}
    for row in sweep.rows:
        if _is_done(row, results):
            groups.setdefault(re.sub(r"(^|,)seed=\d+", "", row.label).strip(",") or "base", []).append(row)
    return {
        row_title(rows[0]) if len(rows) == 1 else f"{name}, {len(rows)} seeds{_emulated(rows[0])}": rows
        for name, rows in groups.items()
    }


def reference_title(sweep: Sweep, results: dict[str, Result]) -> str:
    """The title in by_seed() of what losses are compared with; empty if there is nothing."""
    base = reference_row(sweep, results)
    return next((title for title, rows in by_seed(sweep, results).items() if base in rows), "")


def row_title(row: Row) -> str:
    """How tables call the row."""
    return row.label + _emulated(row)


def _emulated(row: Row) -> str:
    """What to add to the title of a row whose float8 is computed in other types, as on a CPU."""
    return " (emulated)" if row.recipe.float8.recipe != "none" and row.recipe.float8.emulate else ""


def mean_gap(gap: Sequence[tuple[int, float]]) -> float | None:
    """Mean over the last quarter of the logged steps, because the gap at a single step is noise."""
    return fmean(difference for _, difference in last_quarter(gap)) if gap else None


def last_quarter(gap: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """The points that mean_gap averages."""
    return gap[-max(1, len(gap) // 4) :]


def table(sweep: Sweep, results: dict[str, Result]) -> str:
    """The sweep's page in Markdown."""
    done = [result for result in results.values() if result["outcome"] == "done"]
    gaps = loss_gaps(sweep, results)
    slow = next((row for row in sweep.rows if _is_done(row, results)), None)  # which speeds are compared with
    first = results[slow.label]["tokens_per_second_per_device"] if slow else None
    emulated = ", float8 emulated" if any(map(_emulated, sweep.rows)) else ""
    lines = [f"# {sweep.name}{emulated}", "", _conditions(sweep, done), ""]
    if emulated:
        lines += ["**Float8 is emulated: its speed and memory say nothing about float8 on a GPU.**", ""]
    if any(row.recipe.run.steps < LEAST_STEPS for row in sweep.rows):
        short = f"Runs of fewer than {LEAST_STEPS} steps are too short to judge losses: they differ by noise."
        lines += [f"**{short}**", ""]
    rows = []
    for row in sweep.rows:
        result = results.get(row.label)
        cells = _cells(result, first, gaps.get(row.label)) if result else ["not run yet"]
        rows.append([row_title(row), *cells, *[""] * (len(COLUMNS) - 1 - len(cells))])
    lines += markdown_table(COLUMNS, rows)
    lines += [*_ranking(sweep, results), *_seeds(sweep, results)]
    failed = [result for result in results.values() if result["outcome"] != "done"]
    if failed:
        lines += ["", "Rows that failed:", ""]
        lines += [f"- {result['label']}: {result['outcome']}: {result['reason']}" for result in failed]
    skipping = [result for result in done if result.get("skipped_steps")]
    if skipping:
        lines += ["", "Rows that skipped optimizer steps because gradients were not finite or far too large:", ""]
        lines += [f"- {result['label']}: {', '.join(map(str, result['skipped_steps']))}" for result in skipping]
    reference = reference_title(sweep, results)
    compared = f"row {reference}" if reference else "no row, because none without float8 has finished"
    faster = f"row {slow.label}" if slow else "nothing yet"
    read = f"Speed-up: over {faster}. Loss gap: to {compared}. docs/benchmarks/README.md says how numbers are measured."
    return "\n".join([*lines, "", read, ""])


def _ranking(sweep: Sweep, results: dict[str, Result]) -> list[str]:
    """The rows by their validation loss, the best first, where a number is swept; empty if there is no such loss."""
    numbers = (type(value) for row in sweep.rows for key, value in row.overrides.items() if key != "run.seed")
    losses = {row_title(row): results.get(row.label, {}).get("validation_loss") for row in sweep.rows}
    ranked = sorted((loss, title) for title, loss in losses.items() if loss is not None)
    if len(ranked) < 2 or not {int, float} & {*numbers}:
        return []
    return ["", f"By validation loss: {', '.join(f'{title} ({loss:.4f})' for loss, title in ranked)}."]


def _seeds(sweep: Sweep, results: dict[str, Result]) -> list[str]:
    """The table of rows that differ in their seed; empty if there are none."""
    rows = []
    for title, of_title in by_seed(sweep, results).items():
        losses = [results[row.label]["final_loss"] for row in of_title]
        if len(of_title) > 1 and None not in losses:
            rows.append([title, f"{fmean(losses):.4f}", f"{max(losses) - min(losses):.4f}"])
    how = "Spread over seeds: most minus least, the noise of a loss. Loss gaps are to the reference of the same seed."
    return ["", *markdown_table(("over seeds", "final loss", "spread"), rows), "", how] if rows else []


def _cells(result: Result, first: float | None, gap: Sequence[tuple[int, float]] | None) -> list[str]:
    if result["outcome"] != "done":
        return [result["outcome"]]
    rate, seconds = result["tokens_per_second_per_device"], result["step_seconds"]
    below, above = (100 * (result[f"step_seconds_{end}"] / seconds - 1) for end in ("least", "most"))
    percent = ["unknown" if share is None else f"{100 * share:.1f}" for share in (result["mfu"], result["mfu_full"])]
    slowest, fastest = (rate * seconds / result[f"step_seconds_{end}"] for end in ("most", "least"))
    in_noise = first is not None and rate != first and slowest <= first <= fastest
    difference = "not comparable"
    if gap is not None:
        mean = mean_gap(gap)
        difference = "not finite" if mean is None else f"{round(mean, 4) + 0.0:+.4f}"  # not -0.0000
    return [
        f"{rate:,.0f}",
        "noise" if in_noise else f"{rate / first:.2f}" if first else "",
        f"{seconds:.4g}",
        f"{below:+.1f} to {above:+.1f}",
        "unknown" if result["tflops_per_device"] is None else f"{result['tflops_per_device']:.4g}",
        *percent,
        f"{result['peak_memory_gib']:.2f}",
        "not finite" if result["final_loss"] is None else f"{result['final_loss']:.4f}",
        difference,
    ]


def _conditions(sweep: Sweep, done: Sequence[Result]) -> str:
    """Device, versions and commit; several of each if the sweep was resumed elsewhere."""
    lines = [f"`{sweep.file}`, base `{sweep.base}`; {len(sweep.rows)} rows, {len(done)} of them measured."]
    facts = {
        "device": [f"{result['processes']} x {result['environment']['device']}" for result in done],
        "torch": [str(result["environment"]["packages"]["torch"]) for result in done],
        "torchao": [str(result["environment"]["packages"]["torchao"]) for result in done],
        "commit": [
            str(result["environment"]["git_commit"])[:12]
            + (" with changes" if result["environment"]["git_uncommitted_changes"] else "")
            for result in done
        ],
    }
    lines += [f"{name}: {', '.join(dict.fromkeys(values))}." for name, values in facts.items() if values]
    return " ".join(lines)


def _logged(path: Path) -> list[dict[str, Any]]:
    """The training steps of metrics.jsonl."""
    return [row for row in logged_rows(path) if "loss" in row]
