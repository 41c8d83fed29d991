"""Measure this machine's CPU for `train.py RECIPE --plan --calibrated-by FILE`: `bench.py --suite calibrate`.

Imports no torch.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from parallel.errors import UserError
from recipes.files.atomic import write_whole
from recipes.files.screen import say
from recipes.lab.sweep.runner import exit_code_of, launch

MOST_SECONDS = 1200.0
"""Most seconds of one number of processes: more is a hang."""


def main(arguments: list[str]) -> int:
    """Measure and write the record. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench.py --suite calibrate", description=__doc__.removesuffix("Imports no torch.\n"), allow_abbrev=False
    )
    parser.add_argument("--processes", default="1,2,4", help="numbers of processes (%(default)s)")
    parser.add_argument("--write", type=Path, required=True, metavar="FILE", help="the record, JSON")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _run(options), interrupted="interrupted")


def _run(options: argparse.Namespace) -> int:
    words = options.processes.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= 64 for word in words):
        raise UserError(f"--processes {options.processes}: must be whole numbers from 1 to 64, as in 1,2,4")
    processes = sorted({int(word) for word in words})
    if not os.access(options.write.parent, os.W_OK) or options.write.is_dir():  # before minutes of measuring
        raise UserError(f"--write {options.write}: cannot be written there; write a file in a folder that exists")
    record = measured(processes)
    write_whole(options.write, json.dumps(record, indent=1) + "\n", sync=True)
    say(f"written: {options.write}; train.py RECIPE --plan --calibrated-by {options.write} reads it")
    return 0


def measured(processes: Sequence[int]) -> dict[str, Any]:
    """The record: what processes measure that share the cores of this machine, by their number."""
    by_count, cores = {}, os.cpu_count() or 1
    with TemporaryDirectory() as folder:
        for count in processes:
            begin = time.monotonic()
            out = Path(folder) / f"{count}.json"
            words = ["scripts/bench.py", "--suite", "operators", str(out)]
            ended = launch(words, Path(folder) / str(count), processes=count, timeout=MOST_SECONDS)
            if ended.outcome != "done":
                said = (Path(folder) / f"{count}.err").read_text(encoding="utf-8", errors="replace").strip()
                raise UserError(f"{count} processes: {ended.outcome}: {ended.reason}\n{said}")
            by_count[str(count)] = json.loads(out.read_text(encoding="utf-8"))
            say(f"{count} processes: measured in {time.monotonic() - begin:.0f} s")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    about = {"device": "cpu", "cores": cores, "memory": pages, "torch": version("torch")}
    return {"suite": "calibrate", "environment": about, "processes": by_count}
