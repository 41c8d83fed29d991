"""The bytes and kernels of blocks that torch 2.13 generated for an H100, counted in November 2026 (commit c54b5f2a)."""

import csv
from pathlib import Path


def rows_of_generated_code() -> list[dict[str, str]]:
    """A row for each block of the recipes, kind of float8 and of checkpointing: column -> cell."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
