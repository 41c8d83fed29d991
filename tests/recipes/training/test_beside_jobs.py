"""validation.job = "slurm" with real daemons: a cluster of two nodes, on which the run and its evaluations are jobs."""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.files.exit_codes import PREEMPTED
from recipes.files.reading import logged_rows
from tests.processes import wait_for
from tests.scripts.cluster import Cluster, missing
from tests.scripts.nodes import ROOT, arguments, environment, run_sh

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

STAGES = """
base = "{root}/configs/smollm3_debug.toml"

[[stages]]
name = "early"
until = {until}

[[stages]]
name = "late"
batch = {{ sequence_length = 16 }}
"""
STAGE = {4: "early", 8: "late", 12: "late"}
"""Step of each checkpoint -> the stage that trained it."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, with the recipe of two stages."""
    place = tmp_path_factory.mktemp("beside jobs")
    for name, until in (("short", 4), ("long", 40)):
        (place / f"{name}.toml").write_text(STAGES.format(root=ROOT, until=until))
    return place


def words(place: Path, corpus: Path, name: str, *more: str, recipe: str = "short") -> list[str]:
    """The arguments of a run of 12 steps with a checkpoint of every fourth."""
    common = ["--run.steps", "12", "--checkpoint.keep", "1", "--validation.batches", "2", "--metrics.picture", "false"]
    return [str(place / f"{recipe}.toml"), *arguments(place, corpus, name, *common, *more)[1:]]


def train(cluster: Cluster, place: Path, corpus: Path, name: str, *more: str, **variables: str) -> str:
    """Train on this machine, outside of a job, to the end, in a minute; the log."""
    process = run_sh(place, words(place, corpus, name, *more), **cluster.environment, NPROC="1", **variables)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, ""), out + err
    return out


def rows(place: Path, name: str, wanted: Callable[[dict[str, Any]], object]) -> list[dict[str, Any]]:
    return [row for row in logged_rows(place / "runs" / name / "metrics.jsonl") if wanted(row)]


def evaluated(place: Path, name: str) -> dict[int, dict[str, Any]]:
    """Step -> the row of its evaluation; none is there twice."""
    found = rows(place, name, lambda row: "evaluated" in row)
    assert len({row["step"] for row in found}) == len(found)
    return {row["step"]: row for row in found}


@pytest.fixture(scope="module")
def losses(cluster: Cluster, place: Path, corpus: Path) -> dict[int, Any]:
    """Step -> the validation row of a run that validates by itself."""
    train(cluster, place, corpus, "inside", "--validation.every", "4")
    return {row["step"]: row for row in rows(place, "inside", lambda row: "validation_loss" in row)}


def require_as_inside(found: dict[int, dict[str, Any]], losses: dict[int, Any]) -> None:
    for step, row in found.items():
        assert row["stage"] == losses[step]["stage"] == STAGE[step]
        assert row["tokens"] == losses[step]["tokens"]
        assert row["validation_loss"] == pytest.approx(losses[step]["validation_loss"], rel=1e-6)


def jobs_of(cluster: Cluster, name: str) -> list[str]:
    """The numbers of the jobs that have not ended and evaluate this run."""
    listed = (line.partition(" ") for line in cluster.do("squeue", "--noheader", "--format=%i %j").splitlines())
    return [number for number, _, job in listed if job.endswith(f"/runs/{name}")]


def test_jobs_that_start_after_the_end_of_the_run_bring_their_rows_with_step_and_stage(
    cluster: Cluster, place: Path, corpus: Path, losses: dict[int, Any]
) -> None:
    """They are held in the queue until then. The name is one that SLURM would change."""
    name = "held 50%j"
    job = ["--validation.job", "slurm --hold --comment='not now'", "--metrics.picture", "true"]
    log = train(cluster, place, corpus, name, *job)
    last = log.splitlines()[-1]
    assert "checkpoints of steps 4, 8, 12: their evaluation goes on; by hand: python " in last
    assert not evaluated(place, name)
    drawn = (picture := place / "runs" / name / "report.html").stat().st_mtime_ns
    held = jobs_of(cluster, name)
    assert 1 <= len(held) <= 2
    cluster.do("scontrol", "release", *held)
    wait_for("the rows", lambda: sorted(evaluated(place, name)) == [4, 8, 12])
    require_as_inside(evaluated(place, name), losses)
    wait_for("a new report", lambda: picture.stat().st_mtime_ns > drawn)
    wait_for("an empty queue", lambda: not jobs_of(cluster, name))
    printed = (place / "runs" / name / "evaluations.txt").read_text()
    assert printed.count("evaluating step ") == 3 and "Submitted batch job " in printed


def test_jobs_that_fail_are_said_and_the_run_is_that_without_them(
    cluster: Cluster, place: Path, corpus: Path, losses: dict[int, Any]
) -> None:
    """They find another torch than the run does, and end before they could evaluate anything."""
    (place / "broken").mkdir()
    (place / "broken" / "torch.py").write_text("raise SystemExit(3)")
    job = f"slurm --export=ALL,PYTHONPATH={shlex.quote(str(place / 'broken'))}"
    more = ["--validation.job", job, "--run.steps", str(10**6), "--checkpoint.every", "100"]
    process = run_sh(place, words(place, corpus, "failing", *more), **cluster.environment, NPROC="1")
    log = place / "runs" / "failing" / "log.txt"
    said = r"the evaluation beside the run ended with exit code \d+; .*/evaluations.txt says more\n"
    wait_for("two failed jobs", lambda: log.exists() and len(re.findall(said, log.read_text())) > 1)
    before = len(rows(place, "failing", lambda row: "loss" in row))
    wait_for("a step", lambda: len(rows(place, "failing", lambda row: "loss" in row)) > before)
    process.terminate()
    _, err = process.communicate()
    assert process.returncode == PREEMPTED and err.startswith("launch: SIGTERM: ")
    assert "; by hand: python " in log.read_text() and not evaluated(place, "failing")
    expected = [row["loss"] for row in rows(place, "inside", lambda row: "loss" in row)]
    assert [row["loss"] for row in rows(place, "failing", lambda row: "loss" in row)][:12] == expected
    cluster.do("scancel", f"--name=evaluate-{place}/runs/failing")
    wait_for("an empty queue", lambda: not jobs_of(cluster, "failing"))


def test_rows_come_back_while_the_run_goes_on_as_a_job_of_its_own(cluster: Cluster, place: Path, corpus: Path) -> None:
    name, steps = "as a job", str(10**6)
    more = ["--run.steps", steps, "--checkpoint.every", "20", "--checkpoint.keep", "1", "--validation.job", "slurm"]
    run = cluster.submit(
        ROOT / "scripts/slurm.sbatch",
        words(place, corpus, name, *more, recipe="long"),
        folder=place,
        flags=["--nodes=1"],
        variables=environment(NPROC="1"),
    )
    log = place / f"slurm-{run}.out"
    wait_for("three rows", lambda: len(evaluated(place, name)) >= 3)
    assert cluster.job(run)["JobState"] == "RUNNING", log.read_text()
    before = len(rows(place, name, lambda row: "loss" in row))
    wait_for("a step", lambda: len(rows(place, name, lambda row: "loss" in row)) > before)
    cluster.do("scontrol", "update", f"JobId={run}", "Requeue=0")
    cluster.do("scancel", "--signal=USR1", run)
    wait_for("the end", lambda: cluster.job(run)["JobState"] == "FAILED")
    for step, row in evaluated(place, name).items():
        assert step % 20 == 0 and row["stage"] == ("early" if step <= 40 else "late")
    said = (place / "runs" / name / "log.txt").read_text()
    assert all(f"step {step:>6}  beside the run: validation_loss " in said for step in [*evaluated(place, name)][:3])
    assert "NOT EVALUATED" not in said and "evaluation beside the run ended" not in said
    cluster.do("scancel", f"--name=evaluate-{place}/runs/{name}")
    wait_for("an empty queue", lambda: not jobs_of(cluster, name))
