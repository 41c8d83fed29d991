"""Whole runs on a disk (a small tmpfs) that becomes full or read-only at some step."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from recipes.recipe.schema import Recipe
from tests.processes import run_processes, untimed
from tests.training import change, rows, small_recipe, training

pytestmark = pytest.mark.slow

STEPS, BAD, GOOD = 12, 4, 9
"""The disk cannot be written from step BAD on, and can be written again from step GOOD on."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not allowed here: {mounted.stderr.strip()}")
    yield place
    while os.path.ismount(place):  # once per mount, as they are stacked
        subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def mount(disk: Path, mode: str) -> None:
    # A bind mount can become read-only while files are open.
    if mode == "ro":
        subprocess.run(["mount", "--bind", disk, disk], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)
    else:
        subprocess.run(["mount", "-o", "remount,bind,rw", disk], check=True)


def run(recipe: Recipe, screen: Path, disk: Path, kind: str) -> tuple[int, list[str]]:
    """The exit code, and the names of the files synced before the first shard, in order."""
    from parallel.dist import start, stop

    synced: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    os.fsync = watched
    world = start("cpu", seed=0)
    with screen.open("w") as out, redirect_stdout(out), training(recipe, world, silent=False) as trainer:

        def harm(*_: Any) -> None:
            if trainer.step + 1 == BAD and kind == "gap":
                fill(disk)
            if trainer.step + 1 == GOOD and kind == "gap":
                (disk / "filler").unlink()
            if trainer.step + 1 in (BAD, GOOD) and kind == "read-only":
                mount(disk, "ro" if trainer.step + 1 == BAD else "rw")

        trainer.built.model.register_forward_pre_hook(harm)
        code = trainer.run()
    stop()
    shard = next((index for index, name in enumerate(synced) if name.startswith("shard-")), len(synced))
    return code, synced[:shard]


def lost(screen: str, file: Path) -> int:
    """How many lines of a file were lost, as reported; begin and end are reported once."""
    begin = [line for line in screen.splitlines() if line.startswith(f"{file} cannot be written: ")]
    end = [line for line in screen.splitlines() if line.startswith(f"{file} can be written again; ")]
    assert len(begin) == len(end) == 1
    return int(end[0].split("; ")[1].split()[0])


@pytest.mark.parametrize("kind", ["gap", "read-only"])
def test_training_continues_while_its_files_cannot_be_written(
    kind: str, corpus: Path, disk: Path, tmp_path: Path
) -> None:
    recipe, screen = small_recipe(corpus, tmp_path, steps=STEPS), tmp_path / "screen"
    recipe = change(
        recipe,
        run={"name": kind, "output": str(disk)},
        model={"vocabulary": 512},
        batch={"global_batch_size": 2, "micro_batch_size": 2},
    )
    [(code, synced)] = run_processes(1, run, recipe, screen, disk, kind)
    assert code == 0
    assert {"metrics.jsonl", "log.txt", kind} <= set(synced)  # before the first shard
    output, folder = screen.read_text(), recipe.run.folder
    assert [f"step {step:>6}/{STEPS}" in output for step in range(1, STEPS + 1)] == [True] * STEPS
    assert "NOT SAVED" in output
    steps = [row["step"] for row in rows(recipe)]  # whole rows only
    assert steps == sorted(set(steps)) and {1, BAD - 1, GOOD, STEPS} <= set(steps)
    assert STEPS - len(steps) == lost(output, folder / "metrics.jsonl") > 0
    if kind == "read-only":  # on the full disk, the last page of the log may have space left
        assert lost(output, folder / "log.txt") > 0
    log = untimed((folder / "log.txt").read_text()).splitlines()
    assert all(line in output.splitlines() for line in log)
