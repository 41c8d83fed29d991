"""Folders of runs as tests of pictures need them."""

import json
from pathlib import Path
from typing import Any

import tomli_w


def row(step: int, **columns: Any) -> dict[str, Any]:
    """A logged step of a run that takes two seconds for each step, one of them for something else."""
    return {
        "step": step,
        "tokens": 1000 * step,
        "loss": 8.0 / (1 + step / 50),
        "grad_norm": 1.0,
        "lr": 1e-3,
        "step_seconds": 1.0,
        "tokens_per_second": 500.0,
        "mfu": None,
        "peak_memory_gib": 2.0,
        "wall_seconds": {"step": 1.0 * step, "save": 0.5 * step, "start": 0.5 * step},
        **columns,
    }


def run_folder(folder: Path, *rows: dict[str, Any] | str, recipe: dict[str, Any] | None = None) -> Path:
    """rows: a text is a line as it is."""
    folder.mkdir(parents=True)
    lines = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if recipe is not None:
        (folder / "recipe.toml").write_text(tomli_w.dumps(recipe))
    return folder
