"""The record of the gpu suite as Markdown; last, every prediction beside what was measured. Imports no torch."""

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from models.sizes import SIZES
from parallel.errors import UserError
from recipes.lab.bench.gpu_plan import GROUPS, TESTS, WORKS, Record, gpu_of_device, predicted_step
from recipes.lab.sweep.grid import Sweep
from recipes.lab.sweep.results import table
from recipes.lab.sweep.runner import LONGEST_REASON
from recipes.metrics.hardware import bf16_peak
from recipes.plan.hardware import Gpu
from recipes.plan.memory import predict as predict_memory
from recipes.plan.rates import RATES
from recipes.plan.time import attention_seconds, moving_seconds, product_seconds, update_bytes

Rows = list[dict[str, Any]]
DOCUMENTS = "flash"
"""The kernel that attention within documents uses."""
IN_BLOCK = {"q_proj, o_proj": 2, "k_proj, v_proj": 2, "gate_proj, up_proj": 2, "down_proj": 1}
"""Linears of a block by the names of their measurements, and how many of them there are."""


def page(record: Record, sweep: Sweep) -> str:
    """The whole page."""
    facts, rows = record["environment"], record["rows"]
    measured = [found for name in GROUPS for found in rows.get(name, {}).get("measurements", [])]
    by_operation: dict[str, Rows] = {}
    for found in measured:
        by_operation.setdefault(found["operation"], []).append(found)
    kernels = {name: by_operation.get(name, []) for name in ("product", "attention", "documents", "loss")}
    moving = [row for name in ("copy", "cast", "optimizer") for row in by_operation.get(name, [])]
    sections = {
        "Does it run": _works(record, sweep),
        "Matrix products": ["TFLOP/s, without the casts to float8.", "", *_matmul_table(kernels["product"])],
        "Attention": _attention(kernels["attention"] + kernels["documents"]),
        "Loss, copies, casts and the optimizer": _moving(kernels["loss"] + moving),
        "Training runs": _runs(record, sweep),
        "Not measured": _missing(record, sweep),
        "Predicted and measured memory": _memory(record, sweep),
        "Predicted and measured": _comparison(record, sweep, kernels, moving),
    }
    lines = [f"# One {facts['device']}", "", *_conditions(record)]
    for title, text in sections.items():
        lines += ["", f"## {title}", "", *text]
    return "\n".join([*lines, ""])


def _conditions(record: Record) -> Iterator[str]:
    facts, peak = record["environment"], bf16_peak(record["environment"]["device"])
    changes = " with uncommitted changes" if facts["git_uncommitted_changes"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    seconds = sum(row["seconds"] for row in record["rows"].values())
    yield (
        f"Python {facts['python']}, CUDA {facts['cuda']}, {packages}; commit {facts['git_commit']}{changes}. Peak for"
        f" dense bf16: {'unknown' if peak is None else f'{peak / 1e12:g} TFLOP/s'}. Took {seconds:.0f} s."
        " docs/benchmarks/README.md explains how to read this."
    )
    other = [name for name, row in record["rows"].items() if row["state"] != record["state"]]
    if other:
        yield f"Measured with other code or versions: {', '.join(other)}."


def _works(record: Record, sweep: Sweep) -> Iterator[str]:
    yield from _head("run", "outcome", "loss, first to last step")
    tests = record["rows"].get(TESTS, {"outcome": "not run yet", "reason": ""})
    yield f"| tests/gpu | {tests['outcome']} | {tests['reason']} |"
    for row in sweep.rows:
        if row.label.startswith(WORKS):
            found = _result(record, row.label, row.fingerprint) or {"outcome": "not run yet"}
            curve = found.get("curve")
            losses = f"{curve[0][2]:.3f} to {curve[-1][2]:.3f}" if curve else found.get("reason", "")
            yield f"| {row.label} | {found['outcome']} | {losses} |"


def _head(*columns: str, numbers: slice = slice(0)) -> list[str]:
    """The head of a table; the columns of numbers are aligned to the right."""
    lines = ["---"] * len(columns)
    lines[numbers] = ["---:"] * len(lines[numbers])
    return [f"| {' | '.join(columns)} |", f"|{'|'.join(lines)}|"]


def _number(row: dict[str, Any], key: str, scale: float = 1) -> str:
    return f"{scale * row[key]:.3g}" if key in row else "not measured"


def _error(row: dict[str, Any]) -> str:
    """Why an operation failed, so short that the table stays one; the record has all of it."""
    return textwrap.shorten(row.get("error", ""), LONGEST_REASON, placeholder="...").replace("|", "\\|")


def _matmul_table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """A table with a line per product and a column per kind."""
    by_product: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        place = (row["model"], row["linear"], row["product"], " x ".join(map(str, row["shape"])))
        by_product.setdefault(place, {})[row["kind"]] = row
    kinds = list(dict.fromkeys(kind for cells in by_product.values() for kind in cells))
    lines = _head("model", "linear", "product", "shape", *kinds, numbers=slice(4, None))
    lines += [
        f"| {' | '.join([*place, *(_number(cells.get(kind, {}), 'tflops') for kind in kinds)])} |"
        for place, cells in by_product.items()
    ]
    errors = [(kind, _error(row)) for cells in by_product.values() for kind, row in cells.items() if "error" in row]
    return lines + [f"\n{kind}: {error}" for kind, error in dict.fromkeys(errors)]


def _attention(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    yield from _head("model", "backend", "passes", "ms", "TFLOP/s", "kernels", numbers=slice(3, 5))
    for row in rows:
        backend = row.get("backend") or f"within {row['documents']} documents"
        names = ", ".join(f"`{name}`" for name in row.get("kernels", []))
        cells = [row["model"], backend, row.get("passes", "both"), _number(row, "seconds", 1e3), _number(row, "tflops")]
        yield f"| {' | '.join(cells)} | {names or _error(row)} |"


def _moving(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    yield from _head("operation", "ms", "TB/s", "error", numbers=slice(1, 3))
    for row in rows:
        rate = _number(row, "bytes_per_second", 1e-12) if "bytes_per_second" in row else ""
        yield f"| {_name_of(row)} | {_number(row, 'seconds', 1e3)} | {rate} | {_error(row)} |"


def _name_of(row: dict[str, Any]) -> str:
    return {
        "loss": lambda: f"loss, {row['model']}, {row['kind']}",
        "copy": lambda: f"copy of {row['gib']:g} GiB",
        "cast": lambda: f"{row['name']}, {row['model']}",
        "optimizer": lambda: f"AdamW, {row['parameters']:,} parameters, {row['moments']} moments",
    }[row["operation"]]()


def _runs(record: Record, sweep: Sweep) -> list[str]:
    """The sweep's own table, without the rows that only show that a run works."""
    rows = tuple(row for row in sweep.rows if not row.label.startswith(WORKS))
    known = {row.label: found for row in rows if (found := _result(record, row.label, row.fingerprint))}
    return table(replace(sweep, rows=rows), known).splitlines()[2:]


def _result(record: Record, name: str, fingerprint: str) -> dict[str, Any] | None:
    found = record["rows"].get(name)
    return found if found and found["fingerprint"] == fingerprint else None


def _missing(record: Record, sweep: Sweep) -> Iterator[str]:
    """Every row without a measurement, and why. A measurement of another recipe does not count."""
    runs = {row.label: _result(record, row.label, row.fingerprint) for row in sweep.rows}
    known = {name: record["rows"].get(name) for name in (TESTS, *GROUPS)} | runs
    missing = [f"- {name}: not run yet" for name, found in known.items() if not found]
    failed = {name: found for name, found in known.items() if found and found["outcome"] != "done"}
    missing += [f"- {name}: {found['outcome']}: {found['reason']}" for name, found in failed.items()]
    yield from missing or ["Everything was measured, except the single operations whose error is above."]


def _memory(record: Record, sweep: Sweep) -> Iterator[str]:
    """Peaks of what torch's allocator gave out, as recipes/plan/memory.py predicts them."""
    if record["environment"]["device"] == "cpu":
        yield "No predictions: on a CPU only the memory of whole processes is known."
        return
    yield from _head("run", "predicted, GB", "measured, GB", "measured / predicted", numbers=slice(1, None))
    for row in sweep.rows:
        result = _result(record, row.label, row.fingerprint)
        if result and result["outcome"] == "done":
            predicted = predict_memory(row.recipe, row.recipe.mesh.fit(row.processes, nodes=1), context=False).peak
            measured = result["peak_memory_gib"] * 2**30
            yield f"| {row.label} | {predicted / 1e9:.1f} | {measured / 1e9:.1f} | {measured / predicted:.2f} |"


def _comparison(record: Record, sweep: Sweep, kernels: dict[str, Rows], moving: Rows) -> Iterator[str]:
    """Milliseconds; above 1 is slower than predicted."""
    try:
        gpu = gpu_of_device(record["environment"]["device"])
    except UserError as error:
        yield f"No predictions: {error}."
        return
    found = [*_products(kernels["product"], gpu), *_passes(kernels, gpu), *_bytes(kernels["loss"], moving, gpu)]
    for row in sweep.rows:
        result = None if row.label.startswith(WORKS) else _result(record, row.label, row.fingerprint)
        predicted = predicted_step(row, record["environment"]["device"])
        if result and result["outcome"] == "done" and predicted is not None:
            tokens = row.recipe.batch.global_batch_size * row.recipe.batch.sequence_length / row.processes
            name = f"step of {row.label}: {tokens / predicted:,.0f} tokens/s per GPU predicted"
            found.append((name, predicted, result["step_seconds"]))
    if not found:
        yield "Nothing is measured yet."
        return
    yield "By the model of [plan.md](../plan.md). The ratio is of times: above 1 is slower than predicted."
    yield ""
    yield from _head("what", "predicted, ms", "measured, ms", "measured / predicted", numbers=slice(1, None))
    for name, predicted, measured in found:
        yield f"| {name} | {1e3 * predicted:.3g} | {1e3 * measured:.3g} | {measured / predicted:.2f} |"


Compared = Iterator[tuple[str, float, float]]
"""(what, predicted seconds, measured seconds)."""


def _products(rows: Rows, gpu: Gpu) -> Compared:
    """All products of one block together, and those of the output projection."""
    for model in dict.fromkeys(row["model"] for row in rows):
        for kind in dict.fromkeys(row["kind"] for row in rows):
            block = [row for row in rows if (row["model"], row["kind"]) == (model, kind) and row["linear"] in IN_BLOCK]
            if len(block) == 3 * len(IN_BLOCK) and all("seconds" in row for row in block):
                predicted = sum(IN_BLOCK[row["linear"]] * _product(row, gpu) for row in block)
                seconds = sum(IN_BLOCK[row["linear"]] * row["seconds"] for row in block)
                yield f"products of a block, {model}, {kind}", predicted, seconds
        head = [row for row in rows if (row["model"], row["linear"], row["kind"]) == (model, "lm_head", "bf16")]
        if len(head) == 3 and all("seconds" in row for row in head):
            predicted, seconds = sum(_product(row, gpu) for row in head), sum(row["seconds"] for row in head)
            yield f"products of the output projection, {model}", predicted, seconds


def _product(row: dict[str, Any], gpu: Gpu) -> float:
    """The predicted seconds of what was measured; its kind is as in "float8 rowwise"."""
    rows, inner, columns = row["shape"]
    _, _, float8 = row["kind"].partition(" ")
    return product_seconds(rows, columns, inner, gpu=gpu, rates=RATES, float8=float8 or "none")


def _passes(kernels: dict[str, Rows], gpu: Gpu) -> Compared:
    """Attention; "both" was counted as three times the forward pass."""
    for row in (*kernels["attention"], *kernels["documents"]):
        if "seconds" in row:
            backend, both = row.get("backend", DOCUMENTS), row.get("passes", "both") == "both"
            flops = row["tflops"] * row["seconds"] * 1e12 / (3 if both else 1)
            forward, backward = attention_seconds(
                *(flops, backend),
                gpu=gpu,
                rates=RATES,
                head_width=SIZES[row["model"]].head_width,
                sequence=row["tokens"] / row.get("documents", 1),
            )
            predicted = forward + backward if both else forward
            where = f"{backend}, {row['passes']}" if "passes" in row else f"{row['documents']} documents"
            yield f"attention of a layer, {row['model']}, {where}", predicted, row["seconds"]


def _bytes(losses: Rows, moving: Rows, gpu: Gpu) -> Compared:
    for row in losses:
        if "seconds" in row:
            per_logit = RATES.loss_chunked if row["kind"] == "eager" else RATES.loss_compiled
            yield _name_of(row), moving_seconds(per_logit * row["logits"], gpu=gpu, rates=RATES), row["seconds"]
    for row in moving:
        if "seconds" in row:
            amount = row["bytes"] if "bytes" in row else row["parameters"] * update_bytes(row["moments"])
            yield _name_of(row), moving_seconds(amount, gpu=gpu, rates=RATES), row["seconds"]
