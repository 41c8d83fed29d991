"""validation.job: a run and the process that evaluates its checkpoints; and by hand, on two processes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from recipes.files.layout import checkpoint_steps
from tests.commands import run_command
from tests.processes import wait_for
from tests.scripts.nodes import arguments, run_sh
from tests.tasks import write_tasks

pytestmark = pytest.mark.slow

STEPS = [4, 8, 12]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beside")


def run(place: Path, corpus: Path, name: str, *words: str) -> str:
    """Train on two processes to the end; the log."""
    common = ["--run.steps", "12", "--checkpoint.keep", "1", "--validation.batches", "2", "--metrics.picture", "false"]
    process = run_sh(place, arguments(place, corpus, name, *common, *words), NPROC="2", HF_HOME=str(place / "hf"))
    out, err = process.communicate()
    assert (process.returncode, ours(err)) == (0, []), out + err
    return out


def ours(errors: str) -> list[str]:
    """The lines but for those of transformers, which warns of texts of tasks that are longer than the model reads."""
    return [line for line in errors.splitlines() if not line.startswith("[transformers]")]


def rows(place: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def validated(place: Path, name: str) -> dict[int, dict[str, float]]:
    """Step -> its validation, and its tokens; what is not copied twice."""
    found: dict[int, dict[str, float]] = {}
    for row in rows(place, name):
        if columns := {key: value for key, value in row.items() if key.startswith("validation_")}:
            assert not found.setdefault(row["step"], {}).keys() & columns.keys()
            found[row["step"]] |= columns | {"tokens": row["tokens"]}
    return found


def wait_for_all(place: Path, name: str, steps: list[int]) -> None:
    wait_for("all evaluations", lambda: sorted(validated(place, name)) == steps)


@pytest.fixture(scope="module")
def beside(place: Path, corpus: Path) -> str:
    """The log of a run whose checkpoints were all evaluated beside it."""
    log = run(place, corpus, "beside", "--validation.every", "0", "--validation.job", "process")
    wait_for_all(place, "beside", STEPS)
    return log


def test_every_checkpoint_has_the_losses_that_the_run_itself_would_find(place: Path, corpus: Path, beside: str) -> None:
    run(place, corpus, "inside", "--validation.every", "4")
    assert "their evaluation goes on; by hand: python " in beside.splitlines()[-1]
    assert (place / "runs/beside/evaluations.txt").read_text().count("evaluating step ") == 3
    expected, found = validated(place, "inside"), validated(place, "beside")
    for step in STEPS:
        assert found[step] == pytest.approx(expected[step], rel=1e-6)
    losses = [[row["loss"] for row in rows(place, name) if "loss" in row] for name in ("inside", "beside")]
    assert losses[0] == losses[1]


def test_a_run_that_goes_on_evaluates_what_was_interrupted_and_then_keeps_no_more(
    place: Path, corpus: Path, beside: str
) -> None:
    """The process that evaluated step 8 was killed."""
    folder = place / "runs" / "killed"
    shutil.copytree(place / "runs" / "beside", folder)
    shutil.rmtree(folder / "checkpoints/step-00000004")  # it has its result
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        lines = (folder / name).read_text().splitlines(keepends=True)
        left = [line for line in lines if not ('"step": 8' in line and ("evaluated" in line or "result" in line))]
        assert len(left) == len(lines) - 1
        (folder / name).write_text("".join(left))
    log = run(place, corpus, "killed", "--run.steps", "16", "--validation.every", "0", "--validation.job", "process")
    wait_for_all(place, "killed", [4, 8, 12, 16])
    found = validated(place, "killed")
    assert found[8] == pytest.approx(validated(place, "beside")[8], rel=1e-6) and len(found[16]) == 2
    reasons = [row["failed"] for row in map(json.loads, (folder / "evaluations.jsonl").open()) if "failed" in row]
    assert reasons == ["the process that evaluated it was ended"]
    assert "checkpoints of steps " in log
    run(place, corpus, "killed", "--run.steps", "20", "--validation.every", "0", "--validation.job", "process")
    assert checkpoint_steps(folder / "checkpoints") == [20]
    wait_for_all(place, "killed", [4, 8, 12, 16, 20])


def by_hand(place: Path, name: str) -> dict[int, dict[str, float]]:
    """What two processes find that are started by hand, and what one adds to that."""
    evaluate = ["scripts/evaluate.py", place / "runs" / name, "--pending", "--device", "cpu"]
    code, _, error = run_command("scripts/launch.py", "--standalone", "--nproc-per-node=2", *evaluate)
    assert (code, ours(error)) == (0, []), error
    found = validated(place, name)
    assert run_command(*evaluate)[0] == 0 and validated(place, name) == found
    assert run_command(*evaluate, "--dtype", "bfloat16")[0] == 2
    return found


def test_what_no_job_has_evaluated_is_kept_and_evaluated_by_hand_on_two_processes(
    place: Path, corpus: Path, beside: str
) -> None:
    """Without a SLURM that accepts the job, nothing evaluates, and the run goes on."""
    log = run(place, corpus, "by hand", "--validation.every", "0", "--validation.job", "slurm --nonsense")
    assert "not evaluated yet; by hand: python " in log.splitlines()[-1]
    assert checkpoint_steps(place / "runs/by hand/checkpoints") == STEPS  # keep = 1
    found, expected = by_hand(place, "by hand"), validated(place, "beside")
    assert found.keys() == expected.keys()
    for step in STEPS:
        assert found[step] == pytest.approx(expected[step], rel=1e-6)


def test_tasks_are_evaluated_beside_the_run_and_losses_in_it(place: Path, corpus: Path) -> None:
    pytest.importorskip("lm_eval", reason="the lm-evaluation-harness is not installed: pip install -e '.[evaluation]'")
    tasks = ["--validation.tasks", str(write_tasks(place / "tasks")), "--validation.task_limit", "4"]
    tasks += ["--validation.every", "4", "--batch.sequence_length", "64"]
    run(place, corpus, "inside with tasks", *tasks)
    run(place, corpus, "with tasks", *tasks, "--validation.job", "slurm --nonsense")
    found, expected = by_hand(place, "with tasks"), validated(place, "inside with tasks")
    assert found.keys() == expected.keys() and len(expected[4]) == 5
    for step in STEPS:
        assert found[step] == pytest.approx(expected[step], rel=1e-5)


def test_tasks_are_evaluated_by_a_process_beside_the_run_too(place: Path, corpus: Path) -> None:
    pytest.importorskip("lm_eval", reason="the lm-evaluation-harness is not installed: pip install -e '.[evaluation]'")
    tasks = ["--validation.tasks", str(write_tasks(place / "tasks-2")), "--validation.task_limit", "4"]
    tasks += ["--batch.sequence_length", "64"]
    run(place, corpus, "all inside", *tasks, "--validation.every", "4")
    run(place, corpus, "all beside", *tasks, "--validation.every", "0", "--validation.job", "process")
    wait_for_all(place, "all beside", STEPS)
    found, expected = validated(place, "all beside"), validated(place, "all inside")
    assert found.keys() == expected.keys() and len(expected[4]) == 5
    for step in STEPS:
        assert found[step] == pytest.approx(expected[step], rel=1e-5)


def test_a_run_that_asks_for_no_evaluation_is_refused_by_name(place: Path, corpus: Path) -> None:
    run(place, corpus, "plain", "--validation.every", "4", "--run.steps", "4")
    code, _, error = run_command("scripts/evaluate.py", place / "runs/plain", "--pending", "--device", "cpu")
    assert code == 2 and 'has validation.job = "": nothing waits' in error
