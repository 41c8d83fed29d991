"""Rows of a sweep trained in forked processes, where a test is not about how the launcher starts and ends them."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from recipes.lab.sweep.runner import Ended
from recipes.recipe.load import load_run
from tests.processes import run_processes


def run_forked(
    command: Sequence[str], *, stdout: Path, stderr: Path, timeout: float, environment: dict[str, str]
) -> Ended:
    """recipes.lab.sweep.runner.run without launcher or a new import of torch. A row that fails fails the test."""
    launcher, *options, script, recipe = command[1:]
    assert [Path(launcher).name, Path(script).name] == ["launch.py", "train.py"] and "OMP_NUM_THREADS" in environment
    [processes] = [int(option.partition("=")[2]) for option in options if option.startswith("--nproc-per-node=")]
    begin = time.monotonic()
    codes = run_processes(processes, train_quietly, Path(recipe), Path.cwd(), stdout, timeout=timeout)
    assert codes == [0] * processes
    stderr.touch()
    return Ended("done", "", time.monotonic() - begin)


def train_quietly(recipe: Path, folder: Path, stdout: Path) -> int:
    """Train a recipe in this process, from this folder, with the output in a file."""
    from recipes.training.run import train

    os.chdir(folder)
    with stdout.open("ab") as file:
        os.dup2(file.fileno(), 1)
    return train(load_run(recipe), began=time.monotonic())
