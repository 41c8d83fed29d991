"""What grows with the cluster on the host side, from 8 to 16,384 ranks, beside what it was before it was cut.

`python scripts/bench.py --suite scale` measures and prints one table; `--write-docs` writes docs/benchmarks/scale.md
and scale.json. scale_before.json has the rows of the commit that it names, got by the same functions on its code.
"""

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from parallel.errors import UserError
from recipes.bench.scale_page import page
from recipes.bench.scale_processes import lines
from recipes.bench.scale_rows import Row
from recipes.bench.scale_store import costs
from recipes.training.environment import environment

PAGE = Path(__file__).resolve().parents[2] / "docs/benchmarks/scale.md"
BEFORE = PAGE.with_name("scale_before.json")
SIZES = (8, 64, 384, 1024, 4096, 16384)
SECTIONS = {
    "processes": ("scale_processes", "process_rows"),
    "start": ("scale_start", "start_rows"),
    "files": ("scale_files", "file_rows"),
    "steps": ("scale_steps", "step_rows"),
    "checkpoint": ("scale_checkpoint", "checkpoint_rows"),
    "watch": ("scale_watch", "watch_rows"),
}
"""Name -> where its rows come from: a module beside this one, and a function of the number of ranks."""

Rows = dict[str, list[Row]]
"""By the number of ranks."""


def main(arguments: list[str]) -> int:
    """Prints the table, and with --write-docs writes it; --out writes the rows alone."""
    parser = argparse.ArgumentParser(prog="bench.py --suite scale", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="these parts of the table")
    parser.add_argument("--write-docs", action="store_true", help="write docs/benchmarks/scale.md and scale.json")
    parser.add_argument("--out", type=Path, help="JSON file for the rows, in the form of scale_before.json")
    options = parser.parse_args(arguments)
    if options.write_docs and set(options.only) != set(SECTIONS):
        raise UserError("--write-docs writes the page of all parts; leave --only out")
    found = {name: measured(name) for name in options.only}
    facts = environment(world_size=1, device=torch.device("cpu"))
    records: dict[str, Any] = {"commit": facts["git_commit"], "device_text": described(facts), **found}
    if "processes" in found:
        records["slopes"] = [line._asdict() | {"quantity": line.quantity._asdict()} for line in lines()]
        records["store_costs"] = [one._asdict() for one in costs()]
    before = json.loads(BEFORE.read_text(encoding="utf-8"))
    lines_of_page = page(records, before)
    print("\n".join(lines_of_page))
    if options.out:
        options.out.write_text(dumps(records), encoding="utf-8")
    if options.write_docs:
        PAGE.with_suffix(".json").write_text(dumps(records), encoding="utf-8")
        PAGE.write_text("\n".join(lines_of_page) + "\n", encoding="utf-8")
    return 0


def measured(name: str) -> Rows:
    """The rows of one part for every size."""
    module, function = SECTIONS[name]
    rows_of: Callable[[int], Sequence[Row]] = getattr(import_module(f"recipes.bench.{module}"), function)
    began = time.monotonic()
    found = {str(ranks): list(rows_of(ranks)) for ranks in SIZES}
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return found


def dumps(records: Mapping[str, Any]) -> str:
    """JSON with one row of the table per line."""

    def one_line(found: re.Match[str]) -> str:
        return f"[{' '.join(found[1].split())}]"

    return re.sub(r"\[\s+([^][{}]*?)\s+\]", one_line, json.dumps(records, indent=1)) + "\n"


def described(facts: Mapping[str, Any]) -> str:
    """Where it was measured."""
    return f"{os.cpu_count()} CPU cores, Python {facts['python']}, torch {facts['packages']['torch']}"
