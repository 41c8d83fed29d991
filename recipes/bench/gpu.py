"""Measure one GPU, from single matrix products to whole training steps: `bench.py --suite gpu`.

Takes about 8 minutes (an estimate). A run of full steps is ended after 5 minutes, and its row says so.
"""

import argparse
import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from models.config import ModelConfig
from models.sizes import SIZES
from parallel.errors import UserError
from recipes.bench import kernels
from recipes.load import CONFIGS
from recipes.metrics.hardware import bf16_peak
from recipes.optimization.config import OptimizerConfig
from recipes.sweep.grid import read_sweep
from recipes.sweep.loop import run_sweep
from recipes.sweep.results import table
from recipes.sweep.runner import exit_code_of
from recipes.training.environment import environment

PAGES = CONFIGS.parent / "docs" / "benchmarks"


def main(arguments: list[str]) -> int:
    """Measure and write NAME.json and NAME.md. Returns the exit code: 0, 2 for a user error, 128 + n after signal n."""
    parser = argparse.ArgumentParser(
        prog="bench.py --suite gpu",
        description=__doc__,
        epilog="Further options, such as --activation_checkpointing.mode selective, go to the full steps.",
        allow_abbrev=False,
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to test the suite itself")
    parser.add_argument("--no-steps", action="store_true", help="skip the full training steps")
    parser.add_argument("--output", type=Path, default=PAGES, help="folder of the record (%(default)s)")
    parser.add_argument("--runs", type=Path, default=Path("runs/bench"), help="folder of the full steps (%(default)s)")
    options, overrides = parser.parse_known_args(arguments)
    message = "interrupted; the record lacks what was not measured yet"
    return exit_code_of(lambda: _measure(options, overrides), interrupted=message)


def _measure(options: argparse.Namespace, overrides: list[str]) -> int:
    begin = time.monotonic()
    if not options.tiny and not torch.cuda.is_available():
        raise UserError("this machine has no GPU to measure; --tiny runs the suite on a CPU")
    device = torch.device("cpu" if options.tiny else "cuda:0")
    # Check folder and overrides before minutes of measuring.
    _make_folder(options.output)
    path = CONFIGS / "sweeps" / ("cpu/gpu_bench.toml" if options.tiny else "gpu_bench.toml")
    fresh = options.runs / time.strftime("%Y%m%d-%H%M%S")  # in an existing folder a sweep would keep its old results
    sweep = read_sweep(path, overrides, output=fresh, processes=1, device=device.type)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's log helps only its developers
    record: dict[str, Any] = {"suite": "gpu", "environment": environment(world_size=1, device=device)}
    record |= measure_kernels(device, tiny=options.tiny)
    record["seconds"] = time.monotonic() - begin
    place = _write(record, "", options.output)  # kept even if the full steps fail
    if not options.no_steps:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the full steps run in other processes
        results = run_sweep(sweep, retry=False, log=lambda line: print(line, flush=True))
        record["steps"] = list(results.values())
        record["seconds"] = time.monotonic() - begin
        _write(record, table(sweep, results).partition("\n")[2], options.output)
    print(f"written: {place}.json and .md, after {record['seconds']:.0f} s")
    return 0


def _make_folder(folder: Path) -> None:
    """Create the folder. Raises UserError if it cannot be created or written to."""
    remedy = "write another --output"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be created: {error.strerror}; {remedy}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder} is not writable; {remedy}")


def _write(record: dict[str, Any], steps_page: str, folder: Path) -> Path:
    """Write both files; returns their path without a suffix."""
    name = "gpu-" + re.sub(r"[^a-z0-9]+", "-", record["environment"]["device"].lower()).strip("-")
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(page(record, steps_page), encoding="utf-8")
    return folder / name


def measure_kernels(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """All measurements except the full steps, by section of the record."""
    models: Sequence[ModelConfig] = [SIZES["smollm3_3b"], SIZES["llama3_8b"]]
    tokens, gib, repeats = 8192, 4.0, 20
    if tiny:
        models = [replace(SIZES[name], layers=2, vocabulary=512) for name in ("smollm3_debug", "llama3_debug")]
        tokens, gib, repeats = 64, 1 / 64, 3
    found: dict[str, Any] = {"matmuls": [], "attention": []}
    for model in models:
        found["matmuls"] += kernels.matmuls(model, tokens=tokens, device=device, repeats=repeats)
        found["attention"] += kernels.attention(model, tokens=tokens, device=device, repeats=repeats)
    found["optimizer"] = [
        kernels.optimizer(models[0], state_dtype=kind, device=device, repeats=repeats)
        for kind in get_args(get_type_hints(OptimizerConfig)["state_dtype"])
    ]
    found["copy"] = [kernels.copy(gib=gib, device=device, repeats=repeats)]
    return found


def page(record: dict[str, Any], steps: str) -> str:
    """The record as Markdown. steps: the table of the full steps, as Markdown; may be empty."""
    facts = record["environment"]
    peak = bf16_peak(facts["device"])
    changes = " with uncommitted changes" if facts["git_uncommitted_changes"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    lines = [
        f"# One {facts['device']}",
        "",
        f"Python {facts['python']}, CUDA {facts['cuda']}, {packages}; commit {facts['git_commit']}{changes}. Peak for"
        f" dense bf16: {'unknown' if peak is None else f'{peak / 1e12:g} TFLOP/s'}. Took {record['seconds']:.0f} s."
        " docs/benchmarks/README.md explains how to read this.",
        "",
        "## Matrix products",
        "",
        "TFLOP/s, without the casts to float8.",
        "",
        *_matmul_table(record["matmuls"]),
        "",
        "## Attention",
        "",
        "| model | backend | passes | ms | TFLOP/s | kernels |",
        "|---|---|---|---:|---:|---|",
    ]
    for row in record["attention"]:
        names = ", ".join(f"`{name}`" for name in row.get("kernels", []))
        cells = [row["model"], row["backend"], row["passes"], _number(row, "seconds", 1e3), _number(row, "tflops")]
        lines.append(f"| {' | '.join(cells)} | {names or row.get('error', '')} |")
    lines += ["", "## Optimizer and copies", "", "| operation | ms | TB/s |", "|---|---:|---:|"]
    for row in record["optimizer"]:
        what = f"AdamW, {row['parameters']:,} parameters, {row['moments']} moments"
        lines.append(f"| {what} | {_number(row, 'seconds', 1e3)} | {_bandwidth(row)} |")
    for row in record["copy"]:
        lines.append(f"| copy of {row['gib']:g} GiB | {_number(row, 'seconds', 1e3)} | {_bandwidth(row)} |")
    return "\n".join([*lines, "", "## Full training steps", "", steps or "not measured", ""])


def _matmul_table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """One line per product, one column per kind."""
    by_product: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        place = (row["model"], row["linear"], row["product"], " x ".join(map(str, row["shape"])))
        by_product.setdefault(place, {})[row["kind"]] = row
    kinds = list(dict.fromkeys(kind for cells in by_product.values() for kind in cells))
    head = ["model", "linear", "product", "shape", *kinds]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---" + "|---:" * len(kinds) + "|"]
    return lines + [
        f"| {' | '.join([*place, *(_number(cells[kind], 'tflops') for kind in kinds)])} |"
        for place, cells in by_product.items()
    ]


def _number(row: dict[str, Any], key: str, scale: float = 1) -> str:
    return f"{scale * row[key]:.3g}" if key in row else "not measured"


def _bandwidth(row: dict[str, Any]) -> str:
    """TB/s, where the operation is one pass over memory."""
    several = "seconds" in row and "bytes_per_second" not in row
    return "several passes" if several else _number(row, "bytes_per_second", 1e-12)
