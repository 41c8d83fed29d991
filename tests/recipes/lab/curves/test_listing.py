"""What the list of runs says of each: state, steps, loss and age."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models.sizes import SIZES
from recipes.data.config import DataConfig
from recipes.files.end import write_end
from recipes.lab.curves.listing import listing
from recipes.training.console import BORDER_UNSAVED, UNSAVED, done_line, interrupted_message, last_lines
from tests.recipes.lab.curves.runs import row, run_folder

RECIPE = {"run": {"name": "a", "steps": 50}}
STEP = "step     20/50  loss 5.0437  norm 0.80  lr 3.00e-03"


def state(folder: Path, *log: str) -> str:
    (folder / "log.txt").write_text("".join(f"2026-11-26T09:10:25Z {line}\n" for line in ("  mesh: 1 process", *log)))
    [_, [_, found, *_]] = listing(folder.parent)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "runs" / "a", row(10), row(20, loss=2.5), recipe=RECIPE)


def test_runs_are_listed_newest_first_with_their_steps_loss_and_age(tmp_path: Path) -> None:
    old = run_folder(tmp_path / "sweeps" / "cpu" / "fp8" / "runs" / "bf16", row(10, loss=None), recipe=RECIPE)
    run_folder(tmp_path / "new", row(1500), {"step": 1600, "validation_loss": 2.0})
    (old / "checkpoints" / "step-00000010").mkdir(parents=True)
    for file in old.iterdir():
        os.utime(file, (time.time() - 7300,) * 2)
    [head, new, other] = listing(tmp_path)
    assert head == ["run", "state", "steps", "loss", "validation", "tokens/s", "eta", "last written"]
    assert new[:7] == ["new", "cut off", "1,600", "0.2581", "2.0000", "500", "-"] and new[7].startswith("0:00:0")
    assert other[:4] == ["sweeps/cpu/fp8/runs/bf16", "cut off", "10 of 50", "nan"]
    assert other[7].startswith("2:01:4") and other[7].endswith(" ago")


def test_the_end_of_the_log_says_how_a_run_ended(folder: Path) -> None:
    done = done_line(50, 1000, 2.0, validation_loss={"": 2.0})
    goodput = "goodput 45.2% of 12.2 s; start 27.3%, first step 6.9%"
    interrupted = interrupted_message("SIGTERM", 20, saved=True, every=10)
    (folder / "checkpoints").mkdir()
    assert state(folder, STEP, done, goodput, *last_lines(folder, SIZES["llama3_debug"], DataConfig())) == "done"
    assert state(folder, "this run has its 50 steps already; --run.steps N makes it longer") == "done"
    assert state(folder, STEP, done, goodput, UNSAVED) == "last checkpoint not saved"
    assert state(folder, STEP, goodput, BORDER_UNSAVED) == "last checkpoint not saved"
    assert state(folder, STEP, goodput, interrupted) == "interrupted"
    for every in (0, 10):
        lost = interrupted_message("SIGINT", 20, saved=False, every=every)
        assert state(folder, STEP, goodput, lost) == "interrupted, not saved"
    assert state(folder, "SIGTERM ended the run in the middle of a step; NOT SAVED") == "interrupted, not saved"
    assert state(folder, "SIGTERM ended the run after its last step; run the same") == "interrupted"
    assert state(folder, STEP, "stopped: 10 steps in a row; metrics.jsonl names their documents; no") == (
        "too many steps skipped"
    )
    assert state(folder, STEP, "CORRUPTED after step 20: a weight is NaN; run the same command again") == "corrupted"
    for end in (interrupted, done):
        assert state(folder, end, "a: llama", "  mesh: 1 process", "weights from step 20/x", STEP) == "cut off"


@pytest.mark.slow
def test_a_run_that_holds_its_lock_is_running(folder: Path) -> None:
    (folder / ".lock").write_text("process 1 on vm\n")
    assert state(folder, STEP) == "cut off"  # the file means nothing without its lock
    locks = "import fcntl; file = open('.lock', 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", locks], cwd=folder, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert state(folder, STEP) == "running"
        [_, [*_, eta, _]] = listing(folder.parent)
        assert eta != "-"
        process.communicate(b"\n")


def test_a_start_without_a_step_is_listed(tmp_path: Path) -> None:
    run_folder(tmp_path / "a", recipe=RECIPE)
    assert listing(tmp_path)[1][1:4] == ["did not reach a step", "0 of 50", "-"]


def test_an_average_of_checkpoints_is_no_failed_run(folder: Path, tmp_path: Path) -> None:
    average = run_folder(tmp_path / "average", recipe=RECIPE)
    (average / "checkpoints" / "step-00000050").mkdir(parents=True)
    (average / "metrics.jsonl").unlink()
    assert listing(average)[1][1] == "checkpoints alone"


def test_linked_runs_are_listed_once(tmp_path: Path) -> None:
    run_folder(tmp_path / "far" / "z", row(5))
    (tmp_path / "runs").mkdir()
    for name, place in (("a", "far/z"), ("b", "far/z"), ("loop", "runs")):
        (tmp_path / "runs" / name).symlink_to(tmp_path / place)
    [_, [name, *_]] = listing(tmp_path / "runs")
    assert name in ("a", "b")


def test_a_long_last_row_hides_neither_step_nor_loss(tmp_path: Path) -> None:
    skipped = {"step": 9, "skipped": True, "documents": {"web": [[1, 2, 3]] * 50_000}}
    run_folder(tmp_path / "a", row(8, loss=2.5), skipped)
    assert listing(tmp_path)[1][2:4] == ["9", "2.5000"]


def test_odd_folders_are_listed_and_empty_ones_have_no_runs(tmp_path: Path) -> None:
    assert listing(tmp_path) == []
    odd = run_folder(tmp_path / os.fsdecode(b"\xff\x1b[31m"), '{"step": 3, "loss": 1e308}\n', "[" * 99_999 + "\n")
    (odd / "recipe.toml").write_bytes(b"\xff")
    os.mkfifo(odd / "log.txt")
    assert listing(tmp_path)[1][:4] == ["\ufffd\ufffd[31m", "cut off", "3", "nan"]
    assert listing(tmp_path / "nowhere") == []


def test_what_killed_a_run_is_listed_by_name(folder: Path) -> None:
    assert state(folder, "a process was lost; SIGTERM ended the run in the middle of a step; NOT SAVED") == (
        "a process was lost"
    )
    write_end(folder, 3, -signal.SIGKILL, node="gpu-1")
    write_end(folder, 0, 1, "ValueError: a consequence")  # the first one counts
    assert state(folder, STEP) == "rank 3 on gpu-1 was killed by SIGKILL (often: out of memory)"
    for damaged in ("", "[1]", "{}", '{"rank": "3", "node": 1, "code": 1, "signal": "", "error": "", "time": ""}'):
        (folder / "end.json").write_text(damaged)
        assert state(folder, STEP) == "cut off"
