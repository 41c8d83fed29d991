"""What the training loop costs beside its steps, and its steps beside other loops: `bench.py --suite overhead`.

All of it runs on a CPU. The other loops are a plain one without FSDP, transformers' Trainer and DDP.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from parallel.dist import start, stop
from parallel.errors import UserError
from parallel.state_check import named_state, require_sound
from recipes.files.layout import METRICS
from recipes.lab.bench.peers import KINDS, STAGES, bubbles, peers, table
from recipes.lab.sweep.runner import exit_code_of
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard
from recipes.recipe.load import CONFIGS, load_run
from recipes.recipe.schema import RunConfig
from recipes.training.border import Process
from recipes.training.build_run import build_run
from recipes.training.console import Console
from recipes.training.step import train_step
from recipes.training.surroundings import environment
from recipes.training.trainer import Trainer

ROOT = CONFIGS.parent
DEBUG = CONFIGS / "smollm3_debug.toml"
WINDOW = 10
"""Steps between two logged ones, and of one time of the bare loop."""
PARTS = ("loop", "peers", "ddp", "pipeline", "starts")
PEERS = {"peers": 1, "ddp": 2, "pipeline": 2}
"""Parts that compare with other loops, and their processes."""
FEW = ("--batch.micro_batch_size", "1")
"""Rows at a time, so that a pipeline has enough micro-batches."""
SUMMARY = ("ours", "barest", "ratio", "replica_check", "replica_check_share", "starts", "bubbles")
CHECKS = 5
"""Checks of the state after each run."""


def main(arguments: list[str]) -> int:
    """Print medians and ratios, and write all times where --out says; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench.py --suite overhead",
        description=__doc__,
        epilog="Further options, --section.field value, go to the recipe, configs/smollm3_debug.toml.",
        allow_abbrev=False,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (all)")
    parser.add_argument("--rounds", type=int, default=2, help="loop: pairs of runs (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="loop: of each run (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="peers, ddp: compute types (all)")
    parser.add_argument("--windows", type=int, default=10, help="peers, ddp: measured steps of each loop (%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file for all measurements")
    options, overrides = parser.parse_known_args(arguments)
    return exit_code_of(lambda: _run_parts(options, overrides), interrupted="interrupted")


def _run_parts(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.rounds < 1 or options.steps < 2 * WINDOW or options.windows < 1:
        raise UserError(f"--rounds and --windows must be 1 or more, and --steps {2 * WINDOW} or more")
    if options.out and not os.access(options.out.parent, os.W_OK):  # before minutes of measuring
        raise UserError(f"{options.out.parent} is not a writable folder; write another --out")
    found: dict[str, Any] = {}
    try:
        _measure(options, overrides, found)
    finally:  # also what was measured before a part failed, or Ctrl-C
        if found:
            _report(found, options.out)
    return 0


def _measure(options: argparse.Namespace, overrides: list[str], found: dict[str, Any]) -> None:
    """Add each result to `found` once it is measured."""
    if "loop" in options.parts:
        found |= loops(overrides, rounds=options.rounds, steps=options.steps)
    for name, processes in PEERS.items():
        for kind in options.kinds if name in options.parts else ():
            others = [*STAGES] if name == "pipeline" else None
            words = [*(FEW if others else ()), *overrides]
            measured = peers([kind], words, processes=processes, windows=options.windows, steps=1, others=others)
            found[name] = found.get(name, {}) | measured
    if "pipeline" in options.parts:
        found["bubbles"] = bubbles([*FEW, *overrides], processes=PEERS["pipeline"])
    if "starts" in options.parts:
        found["starts"] = starts(overrides)


def _report(found: dict[str, Any], out: Path | None) -> None:
    if summary := {name: part for name, part in found.items() if name in SUMMARY}:
        print(json.dumps(summary, indent=1))
    for name, processes in PEERS.items():
        if name in found:
            print(f"\n{table(found[name], processes=processes)}")
    if out:
        found["environment"] = environment(world_size=1, device=torch.device("cpu"))
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def loops(overrides: list[str], *, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds per step of the trainer's loop and of a bare one, in turns: medians over windows, and all windows. Both
    call train_step() with the same sharded model. Ours also loads data, logs and watches for signals."""
    ours: list[float] = []
    barest: list[float] = []
    checks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            trainer = _train(folder, [*overrides, "--run.steps", str(steps), "--run.name", f"round-{number}"])
            rows = [json.loads(line) for line in (trainer.recipe.run.folder / METRICS).read_text().splitlines()]
            # All of the wall time between two logged steps, logging included, which a step's own time leaves out.
            walls = [sum(row["wall_seconds"].values()) for row in rows if row["step"] >= WINDOW and "loss" in row]
            ours += [(then - now) / WINDOW for now, then in pairwise(walls)]
            barest += _bare(trainer, windows=steps // WINDOW - 1)
            checks += _checks(trainer)
            stop()
    windows = {"ours": ours, "barest": barest, "replica_check": checks}
    middle = {name: statistics.median(seconds) for name, seconds in windows.items()}
    share = middle["replica_check"] / (RunConfig().check_replicas_every * middle["barest"])
    return middle | {"ratio": middle["ours"] / middle["barest"], "replica_check_share": share, "windows": windows}


def _train(folder: str, overrides: list[str]) -> Trainer:
    """Train the debug recipe in this process. The trainer, and the process group with it, still exist afterwards."""
    quiet = ["--run.output", folder, "--run.device", "cpu", "--metrics.every", str(WINDOW), "--checkpoint.every", "0"]
    none = ["--validation.every", "0", "--validation.sample_tokens", "0"]
    loaded = load_run(DEBUG, [*quiet, *none, *overrides], processes=1)
    world = start("cpu", seed=loaded.recipe.run.seed)
    with Console(silent=True) as console:
        trainer = Trainer(build_run(loaded, Process(world, console, RunClock(world.device))))
        trainer.run()
    return trainer


def _bare(trainer: Trainer, *, windows: int) -> list[float]:
    """Seconds per step of a loop that only calls train_step(), on one batch again and again."""
    batch = trainer.recipe.batch
    tokens = torch.randint(trainer.recipe.model.vocabulary, (batch.global_batch_size, batch.sequence_length))
    micro_batches = [(part, part, None) for part in tokens.split(batch.micro_batch_size)]
    found = []
    for window in range(windows):
        # A new one for each window: it keeps the norms of its steps until it is asked.
        guard = StepGuard(trainer.built.mesh, device=trainer.world.device, max_skipped_steps=1)
        begin = time.perf_counter()
        for step in range(WINDOW):
            train_step(
                trainer.built,
                micro_batches,
                step=window * WINDOW + step + 1,
                learning_rate=trainer.recipe.optimizer.lr,
                guard=guard,
                clock=trainer.clock,
            )
        found.append((time.perf_counter() - begin) / WINDOW)
    return found


def _checks(trainer: Trainer) -> list[float]:
    """Seconds that one check of the state takes, as with replicas: the one process is a group of its own."""
    built, found = trainer.built, []
    state = named_state(built.model, built.parameters, built.optimizer)
    for _ in range(CHECKS):
        begin = time.perf_counter()
        require_sound(state, trainer.world, copies=[(built.mesh.replicate_group, list(state))])
        found.append(time.perf_counter() - begin)
    return found


def starts(overrides: list[str]) -> dict[str, float]:
    """Seconds of whole processes: that do nothing, import torch, check a recipe, and take one step."""
    with tempfile.TemporaryDirectory() as folder:
        run = ["--run.output", folder, "--run.device", "cpu", "--run.steps", "1", "--checkpoint.every", "0"]
        none = ["--validation.every", "0", "--validation.sample_tokens", "0", "--schedule.warmup_steps", "0"]
        train = [str(ROOT / "train.py"), str(DEBUG), *run, *none, "--schedule.decay_steps", "0", *overrides]
        commands = {
            "python": ["-c", "pass"],
            "import torch": ["-c", "import torch"],
            "train.py --check": [*train, "--check"],
            "train.py, one step": train,
        }
        found = {}
        for name, command in commands.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
            found[name] = time.perf_counter() - begin
    return found
