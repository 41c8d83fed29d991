"""Shared by the tests of several nodes: a run of some seconds, and its logged losses."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from recipes.cluster.restarts import newest_step
from tests.commands import Command

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40
EVERY = 4
"""Steps between checkpoints."""


def arguments(folder: Path, corpus: Path, name: str, *overrides: str) -> list[str]:
    """A recipe and its overrides: a small model, every step logged, in folder/runs/name."""
    values = {
        "run.name": name,
        "run.output": str(folder / "runs"),
        "run.steps": str(STEPS),
        "run.device": "cpu",
        "model.layers": "2",
        "model.width": "64",
        "model.feed_forward_width": "96",
        "model.heads": "4",
        "model.key_value_heads": "2",
        "model.head_width": "16",
        "data.source": str(corpus),
        "data.tokenizer": "train:512",
        "data.cache": str(folder / "cache"),
        "batch.sequence_length": "32",
        "batch.global_batch_size": "8",
        "batch.micro_batch_size": "1",
        "schedule.kind": "constant",
        "schedule.warmup_steps": "2",
        "schedule.decay_steps": "0",
        "fsdp.param_dtype": "float32",
        "checkpoint.every": str(EVERY),
        "metrics.every": "1",
        "validation.every": "0",
        "validation.sample_tokens": "0",
    }
    return ["configs/smollm3_debug.toml", *(part for key in values for part in (f"--{key}", values[key])), *overrides]


def environment(**more: str) -> dict[str, str]:
    """Variables of a run: of this machine only the PATH."""
    own = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return own | more


def losses(folder: Path, name: str) -> list[tuple[int, float]]:
    """Step and loss of each logged step, in the order of the file, whose last line may be only begun."""
    path = folder / "runs" / name / "metrics.jsonl"
    rows = (json.loads(line) for line in path.read_text().split("\n")[:-1]) if path.exists() else ()
    return [(row["step"], row["loss"]) for row in rows]


def reached(folder: Path, name: str, step: int) -> bool:
    """Whether this step is logged and the checkpoint due before it is complete. Saves overlap with steps."""
    due = (step - 1) // EVERY * EVERY
    return len(losses(folder, name)) >= step and newest_step(folder / "runs" / name) >= due


def kill(processes: Iterable[int]) -> None:
    """Kill these processes; some end when others are killed."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def launch(folder: Path, words: list[str], *, network: Path | None = None, **variables: str) -> Command:
    """Start what scripts/run.sh starts once it has checked the recipe, in forks. See test_setup.py for its words."""
    script, place = [str(ROOT / "scripts/launch.py")], ["--standalone"]
    if "NNODES" in variables:
        place = [f"--nnodes={variables['NNODES']}", f"--node-rank={variables['NODE_RANK']}"]
        place += [f"--master-addr={variables['MASTER_ADDR']}", f"--master-port={variables['MASTER_PORT']}"]
    if "RESTARTS" in variables:
        script = [str(ROOT / "scripts/supervise.py"), sys.executable, *script]
    train = [str(ROOT / "train.py"), str(ROOT / words[0]), *words[1:]]
    command = [*script, *place, f"--nproc-per-node={variables['NPROC']}", *train]
    return Command(*command, cwd=folder, env=environment(**variables), network=network)


def run_sh(folder: Path, words: list[str], **variables: str) -> "subprocess.Popen[str]":
    """Start scripts/run.sh with these arguments."""
    return subprocess.Popen(
        ["bash", str(ROOT / "scripts/run.sh"), *words],
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
