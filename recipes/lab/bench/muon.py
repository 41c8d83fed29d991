"""What Muon saves: tokens until AdamW's final loss, with the learning rates of both tuned.

`python scripts/bench.py --suite muon --write-docs` trains a small model on the source code of Python's library, each
time in a process of its own, and writes docs/benchmarks/muon.md with its picture and records. Finished runs are kept:
the same command continues. Imports no torch.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from parallel.errors import UserError
from recipes.files.layout import ENVIRONMENT, METRICS
from recipes.lab.bench.muon_page import draw, page

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/benchmarks/muon.md"
RECIPE = "configs/smollm3_debug.toml"
MODEL = ("layers=4", "width=128", "feed_forward_width=352", "heads=4", "key_value_heads=4", "head_width=32")
CHANGES = (
    *(f"--model.{change}" for change in (*MODEL, "vocabulary=2048")),
    *("--data.tokenizer=train:2048", "--batch.sequence_length=128"),
    *("--batch.global_batch_size=8", "--batch.micro_batch_size=8"),
    *("--schedule.warmup_steps=0.1", "--schedule.decay_steps=0.3", "--metrics.every=10"),
    *("--validation.every=25", "--validation.batches=16", "--validation.sample_tokens=0"),
    *("--checkpoint.every=0", "--run.device=cpu"),
)
"""What every run has in common, apart from RECIPE."""
STEPS = 400
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
"""Of AdamW."""
MATRIX_RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
"""Of Muon's matrices, while the rest has AdamW's best rate."""
OTHER_RATES = (0.5, 2.0)
"""Of the rest, relative to AdamW's best, while the matrices have their best rate. As many runs as of AdamW in all."""
TUNED_WITH, SEEDS = 0, (1, 2, 3)
"""Seeds, of the initial weights and of the order of the data."""
SHORTER = (0.5, 0.7)
"""Lengths of further runs of Muon, relative to STEPS, each with its own warm-up and decay."""


@dataclass(frozen=True)
class Trial:
    """One run."""

    optimizer: Literal["adamw", "muon"]
    lr: float
    matrix_lr: float = 0.0
    seed: int = TUNED_WITH
    steps: int = STEPS

    @property
    def name(self) -> str:
        """Of its folder."""
        rates = f"{self.lr:g}" + (f"-{self.matrix_lr:g}" if self.matrix_lr else "")
        return f"{self.optimizer}-{rates}-seed{self.seed}-{self.steps}"

    @property
    def flags(self) -> list[str]:
        """Of train.py."""
        found = {"run.name": self.name, "run.steps": self.steps, "run.seed": self.seed}
        found |= {"optimizer.name": self.optimizer, "optimizer.lr": self.lr}
        found |= {"optimizer.matrix_lr": self.matrix_lr} if self.matrix_lr else {}
        return [f"--{key}={value}" for key, value in found.items()]


Record = dict[str, Any]
"""A trial's fields, its "curve" of (tokens, validation loss), its last "loss", its fastest steps' "step_seconds"."""
Train = Callable[[Sequence[Trial]], list[Record]]


def main(arguments: list[str]) -> int:
    """Prints one line per run, and with --write-docs writes the page, the picture and the records."""
    parser = argparse.ArgumentParser(prog="bench.py --suite muon", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/muon"), help="where the runs are, and stay")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument("--steps", type=int, default=STEPS, help="of every run but the shorter ones")
    parser.add_argument("--write-docs", action="store_true", help="write docs/benchmarks/muon.md, .png and .json")
    options = parser.parse_args(arguments)
    if options.write_docs and options.steps != STEPS:
        raise UserError(f"--write-docs writes the page of runs of {STEPS} steps; leave --steps out")
    options.folder.mkdir(parents=True, exist_ok=True)

    def train(trials: Sequence[Trial]) -> list[Record]:
        with ThreadPoolExecutor(options.jobs) as pool:
            return list(pool.map(lambda trial: run(trial, options.folder), trials))

    found = experiment(train, steps=options.steps)
    first = options.folder / best_of(found["adamw"]).name / ENVIRONMENT
    known = json.loads(first.read_text())
    facts = {key: known[key] for key in ("git_commit", "python", "packages", "device")}
    records = {"environment": facts | {"runs_at_a_time": options.jobs}, **found}
    print("\n".join(page(records)))
    if options.write_docs:
        PAGE.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text("\n".join(page(records)) + "\n", encoding="utf-8")
        draw(records, PAGE.with_suffix(".png"))
    return 0


def experiment(train: Train, *, steps: int = STEPS) -> dict[str, list[Record]]:
    """Tune both optimizers with equally many runs, then train each at its best rates with every seed."""
    adamw = train([Trial("adamw", lr, steps=steps) for lr in RATES])
    best = best_of(adamw)
    muon = train([Trial("muon", best.lr, matrix_lr, steps=steps) for matrix_lr in MATRIX_RATES])
    middle = best_of(muon)
    muon += train([replace(middle, lr=best.lr * share) for share in OTHER_RATES])
    tuned = best_of(muon)
    lengths = [steps, *(round(share * steps) for share in SHORTER)]
    finals = [replace(best, seed=seed) for seed in SEEDS]
    finals += [replace(tuned, seed=seed, steps=length) for length in lengths for seed in SEEDS]
    return {"adamw": adamw, "muon": muon, "finals": train(finals)}


def best_of(records: Iterable[Record]) -> Trial:
    """The trial with the lowest validation loss at its end."""
    found = min(records, key=lambda record: float(record["loss"]))
    return Trial(**{name: found[name] for name in Trial.__dataclass_fields__})


def run(trial: Trial, folder: Path) -> Record:
    """Train, unless the folder holds this run, finished. Raises UserError if it fails."""
    rows = _rows(folder / trial.name)
    if not rows or rows[-1]["step"] < trial.steps or "validation_loss" not in rows[-1]:
        command = [sys.executable, str(ROOT / "train.py"), str(ROOT / RECIPE), f"--run.output={folder.resolve()}"]
        one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        log = folder / f"{trial.name}.txt"
        with log.open("w") as output:
            done = subprocess.run(
                [*command, *CHANGES, *trial.flags], env=os.environ | one_thread, stdout=output, stderr=output, cwd=ROOT
            )
        if done.returncode:
            raise UserError(f"the run {trial.name} ended with exit code {done.returncode}; see {log}")
        rows = _rows(folder / trial.name)
    curve = [(row["tokens"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    seconds = min(row["step_seconds"] for row in rows[1:] if "step_seconds" in row)  # other work makes steps slower
    print(f"{trial.name}: {curve[-1][1]:.4f}, {seconds:.3f} s per step", flush=True)
    return asdict(trial) | {"curve": curve, "loss": curve[-1][1], "step_seconds": seconds}


def _rows(folder: Path) -> list[Record]:
    file = folder / METRICS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
