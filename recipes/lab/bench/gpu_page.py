"""The record of the gpu suite as Markdown, with every prediction beside what was measured. Imports no torch."""

import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from models.sizes import SIZES
from parallel.errors import UserError
from recipes.files.markdown import markdown_table
from recipes.lab.bench.gpu_plan import GROUPS, TESTS, WORKS, Record, gpu_of_device, predicted_step
from recipes.lab.sweep.grid import Sweep
from recipes.lab.sweep.results import table
from recipes.lab.sweep.runner import LONGEST_REASON
from recipes.metrics.hardware import bf16_peak
from recipes.plan.hardware import Gpu
from recipes.plan.memory import predict as predict_memory
from recipes.plan.rates import KERNELS, RATES
from recipes.plan.time import attention_seconds, moving_seconds, product_seconds, update_bytes

Json = dict[str, Any]
DOCUMENTS = "flash"
"""The kernel that attention within documents uses."""
IN_BLOCK = {"q_proj, o_proj": 2, "k_proj, v_proj": 2, "gate_proj, up_proj": 2, "down_proj": 1}
"""Linears of a block by the names of their measurements, and how many of them there are."""


def page(record: Record, sweep: Sweep) -> str:
    """The whole page."""
    device, rows = record["environment"]["device"], record["rows"]
    measured = [result for name in GROUPS for result in rows.get(name, {}).get("measurements", [])]
    sections = {
        "Training runs": _runs(record, sweep),
        "Predicted and measured steps": _steps(record, sweep),
        "Kernels": _kernels(measured, device),
        "Not measured": _missing(record, sweep, measured),
    }
    lines = [f"# One {device}", "", *_conditions(record)]
    for title, text in sections.items():
        lines += ["", f"## {title}", "", *text]
    return "\n".join([*lines, ""])


def _conditions(record: Record) -> Iterator[str]:
    facts, peak = record["environment"], bf16_peak(record["environment"]["device"])
    changes = " with uncommitted changes" if facts["git_uncommitted_changes"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    when = f"{facts['date']}: " if "date" in facts else ""
    seconds = sum(row.get("seconds", 0) for row in record["rows"].values())
    yield (
        f"{when}Python {facts['python']}, CUDA {facts['cuda']}, {packages}; commit {facts['git_commit']}{changes}. Peak"
        f" for dense bf16: {'unknown' if peak is None else f'{peak / 1e12:g} TFLOP/s'}. Took {seconds:.0f} s."
        " [README.md](README.md#one-gpu) explains how to read this. Predictions are those of [plan.md](../plan.md) at"
        " that commit."
    )
    other = [name for name, row in record["rows"].items() if row["state"] != record["state"]]
    if other:
        yield f"Measured with other code or versions: {', '.join(other)}."


def _runs(record: Record, sweep: Sweep) -> Iterator[str]:
    """The sweep's own table; of the rows that only show that a run works, how they ended; and what must be known."""
    results = _results(record, sweep)
    whole = {name for name, result in results.items() if "final_loss" in result and not name.startswith(WORKS)}
    rows = tuple(row for row in sweep.rows if row.label in whole)
    if rows:
        known = {row.label: results[row.label] for row in rows}
        yield from table(replace(sweep, rows=rows), known).splitlines()[4:-2]  # without its title and how to read it
        yield ""
    if tests := record["rows"].get(TESTS):
        yield f"- tests/gpu: {tests['outcome']}: {tests['reason']}"
    for name, result in results.items():
        if name.startswith(WORKS):
            losses = [loss for _, _, loss in result.get("curve", [])]
            yield f"- {name}: {result['outcome']}" + (f", loss {losses[0]:.3f} to {losses[-1]:.3f}" if losses else "")
    yield from (f"- {name}: {result['note']}" for name, result in record["rows"].items() if "note" in result)


def _results(record: Record, sweep: Sweep) -> dict[str, Json]:
    """Label -> what was measured, in the order of the rows. A measurement of another recipe does not count."""
    known = {row.label: (record["rows"].get(row.label, {}), row.fingerprint) for row in sweep.rows}
    return {label: result for label, (result, now) in known.items() if result.get("fingerprint") == now}


def _steps(record: Record, sweep: Sweep) -> Iterator[str]:
    """Steps, and the peaks of what torch's allocator gave out."""
    lines, results = [], _results(record, sweep)
    for row in sweep.rows:
        result, step = results.get(row.label), predicted_step(row, record["environment"]["device"])
        if step and result and result["outcome"] == "done" and not row.label.startswith(WORKS):
            peak = predict_memory(row.recipe, row.recipe.mesh.fit(row.processes, nodes=1), context=False).peak / 1e9
            took, reached = result["step_seconds"], result["peak_memory_gib"] * 2**30 / 1e9
            cells = f"{1e3 * step:.0f}", f"{1e3 * took:.0f}", f"{took / step:.2f}"
            lines.append((row.label, *cells, f"{peak:.1f}", f"{reached:.1f}", f"{reached / peak:.3f}"))
    names = ("run", "step, ms: predicted", "measured", "ratio", "peak, GB: predicted", "measured", "ratio")
    yield from markdown_table(names, lines) if lines else ["None."]


def _missing(record: Record, sweep: Sweep, measured: list[Json]) -> Iterator[str]:
    """Every row and operation without a measurement, and why."""
    results = _results(record, sweep)
    known = {name: record["rows"].get(name) for name in (TESTS, *GROUPS)}
    known |= {row.label: results.get(row.label) for row in sweep.rows}
    failed = {name: row for name, row in known.items() if row and row["outcome"] != "done"}
    lines = [f"- {name}: {row['outcome']}: {row['reason']}" for name, row in failed.items()]
    lines += dict.fromkeys(f"- {_name_of(row)}: {_error(row)}" for row in measured if "error" in row)
    if left := [name for name, row in known.items() if not row]:
        lines.append(f"- not run yet: {', '.join(left)}")
    yield from lines or ["Everything was measured."]


def _error(row: Json) -> str:
    """Why an operation failed, so short that the list stays one; the record has all of it."""
    return textwrap.shorten(row["error"], LONGEST_REASON, placeholder="...")


def _name_of(row: Json) -> str:
    where = [row[name] for name in ("backend", "passes") if name in row] or [f"{row.get('documents')} documents"]
    return {
        "product": lambda: f"products, {row['model']}, {row['kind']}",
        "attention": lambda: f"attention, {row['model']}, {', '.join(where)}",
        "documents": lambda: f"attention, {row['model']}, {', '.join(where)}",
        "loss": lambda: f"loss, {row['model']}, {row['kind']}",
        "copy": lambda: f"copy of {row['gib']:g} GiB",
        "cast": lambda: f"{row['name']}, {row['model']}",
        "optimizer": lambda: f"AdamW, {row['parameters']:,} parameters, {row['moments']} moments",
    }[row["operation"]]()


def _kernels(measured: list[Json], device: str) -> Iterator[str]:
    """Above 1 is slower than predicted."""
    try:
        gpu = gpu_of_device(device)
    except UserError as error:
        yield f"No predictions: {error}."
        return
    done = [row for row in measured if "seconds" in row]
    lines = []
    for name, predicted, row in [*_products(done, gpu), *_others(done, gpu)]:
        times = f"{1e3 * predicted:.3g}", f"{1e3 * row['seconds']:.3g}", f"{row['seconds'] / predicted:.2f}"
        moved = f"{row['bytes_per_second'] / 1e12:.2f}" if "bytes_per_second" in row else ""
        lines.append((name, *times, f"{row['tflops']:,.0f}" if "tflops" in row else "", moved))
    yield from markdown_table(("what", "predicted, ms", "measured", "ratio", "TFLOP/s", "TB/s"), lines)


Compared = Iterator[tuple[str, float, Json]]
"""(what, predicted seconds, the measurement)."""


def _products(rows: list[Json], gpu: Gpu) -> Compared:
    """All products of one block together, and those of the output projection."""
    rows = [row for row in rows if row["operation"] == "product"]
    for model, kind in dict.fromkeys((row["model"], row["kind"]) for row in rows):
        own = [row for row in rows if (row["model"], row["kind"]) == (model, kind)]
        block = [row for row in own for _ in range(IN_BLOCK.get(row["linear"], 0))]
        head = [row for row in own if row["linear"] == "lm_head"] if kind == "bf16" else []
        if len(block) == 3 * sum(IN_BLOCK.values()):
            yield _name_of(block[0]), *_together(block, gpu)
        if len(head) == 3:
            yield f"products of the head, {model}", *_together(head, gpu)


def _together(rows: list[Json], gpu: Gpu) -> tuple[float, Json]:
    """Predicted seconds of these products, and what was measured; a kind is as in "float8 rowwise"."""
    predicted = 0.0
    for row in rows:
        m, inner, n = row["shape"]
        float8 = row["kind"].partition(" ")[2] or "none"
        predicted += product_seconds(m, n, inner, gpu=gpu, rates=RATES, float8=float8)
    seconds = sum(row["seconds"] for row in rows)
    return predicted, {"seconds": seconds, "tflops": sum(row["tflops"] * row["seconds"] for row in rows) / seconds}


def _others(rows: list[Json], gpu: Gpu) -> Compared:
    for row in rows:
        if row["operation"] in ("attention", "documents"):
            yield _name_of(row), _attention(row, gpu), row
        elif row["operation"] == "loss":
            amount = row["logits"] * (RATES.loss_chunked if row["kind"] == "eager" else RATES.loss_compiled)
            yield _name_of(row), moving_seconds(amount, gpu=gpu, rates=RATES), row
        elif row["operation"] != "product":
            update = row["operation"] == "optimizer"
            amount = row["parameters"] * update_bytes(row["moments"], compiled=False) if update else row["bytes"]
            field = "updated" if update else KERNELS.get(row.get("name", ""), "moved")
            slower = 1.0 if field == "moved" else getattr(RATES, field)
            yield _name_of(row), moving_seconds(amount / slower, gpu=gpu, rates=RATES), row


def _attention(row: Json, gpu: Gpu) -> float:
    """Predicted seconds; "both" was counted as three times the forward pass."""
    both = row.get("passes", "both") == "both"
    forward, backward = attention_seconds(
        row["tflops"] * row["seconds"] * 1e12 / (3 if both else 1),
        row.get("backend", DOCUMENTS),
        gpu=gpu,
        rates=RATES,
        head_width=SIZES[row["model"]].head_width,
        sequence=row["tokens"] / row.get("documents", 1),
    )
    return forward + backward if both else forward
