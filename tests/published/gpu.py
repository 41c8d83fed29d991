"""Predictions beside a record of tests/gpu/suite.py: `python -m tests.published.gpu RECORD` prints them.

Imports no torch.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.sizes import SIZES
from parallel.errors import UserError, listed
from recipes.files.markdown import markdown_table
from recipes.files.screen import say
from recipes.lab.sweep.grid import Row, Sweep, read_sweep
from recipes.plan.hardware import GPUS, Gpu, gpu_of
from recipes.plan.memory import predict as predict_memory
from recipes.plan.rates import RATES, Rates
from recipes.plan.time import attention_seconds, moving_seconds, product_seconds, time_of, update_bytes
from recipes.plan.work import work_of
from recipes.recipe.fields import value_of
from recipes.recipe.load import CONFIGS
from tests.gpu.suite import Record
from tests.published.kernels import KERNELS

SWEEP = CONFIGS / "sweeps/gpu_bench.toml"
Json = dict[str, Any]
DOCUMENTS = "flash"
"""The kernel that attention within documents uses."""
IN_BLOCK = {"q_proj, o_proj": 2, "k_proj, v_proj": 2, "gate_proj, up_proj": 2, "down_proj": 1}
"""Linears of a block by the names of their measurements, and how many of them there are."""


def main(record: Path) -> None:
    """Print both tables."""
    found = json.loads(record.read_text(encoding="utf-8"))
    gpu, sweep = gpu_of_device(found["environment"]["device"]), read_sweep(SWEEP, output=Path("runs"), processes=1)
    say("\n".join([*step_table(found, [sweep], gpu=gpu, rates=RATES), "", *kernels_table(found, gpu)]))


def gpu_of_device(name: str) -> Gpu:
    """What gpu_of() returns; raises UserError for a device that is not known."""
    gpu = gpu_of(name)
    if gpu is None:
        raise UserError(f"{name}: its rates are not known; the model knows {listed(list(GPUS))}")
    return gpu


def kernels_table(record: Record, gpu: Gpu) -> list[str]:
    """Predicted and measured kernels. A ratio above 1 is slower than predicted."""
    measured = [row for group in record["rows"].values() for row in group.get("measurements", [])]
    done = [row for row in measured if "seconds" in row]
    lines = []
    for name, predicted, row in [*_products(done, gpu), *_others(done, gpu)]:
        times = f"{1e3 * predicted:.3g}", f"{1e3 * row['seconds']:.3g}", f"{row['seconds'] / predicted:.2f}"
        moved = f"{row['bytes_per_second'] / 1e12:.2f}" if "bytes_per_second" in row else ""
        lines.append((name, *times, f"{row['tflops']:,.0f}" if "tflops" in row else "", moved))
    return markdown_table(("what", "predicted, ms", "measured", "ratio", "TFLOP/s", "TB/s"), lines)


def _results(record: Record, sweep: Sweep) -> Iterator[tuple[Row, Json]]:
    """The rows that were measured. A measurement with other settings does not count."""
    for row in sweep.rows:
        result = record["rows"].get(row.label)
        if result and all(value_of(row.recipe, key) == value for key, value in result["overrides"].items()):
            yield row, result


def step_table(record: Record, sweeps: Sequence[Sweep], *, gpu: Gpu, rates: Rates) -> list[str]:
    """Measured over predicted steps and peaks of what torch's allocator gave out, less 1.

    A second error is with the length of its documents, which a recipe does not know. *: the allocator waited.
    """
    lines = []
    for row, result in (pair for sweep in sweeps for pair in _results(record, sweep)):
        if result["outcome"] != "done":
            continue
        degrees = row.recipe.mesh.fit(row.processes, nodes=1)
        work = work_of(row.recipe, degrees)
        if result.get("update") == "torch":  # of before updates were compiled; its kernel writes gradients, too
            work = replace(work, compiled_update=False, clipping=8)
        shorter = result.get("attention_length", work.sequence) / work.sequence
        predicted = [
            time_of(replace(work, attended=share * work.attended), gpu=gpu, rates=rates).step_seconds
            for share in (1, shorter)
        ]
        errors = dict.fromkeys(f"{result['step_seconds'] / seconds - 1:+.1%}" for seconds in predicted)
        peak = result["peak_memory_gib"] * 2**30
        memory = f"{predict_memory(row.recipe, degrees, context=False).peak / peak - 1:+.2%}"
        name = row.label + (" *" if "waited" in result.get("note", "") else "")
        tokens = f"{result['tokens_per_second_per_device']:,.0f}"
        lines.append((name, tokens, " or ".join(errors), f"{peak / 1e9:.1f}", memory))
    return markdown_table(("run", "tokens/s", "error", "peak, GB", "error"), lines)


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


Compared = Iterator[tuple[str, float, Json]]
"""(what, predicted seconds, the measurement)."""


def _products(rows: list[Json], gpu: Gpu) -> Compared:
    """All products of one block together, and those of the output projection."""
    rows = [row for row in rows if row["operation"] == "product"]
    for model, kind in dict.fromkeys((row["model"], row["kind"]) for row in rows):
        products = [row for row in rows if (row["model"], row["kind"]) == (model, kind)]
        block = [row for row in products for _ in range(IN_BLOCK.get(row["linear"], 0))]
        head = [row for row in products if row["linear"] == "lm_head"] if kind == "bf16" else []
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
