"""What waits for its evaluation beside a run, and what starts it. tests/recipes/training/test_beside.py has runs."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.evaluation.beside import Beside, copied, uncopied, waiting
from recipes.files.layout import EVALUATIONS, step_folder
from recipes.files.lock import FolderLock
from recipes.files.reading import logged_rows
from recipes.recipe.schema import Recipe
from recipes.training.run_folder import claim_run_folder
from tests.processes import wait_for
from tests.training import change

pytestmark = pytest.mark.slow  # it starts processes


def result(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "result": {"tokens": step * 10, "validation_loss": loss}, "time": "now"}


def write(file: Path, *rows: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2, 4, 6 and 8."""
    for step in (2, 4, 6, 8):
        step_folder(tmp_path / "run" / "checkpoints", step).mkdir(parents=True)
    return tmp_path / "run"


def test_what_has_failed_least_often_waits_first_and_is_given_up_after_two_attempts(folder: Path) -> None:
    assert waiting(folder) == [2, 4, 6, 8]
    failures = [{"step": step, "failed": "x"} for step in (2, 4, 4)]
    write(folder / "evaluations.jsonl", *failures, result(6, 1.0), {"step": 8, "began": 1})
    assert waiting(folder) == [8, 2]
    assert waiting(folder, sys.maxsize) == [8, 2, 4]


def test_results_are_copied_once_in_whatever_order_they_come(folder: Path) -> None:
    write(folder / "evaluations.jsonl", result(4, 2.0), result(2, 3.0))
    write(folder / "metrics.jsonl", {"step": 2, "loss": 1.0}, {"step": 2, "validation_loss": 3.0, "evaluated": "now"})
    rows = logged_rows(folder / EVALUATIONS)
    assert uncopied(rows, copied(folder)) == [{"step": 4, "tokens": 40, "validation_loss": 2.0, "evaluated": "now"}]


def test_results_of_steps_that_a_run_repeats_are_forgotten(small: Recipe, tmp_path: Path) -> None:
    recipe = change(small, run={"output": str(tmp_path), "name": "run"})
    folder = recipe.run.folder
    folder.mkdir()
    (folder / "checkpoints").mkdir()
    write(folder / "metrics.jsonl", {"step": 6, "loss": 1.0}, {"step": 2, "validation_loss": 3.0, "evaluated": "now"})
    write(folder / "evaluations.jsonl", result(2, 3.0), result(6, 2.0), {"step": 8, "failed": "x"})
    lock = FolderLock()
    lock.take(folder, log=print)
    claim_run_folder(recipe, done=4, environment={}, lock=lock)
    assert (folder / "evaluations.jsonl").read_text() == json.dumps(result(2, 3.0)) + "\n"
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [2]


class Started:
    """A Beside whose commands are written to a file instead of executed."""

    def __init__(self, folder: Path, job: str, exit_code: int = 0) -> None:
        self.said: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.calls = folder.parent / "calls"
        for name in ("sbatch", "nice"):
            text = f'#!/bin/sh\necho "$0 $* $CUDA_VISIBLE_DEVICES/$RANK/$SLURM_JOB_ID/$SLURM_CONF" >>{self.calls}\n'
            (folder.parent / name).write_text(f"{text}exit {exit_code}\n")
            (folder.parent / name).chmod(0o755)
        self.beside = Beside(folder, job, log=self.said.append, write=self.rows.append)

    def call(self) -> str:
        """The one command so far."""
        wait_for("the command", lambda: self.calls.exists() and self.calls.read_text().endswith("\n"))
        [line] = self.calls.read_text().splitlines()
        return line


@pytest.fixture(autouse=True)
def variables(tmp_path: Path) -> Iterator[None]:
    """Those of a process of a run in a SLURM job, and a PATH on which the commands of Started are first."""
    values = {"RANK": "3", "SLURM_JOB_ID": "7", "SLURM_CONF": "conf", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


def test_a_job_gets_the_options_of_the_recipe_and_no_variables_of_the_run(folder: Path) -> None:
    started = Started(folder, "slurm --gres=gpu:2 --comment='a b'")
    started.beside.end(finished=True)
    call = started.call()
    assert call.startswith(
        f"{folder.parent}/sbatch --job-name=evaluate-{folder} --dependency=singleton --output={folder}"
    )
    assert " --gres=gpu:2 --comment=a b --wrap=" in call and "--nproc-per-node=${SLURM_GPUS_ON_NODE:-1} " in call
    assert f"evaluate.py {folder} --pending 2" in call and call.endswith(" ///conf")
    assert " --wait" not in call  # the end of a run waits until the job is accepted
    [said] = started.said
    assert said.startswith("checkpoints of steps 2, 4, 6, 8: their evaluation goes on; by hand: python ")


def test_a_job_during_the_run_is_waited_for_and_a_percent_sign_is_none_of_slurm(folder: Path) -> None:
    started = Started(folder.rename(folder.with_name("50%j")), "slurm --wait-all-nodes=1")
    started.beside.look()
    call = started.call()
    assert f"--output={folder.parent}/50%%j/evaluations.txt " in call and " --wait --wait-all-nodes=1 " in call


@pytest.mark.parametrize(("job", "devices", "processes"), [("process", "", 1), ("process 6,7", "6,7", 2)])
def test_a_process_sees_the_devices_of_the_recipe_alone(folder: Path, job: str, devices: str, processes: int) -> None:
    started = Started(folder, job)
    started.beside.look()
    assert f" --standalone --nproc-per-node={processes} " in (call := started.call())
    assert call.endswith(f" {devices}///conf")


@pytest.mark.parametrize("job", ["process", "slurm"])
def test_what_cannot_be_started_is_said_and_only_a_new_checkpoint_is_reason_to_try_again(
    job: str, folder: Path
) -> None:
    started = Started(folder, job, exit_code=3)
    started.beside.look()
    child = started.beside._child
    assert child is not None and child.wait() == 3
    started.beside.look()
    started.beside.look()
    assert started.said == [f"the evaluation beside the run ended with exit code 3; {folder}/evaluations.txt says more"]
    step_folder(folder / "checkpoints", 10).mkdir()
    started.beside.look()
    assert started.beside._child is not None
    started.beside._child.wait()
    started.beside.end(finished=False)
    assert started.said[-1].startswith("checkpoints of steps 2, 4, 6, 8, 10: not evaluated yet; by hand: python ")


def test_the_end_of_a_run_starts_another_evaluation_only_for_what_is_new(folder: Path) -> None:
    started = Started(folder, "process")
    (folder.parent / "nice").write_text(f"#!/bin/sh\necho >>{started.calls}\nread line <{folder.parent}/go\n")
    os.mkfifo(folder.parent / "go")
    started.beside.look()
    children = [started.beside._child]
    try:
        started.beside.end(finished=True)
        assert started.beside._child is children[0]
        goes_on = "checkpoints of steps 2, 4, 6, 8: their evaluation goes on; by hand: python "
        assert started.said[-1].startswith(goes_on)
        step_folder(folder / "checkpoints", 10).mkdir()
        started.beside.end(finished=True)
        children.append(started.beside._child)
        assert children[1] is not children[0]
        wait_for("both", lambda: started.calls.exists() and len(started.calls.read_text().splitlines()) == 2)
    finally:
        for child in filter(None, children):
            child.kill()
            child.wait()


def test_a_command_that_is_not_there_does_not_end_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(folder, "slurm")
    monkeypatch.setenv("PATH", "/nowhere")
    started.beside.end(finished=True)
    assert "No such file or directory: 'sbatch'" in started.said[0] and "not evaluated yet" in started.said[1]


def test_a_result_and_a_failure_are_logged_once_but_not_failures_of_earlier_starts(folder: Path) -> None:
    write(folder / "evaluations.jsonl", {"step": 2, "failed": "before"}, {"step": 2, "failed": "before"})
    started = Started(folder, "process")
    started.beside._asked = {2, 4, 6, 8}
    write(folder / "evaluations.jsonl", result(4, 2.5), {"step": 6, "failed": "UserError: it is damaged"})
    for _ in range(2):
        started.beside.look()
    assert started.rows == [{"step": 4, "tokens": 40, "validation_loss": 2.5, "evaluated": "now"}]
    assert started.said == [
        "step      4  beside the run: validation_loss 2.5",
        f"step      6  NOT EVALUATED: UserError: it is damaged; {folder}/evaluations.txt says more",
    ]


def test_a_run_that_goes_on_copies_what_it_has_not_and_reads_its_metrics_once(folder: Path) -> None:
    write(folder / "evaluations.jsonl", result(2, 3.0), result(4, 2.0))
    write(folder / "metrics.jsonl", {"step": 2, "validation_loss": 3.0, "evaluated": "now"})
    started = Started(folder, "process")
    (folder / "metrics.jsonl").unlink()
    started.beside.look()
    assert [row["step"] for row in started.rows] == [4]
    child = started.beside._child
    assert child is not None and child.wait() == 0


def test_a_step_looks_at_the_folder_only_every_few_seconds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, looks = Started(folder, "process"), []
    monkeypatch.setattr(started.beside, "look", lambda: looks.append(1))
    for number in range(100):
        with started.beside.step(number):
            pass
    assert looks == [1]
