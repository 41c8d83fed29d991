"""Runs of several stages: real processes, killed in each stage and started again on other numbers of processes."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from parallel.dist import World
from recipes.checkpoint.files import read_manifest
from recipes.files.exit_codes import CANNOT_WRITE, FINISHED, PREEMPTED
from recipes.files.layout import CHECKPOINTS, LOG_FILE, METRICS, checkpoint_steps, step_folder
from recipes.metrics.clock import RunClock
from recipes.recipe.load import load, load_run, to_toml
from recipes.recipe.schema import Recipe
from recipes.training import run
from recipes.training.console import Console
from recipes.training.process import Process
from recipes.training.recorder import Recorder
from tests.processes import process_context, run_processes, untimed
from tests.training import SMALL_MODEL, change

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
STEPS = 12
BORDER = 4
STAGES = """
[[stages]]
name = "first"
until = 4
[[stages]]
name = "second"
until = 8
data.mixture = { "TWO" = 0.5, "THREE" = 0.5 }
data.document_mask = true
batch = { sequence_length = 64, global_batch_size = 4 }
[[stages]]
name = "third"
data.source = "ONE"
"""


def run_recipe(file: Path, overrides: Sequence[str]) -> int:
    """Train in this process, as train.py does; the exit code."""
    return run.train(load_run(file, overrides), began=time.monotonic())


def run_until_killed(file: Path, overrides: tuple[str, ...], step: int) -> int:
    """The same, killed with SIGKILL right after this step is logged."""
    log_step = Recorder.log_step

    def log_and_die(self: Recorder, number: int, *arguments: Any, **options: Any) -> None:
        log_step(self, number, *arguments, **options)
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Recorder.log_step = log_and_die  # type: ignore[method-assign]
    return run_recipe(file, overrides)


def run_until_second_stage(file: Path) -> None:
    """End this process as train.py ends, which gets SIGTERM while it builds the second stage."""
    log = Console.log

    def log_and_stop(self: Console, text: str = "", **style: Any) -> None:
        log(self, text, **style)
        if "stage second" in text:
            os.kill(os.getpid(), signal.SIGTERM)

    Console.log = log_and_stop  # type: ignore[method-assign]
    sys.exit(run_recipe(file, ()))


class Runs:
    """Starts runs of one recipe, by its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        texts = sorted((ROOT / "recipes").rglob("*.py"), key=lambda path: path.name)
        self.sources = [folder / f"{name}.txt" for name in ("one", "two", "three")]
        for number, source in enumerate(self.sources):
            source.write_text("\n\n".join(path.read_text() for path in texts[number:30:3]))

    def recipe(self, name: str, stages: str = STAGES, *, asynchronous: bool = False) -> Path:
        one, two, three = map(str, self.sources)
        file = self.folder / f"{name}.toml"
        recipe = change(
            load(ROOT / "configs/smollm3_debug.toml"),
            run={"name": name, "output": str(self.folder / "runs"), "steps": STEPS, "device": "cpu"},
            model=SMALL_MODEL | {"vocabulary": 512},
            data={"mixture": {one: 0.6, two: 0.4}, "source": Recipe().data.source, "tokenizer": "train:512"}
            | {"cache": str(self.folder / "cache"), "shuffle_tokens": 512},
            batch={"sequence_length": 32, "global_batch_size": 8, "micro_batch_size": 1},
            schedule={"warmup_steps": 2, "decay_steps": 4},
            checkpoint={"every": 3, "asynchronous": asynchronous},
            metrics={"every": 1},
            validation={"every": 0, "sample_tokens": 0},
        )
        file.write_text(to_toml(recipe) + stages.replace("ONE", one).replace("TWO", two).replace("THREE", three))
        return file

    def finish(self, name: str, *overrides: str, processes: int = 1, **options: Any) -> str:
        """Run to the end; what this start of the run said."""
        log = self.folder / "runs" / name / LOG_FILE
        before = log.read_text() if log.exists() else ""
        file = self.recipe(name, **options)
        assert run_processes(processes, run_recipe, file, overrides) == [FINISHED] * processes
        return untimed(log.read_text().removeprefix(before))

    def train(self, name: str, world: World, **options: Any) -> int:
        """Run in this process; the exit code."""
        with Console(silent=True) as console:
            process = Process(world, console, RunClock(world.device))
            return run.train_stages(load_run(self.recipe(name, **options)), process)

    def kill_after(self, step: int, name: str, *overrides: str, processes: int = 1, **options: Any) -> None:
        """Start, and kill all processes with SIGKILL once this step is logged."""
        file = self.recipe(name, **options)
        with pytest.raises(AssertionError, match=f"{processes} of {processes} processes did not answer"):
            run_processes(processes, run_until_killed, file, overrides, step, patience=0)

    def rows(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / "runs" / name / METRICS
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def last_step(self, name: str) -> int:
        return max((row["step"] for row in self.rows(name)), default=0)

    def curve(self, name: str) -> dict[int, float]:
        rows = [row for row in self.rows(name) if "loss" in row]
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        return {row["step"]: row["loss"] for row in rows}

    def consumed(self, name: str) -> dict[str, Any]:
        """What the last checkpoint says of the data."""
        manifest = read_manifest(step_folder(self.folder / "runs" / name / CHECKPOINTS, STEPS))
        progress: Any = manifest.state["progress"]
        return {key: progress[key] for key in ("sequences", "tokens", "history", "trained_on")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    found = Runs(tmp_path_factory.mktemp("stages"))
    words = [sys.executable, str(ROOT / "train.py"), str(found.recipe("whole"))]
    subprocess.run(words, cwd=found.folder, check=True)
    return found


def test_a_run_goes_through_all_its_stages_in_one_process(runs: Runs) -> None:
    rows = runs.rows("whole")
    runs.curve("whole")
    assert [row["stage"] for row in rows if "loss" in row] == ["first"] * 4 + ["second"] * 4 + ["third"] * 4
    tokens = {row["step"]: row["tokens"] for row in rows}
    assert (tokens[4], tokens[8], tokens[12]) == (4 * 256, 8 * 256, 12 * 256)


def test_the_parts_of_the_wall_time_add_up_over_all_stages(runs: Runs) -> None:
    rows = [row for row in runs.rows("whole") if "loss" in row]
    sums = [sum(row["wall_seconds"].values()) for row in rows]
    log = (runs.folder / "runs" / "whole" / "log.txt").read_text()
    said = float(log.split(" of ")[-1].split(" s;")[0])
    assert all(row["wall_seconds"]["start"] > 0 for row in rows)
    assert sums == sorted(sums) and sum(row["step_seconds"] for row in rows) < sums[-1] < said + 0.1
    assert log.count("goodput") == 1


def test_a_run_killed_in_each_stage_is_the_same_to_the_bit(runs: Runs) -> None:
    for step in (2, 6, 10):
        runs.kill_after(step, "killed", asynchronous=step == 6)
    runs.finish("killed")
    assert runs.curve("killed") == runs.curve("whole")
    assert runs.consumed("killed") == runs.consumed("whole")


CONTEXT = ("--stages.third.mesh.context", "2")
PIPELINES = ("--mesh.pipeline", "2", "--stages.second.mesh.pipeline", "1", "--stages.third.mesh.shard", "1")


@pytest.mark.parametrize(
    ("overrides", "starts", "last"),
    [
        (CONTEXT, {2: 1, 6: 2, 10: 2}, 4),  # the third start begins in the second stage, and changes its mesh
        (PIPELINES, {2: 2, 10: 2}, 1),
    ],
    ids=["numbers of processes", "pipelines"],
)
def test_a_run_killed_in_each_stage_goes_on_on_other_meshes(
    overrides: tuple[str, ...], starts: dict[int, int], last: int, runs: Runs
) -> None:
    name = f"meshes-{last}"
    for step, processes in starts.items():
        runs.kill_after(step, name, *(overrides if processes > 1 else ()), processes=processes)
    runs.finish(name, *(overrides if last > 1 else ()), processes=last)
    ours, whole = runs.curve(name), runs.curve("whole")
    assert [ours[step] for step in ours] == pytest.approx([whole[step] for step in whole], rel=1e-5)
    assert runs.consumed(name) == runs.consumed("whole")


def test_a_single_stage_is_the_same_to_the_bit_as_none(runs: Runs, alone: World) -> None:
    assert runs.train("plain", alone, stages="") == FINISHED
    assert runs.train("single", alone, stages='[[stages]]\nname = "all"\n') == FINISHED
    assert runs.curve("single") == runs.curve("plain")
    assert runs.consumed("single") == runs.consumed("plain")


def test_a_signal_at_a_border_loses_nothing(runs: Runs) -> None:
    process = process_context().Process(target=run_until_second_stage, args=(runs.recipe("signalled"),))
    process.start()
    process.join()
    assert process.exitcode == PREEMPTED
    runs.finish("signalled")
    assert runs.curve("signalled") == runs.curve("whole")


def test_a_damaged_checkpoint_at_a_border_leads_back_to_the_stage_before(runs: Runs) -> None:
    keep = "--checkpoint.keep=4"
    runs.kill_after(9, "damaged", keep)  # so that the border is saved
    checkpoints = runs.folder / "runs" / "damaged" / CHECKPOINTS
    for step in checkpoint_steps(checkpoints):
        if step >= 8:
            shard = next(step_folder(checkpoints, step).glob("*.safetensors"))
            content = bytearray(shard.read_bytes())
            content[-5] ^= 255
            shard.write_bytes(content)
    out = runs.finish("damaged", keep)
    assert f"resumed from {step_folder(checkpoints, 6)}" in out
    assert out.index("stage third") < out.index("stage second") < out.rindex("stage third")
    assert runs.curve("damaged") == runs.curve("whole")


def test_a_border_that_cannot_be_saved_ends_the_run_before_the_next_stage(
    runs: Runs, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path, step: int, log: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("recipes.checkpoint.folder.begin", fails)
        assert runs.train("full", alone) == CANNOT_WRITE
    assert runs.last_step("full") == BORDER
    assert runs.train("full", alone) == FINISHED
    assert list(runs.curve("full").values()) == pytest.approx(list(runs.curve("whole").values()), rel=1e-6)


def test_debug_recipe_learns_through_its_three_stages(tmp_path: Path) -> None:
    """With one block, half the steps, and fewer micro-batches, which do not change the curve."""
    words = ["--run.output", str(tmp_path), "--data.cache", str(tmp_path / "cache"), "--batch.micro_batch_size", "8"]
    words += ["--model.layers", "1", "--run.steps", "45", "--validation.every", "15"]
    file = ROOT / "configs" / "smollm3_debug_stages.toml"
    assert run_processes(1, run_recipe, file, words) == [FINISHED]
    rows = [json.loads(line) for line in (load_run(file, words).recipe.run.folder / METRICS).read_text().splitlines()]
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert [row["stage"] for row in rows if "validation_loss" in row] == ["web", "web", "long", "long", "decay"]
    assert losses[-1] < losses[0] - 0.5
