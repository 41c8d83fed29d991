"""Measure this machine's CPU for `train.py RECIPE --plan --calibrated-by FILE`: `bench.py --suite calibrate`.

--chain shows what that is worth: it predicts the steps of ten runs, trains them, and compares. Imports no torch.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from parallel.errors import UserError
from recipes.files.atomic import write_whole
from recipes.files.markdown import markdown_table
from recipes.lab.plan.plan import plan
from recipes.lab.plan.world import World
from recipes.lab.sweep.grid import Row
from recipes.lab.sweep.loop import run_row
from recipes.lab.sweep.runner import exit_code_of, run
from recipes.plan.calibration import calibrated
from recipes.recipe.load import CONFIGS, load
from recipes.recipe.schema import Recipe

ROOT = CONFIGS.parent
MOST_SECONDS = 1200.0
"""Most seconds of one number of processes, or of one run: more is a hang."""
SKIPPED = 4
"""Steps of a run before those that are measured."""
TEXT = "text.txt"
DIFFERENT = 0.1
"""Steps that differ by more than this share are to be predicted in the right order."""
WIDE = {
    **{"model.layers": 6, "model.width": 256, "model.feed_forward_width": 768, "model.heads": 4},
    **{"model.key_value_heads": 2, "model.head_width": 64},
}
FULL, SELECTIVE = ({"activation_checkpointing.mode": mode} for mode in ("full", "selective"))
COMPILED, ZERO2 = {"compile.enabled": True}, {"fsdp.reshard_after_forward": False}
VARIANTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "smollm3": (1, "smollm3_debug", {}),
    "smollm3_wide_full": (1, "smollm3_debug", WIDE | FULL),
    "llama3_wide": (1, "llama3_debug", WIDE),
    "llama3_wide_selective": (1, "llama3_debug", WIDE | SELECTIVE),
    "llama3_wide_compiled": (1, "llama3_debug", WIDE | COMPILED),
    "llama3_2": (2, "llama3_debug", {}),
    "smollm3_wide_2_selective": (2, "smollm3_debug", WIDE | SELECTIVE),
    "smollm3_wide_2_compiled_zero2": (2, "smollm3_debug", WIDE | COMPILED | ZERO2),
    "llama3_wide_4_full": (4, "llama3_debug", WIDE | FULL),
    "smollm3_wide_4_zero2": (4, "smollm3_debug", WIDE | ZERO2),
}
"""Runs of the chain: name -> processes, recipe in configs/, changes. None of its shapes is measured by itself."""


@dataclass(frozen=True)
class Compared:
    """One run of the chain."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Error of the prediction, as a share of the measured seconds."""
        return self.predicted / self.measured - 1


def main(arguments: list[str]) -> int:
    """Measure, write the record, and compare if asked to. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench.py --suite calibrate", description=__doc__.removesuffix("Imports no torch.\n"), allow_abbrev=False
    )
    parser.add_argument("--device", choices=["cpu"], default="cpu", help="for GPUs there is --suite gpu")
    parser.add_argument("--processes", default="1,2,4", help="numbers of processes (%(default)s)")
    parser.add_argument("--write", type=Path, required=True, metavar="FILE", help="the record, JSON")
    parser.add_argument("--chain", action="store_true", help="then predict ten runs, train them, and compare")
    parser.add_argument("--steps", type=int, default=24, help="--chain: of each run (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="use the record that FILE has already")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _run(options), interrupted="interrupted")


def _run(options: argparse.Namespace) -> int:
    words = options.processes.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= 64 for word in words):
        raise UserError(f"--processes {options.processes}: must be whole numbers from 1 to 64, as in 1,2,4")
    if options.steps < SKIPPED + 3:
        raise UserError(f"--steps {options.steps}: must be {SKIPPED + 3} or more, of which the first {SKIPPED} warm up")
    processes = sorted({int(word) for word in words})
    if missing := sorted({needed for needed, _, _ in VARIANTS.values()} - {*processes}) if options.chain else []:
        raise UserError(f"--processes {options.processes}: the chain also needs {', '.join(map(str, missing))}")
    if not os.access(options.write.parent, os.W_OK) or options.write.is_dir():  # before minutes of measuring
        raise UserError(f"--write {options.write}: cannot be written there; write a file in a folder that exists")
    if not options.keep:
        record = measured(processes)
        write_whole(options.write, json.dumps(record, indent=1) + "\n", sync=True)
        print(f"written: {options.write}; train.py RECIPE --plan --calibrated-by {options.write} reads it", flush=True)
    if options.chain:
        print("\n".join(table(chain(options.write, steps=options.steps))))
    return 0


def measured(processes: Sequence[int]) -> dict[str, Any]:
    """The record: what processes measure that share the cores of this machine, by their number."""
    found = {}
    with TemporaryDirectory() as folder:
        for count in processes:
            begin = time.monotonic()
            out = Path(folder) / f"{count}.json"
            launch = [sys.executable, str(ROOT / "scripts/launch.py"), "--standalone", f"--nproc-per-node={count}"]
            ended = run(
                [*launch, str(ROOT / "scripts/bench.py"), "--suite", "operators", str(out)],
                stdout=Path(folder) / f"{count}.out",
                stderr=Path(folder) / f"{count}.err",
                timeout=MOST_SECONDS,
                environment={"OMP_NUM_THREADS": str(threads(count)), **os.environ},
            )
            if ended.outcome != "done":
                said = (Path(folder) / f"{count}.err").read_text(encoding="utf-8", errors="replace").strip()
                raise UserError(f"{count} processes: {ended.outcome}: {ended.reason}\n{said}")
            found[str(count)] = json.loads(out.read_text(encoding="utf-8"))
            print(f"{count} processes: measured in {time.monotonic() - begin:.0f} s", flush=True)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    about = {"device": "cpu", "cores": cores(), "memory": pages, "torch": version("torch")}
    return {"suite": "calibrate", "environment": about, "processes": found}


def cores() -> int:
    return os.cpu_count() or 1


def threads(processes: int) -> int:
    """Threads of each process, as scripts/run.sh shares the cores."""
    return max(1, cores() // processes)


def chain(file: Path, *, steps: int) -> list[Compared]:
    """Predict all runs, before any of them is started; then train them, one after the other."""
    with TemporaryDirectory() as folder:
        # So little text that it is tokenized before the first step, and not beside the others.
        text = "\n".join(source.read_text(encoding="utf-8") for source in sorted((ROOT / "recipes").rglob("*.py")))
        (Path(folder) / TEXT).write_text(text, encoding="utf-8")
        rows = {name: _row(name, Path(folder), steps) for name in VARIANTS}
        predicted = {name: predicted_seconds(row.recipe, row.processes, file) for name, row in rows.items()}
        for part in ("recipes", "logs"):
            (Path(folder) / part).mkdir()
        found = []
        for name, row in rows.items():
            result = run_row(row, folder=Path(folder))
            if result["outcome"] != "done":
                raise UserError(f"{name}: {result['outcome']}: {result['reason']}")
            found.append(Compared(name, predicted[name], result["step_seconds"]))
            print(f"{name}: {predicted[name]:.3f} s predicted, {found[-1].measured:.3f} s measured", flush=True)
        return found


def predicted_seconds(recipe: Recipe, processes: int, file: Path) -> float:
    """The predicted seconds of one step."""
    cpu, rates = calibrated(file, None, processes=processes)
    return plan(recipe, World(cpu, processes, rates=rates)).time.step_seconds


def _row(name: str, folder: Path, steps: int) -> Row:
    """A run that does nothing but train."""
    processes, base, changes = VARIANTS[name]
    changes = {
        **{"run.name": name, "run.output": str(folder), "run.device": "cpu", "run.steps": steps},
        **{"metrics.every": 1, "checkpoint.every": 0, "validation.every": 0, "validation.sample_tokens": 0},
        **{"schedule.warmup_steps": 0, "schedule.decay_steps": 0},
        **{"data.source": str(folder / TEXT), "data.cache": str(folder / "cache"), "data.validation_fraction": 0},
        **{"batch.global_batch_size": 8, "batch.micro_batch_size": 2},
        **changes,
    }
    words = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
    recipe = load(CONFIGS / f"{base}.toml", words, rules=False)
    return Row(name, recipe, {}, processes, SKIPPED, MOST_SECONDS)


def table(found: Sequence[Compared]) -> Iterator[str]:
    """Predicted and measured, and how good that is."""
    yield from markdown_table(
        (f"run, on {cores()} cores", "processes", "predicted, s", "measured, s", "error"),
        [
            (row.name, VARIANTS[row.name][0], f"{row.predicted:.3f}", f"{row.measured:.3f}", f"{row.error:+.1%}")
            for row in found
        ],
    )
    wrong, pairs = misordered(found)
    yield ""
    yield f"Median of the absolute errors {median(abs(row.error) for row in found):.1%}; of {pairs} pairs that differ"
    yield f"by more than {DIFFERENT:.0%}, the order of {len(wrong)} is predicted wrong."
    yield from (f"- {one} and {other}" for one, other in wrong)


def misordered(found: Sequence[Compared]) -> tuple[list[tuple[str, str]], int]:
    """Pairs of runs that differ, and whose order is predicted wrong; and how many differ."""
    pairs = [pair for pair in combinations(found, 2) if _ratio(pair) > 1 + DIFFERENT]
    wrong = [
        (one.name, other.name)
        for one, other in pairs
        if (one.predicted < other.predicted) != (one.measured < other.measured)
    ]
    return wrong, len(pairs)


def _ratio(pair: tuple[Compared, Compared]) -> float:
    seconds = sorted(run.measured for run in pair)
    return seconds[1] / seconds[0]
