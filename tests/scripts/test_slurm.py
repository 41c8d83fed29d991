"""scripts/slurm.sbatch and prepare.sbatch with real daemons: two nodes of two processes each, all on this machine."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.processes import rank_of, untimed, wait_for
from tests.recipes.data.texts import write_rows
from tests.recipes.data.tokens.test_parts import everything
from tests.recipes.training.test_full_disk import fill
from tests.scripts.cluster import Cluster, Job, missing
from tests.scripts.nodes import EVERY, ROOT, STEPS, arguments, environment, kill, launch, losses

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
SEEN = EVERY + 2
"""Steps to wait for before a fault: one checkpoint exists, and some steps follow it."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Jobs are submitted from here, and their runs are written here."""
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def whole(folder: Path, corpus: Path) -> list[tuple[int, float]]:
    """The losses of two processes on one node, without SLURM."""
    return without_slurm(folder, corpus, processes=2)


def without_slurm(folder: Path, corpus: Path, *, processes: int) -> list[tuple[int, float]]:
    name = f"whole-{processes}"
    _, err = (run := launch(folder, arguments(folder, corpus, name), NPROC=str(processes))).communicate()
    assert (run.wait(), err) == (0, "")
    found = losses(folder, name)
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    return found


def test_two_nodes_train_like_one(cluster: Cluster, folder: Path, corpus: Path) -> None:
    whole = without_slurm(folder, corpus, processes=4)
    job = Job(cluster, folder, corpus, "two", NPROC="2")
    assert job.finish() == ("COMPLETED", "0:0"), job.log
    assert "attempt 1 on node[0-1], from the beginning\n" in job.log
    assert "= 4 processes on cpu" in job.log
    assert "  nodes: 2 of 2 processes (node0, node1); each shard group spans 2 nodes\n" in job.log
    assert f"done: {STEPS} steps" in job.log
    assert job.losses == whole
    logs = folder / f"slurm-{job.number}"
    assert f"done: {STEPS} steps" in (logs / "node0.log").read_text()
    assert (logs / "node1.log").read_text() == ""


def test_a_preempted_job_resumes_by_itself_and_a_cancelled_one_does_not_but_no_step_is_lost(
    cluster: Cluster, folder: Path, corpus: Path, whole: list[tuple[int, float]]
) -> None:
    """First the signal before the time limit, then SLURM takes the nodes, then the job is cancelled."""
    job = Job(cluster, folder, corpus, "preempted", "--run.prove_first", "true")
    job.reach(SEEN)
    cluster.do("scancel", "--signal=USR1", job.number)
    wait_for("the first requeue", lambda: job.restarts == "1")
    first = saved(job.log)
    assert first, job.log
    assert f"attempt 1 preempted; newest checkpoint: step {first[0]}\n" in job.log
    job.reach(first[0] + 2)
    cluster.do("scontrol", "requeue", job.number)
    wait_for("the second requeue", lambda: job.restarts == "2")
    wait_for("the third attempt", lambda: "attempt 3 " in job.log)
    [_, second] = saved(job.log)
    job.reach(second + 2)
    cluster.do("scancel", job.number)
    assert job.finish()[0] == "CANCELLED", job.log
    wait_for("no process of the job", lambda: not cluster.processes("node0") and not cluster.processes("node1"))
    [first, second, third] = saved(job.log)
    assert "ended by SLURM, which cancels the job or requeues it\n" in job.log
    assert f"attempt 2 on node[0-1], from step {first}\n" in job.log
    assert f"attempt 3 on node[0-1], from step {second}\n" in job.log and "attempt 4" not in job.log
    assert job.restarts == "2"
    assert job.log.count("launch: run.prove_first: ") == job.log.count("PROVED in ") == 1
    assert job.losses == whole[:third]


def test_a_job_can_be_stopped_with_a_save_and_without_a_requeue(cluster: Cluster, folder: Path, corpus: Path) -> None:
    """By the commands of docs/cluster.md."""
    job = Job(cluster, folder, corpus, "stopped")
    job.reach(SEEN)
    cluster.do("scontrol", "update", f"JobId={job.number}", "Requeue=0")
    cluster.do("scancel", "--signal=USR1", job.number)
    assert job.finish() == ("FAILED", "75:0"), job.log
    assert saved(job.log) and "slurm: not requeued (" in job.log
    assert job.restarts == "0"


def saved(log: str) -> list[int]:
    """Steps after which the run says that it was interrupted and saved."""
    lines = [line for line in log.splitlines() if ": interrupted after step " in line]
    assert all(line.endswith("; the same command resumes from there") for line in lines)
    return [int(line.split()[4].rstrip(";")) for line in lines]


def test_a_job_restarts_on_its_nodes_after_a_process_is_frozen_and_all_of_a_node_are_killed(
    cluster: Cluster, folder: Path, corpus: Path, whole: list[tuple[int, float]]
) -> None:
    """It begins from the memory of the nodes, as the disk has nothing."""
    memory = ("--checkpoint.memory_every", "2", "--checkpoint.memory_folder", str(folder), "--checkpoint.every", "1000")
    job = Job(cluster, folder, corpus, "lost", "--run.hang_timeout", "5", *memory)
    job.reach(SEEN)
    [worker] = [process for process in cluster.processes("node1") if rank_of(process) is not None]
    os.kill(worker, signal.SIGSTOP)
    wait_for("the restart", lambda: "attempt 2 on node[0-1], from step " in job.log)
    assert "HUNG: no progress for " in job.log and "  rank 1 on node1: last seen in phase " in job.log
    assert "slurm: attempt 1 crashed; newest checkpoint: step " in job.log
    assert "slurm:   exit code 77: node" in job.log
    job.reach(len(job.losses) + 2 * EVERY)
    killed = cluster.processes("node1")
    assert len(killed) >= 3  # the task of srun, the launcher and a worker
    kill(killed)
    assert job.finish() == ("COMPLETED", "0:0"), job.log
    assert job.restarts == "0"  # on the nodes it had
    assert "slurm: attempt 2 crashed; newest checkpoint: step " in job.log
    assert "slurm:   lost: killed, or the node failed: node1\n" in job.log
    assert "attempt 3 on node[0-1], from step " in job.log and "attempt 4 " not in job.log
    assert job.log.count("begins from the memory of the nodes: step ") == 2 and "on the disk is step 0" in job.log
    assert job.losses == whole


def test_a_job_whose_logs_are_on_a_full_disk_restarts_and_ends_as_with_logs(
    cluster: Cluster, folder: Path, corpus: Path, whole: list[tuple[int, float]]
) -> None:
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not allowed here: {mounted.stderr.strip()}")
    try:
        fill(disk)
        job = Job(cluster, folder, corpus, "full", below=disk)
        job.reach(SEEN)
        killed = [process for process in cluster.processes("node1") if rank_of(process) is not None]
        os.kill(killed[0], signal.SIGKILL)
        assert (*job.finish(), job.restarts) == ("COMPLETED", "0:0", "0")
        assert untimed((folder / "runs" / "full" / "log.txt").read_text()).count("\nresumed from ") == 1
        assert job.losses == whole
        assert {path.stat().st_size for path in disk.glob("slurm-*/*")} == {0}
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_job_whose_node_does_not_answer_waits_in_the_queue(
    cluster: Cluster, folder: Path, corpus: Path, whole: list[tuple[int, float]]
) -> None:
    job = Job(cluster, folder, corpus, "gone")
    job.reach(SEEN)
    cluster.lose("node1")
    try:
        wait_for("the requeue", lambda: job.state == "PENDING")
        assert job.restarts == "1"
    finally:
        cluster.start_node("node1")
    assert job.finish() == ("COMPLETED", "0:0"), job.log
    assert "attempt 2 on node[0-1], from step " in job.log
    assert job.losses == whole


def test_a_crash_loop_stops_the_job_with_the_reason(cluster: Cluster, folder: Path, corpus: Path) -> None:
    """Workers crash at once, although the recipe is valid."""
    (folder / "broken").mkdir()
    (folder / "broken" / "torch.py").write_text("raise SystemExit(3)")
    job = Job(cluster, folder, corpus, "loop", PYTHONPATH=str(folder / "broken"))
    assert job.finish() == ("FAILED", "3:0")
    assert "slurm:   exit code 3: node" in job.log and "attempt 3 " in job.log and "attempt 4 " not in job.log
    assert "stopped: two restarts got no further than step 0 (a crash loop, or " in job.log.splitlines()[-1]


def test_a_bad_recipe_is_refused_before_anything_starts(cluster: Cluster, folder: Path, corpus: Path) -> None:
    job = Job(cluster, folder, corpus, "bad", "--batch.global_batch_size", "6", NPROC="2")
    assert job.finish() == ("FAILED", "2:0")
    assert "multiple of micro_batch_size 1 x 4 data-parallel" in job.log
    assert job.log.endswith("slurm: refused: nothing was started\n")
    assert job.log.count("slurm: ") == 1
    assert job.restarts == "0"
    assert not (folder / "runs" / "bad").exists() and not (folder / f"slurm-{job.number}").exists()


def test_check_only_checks_the_recipe_for_the_allocation(cluster: Cluster, folder: Path, corpus: Path) -> None:
    """Also from a checkout below a folder with blanks."""
    (folder / "a checkout of mine").symlink_to(ROOT)
    script = folder / "a checkout of mine/scripts/slurm.sbatch"
    job = Job(cluster, folder, corpus, "dry", "--mesh.shard", "node", "--check", script=script)
    assert job.finish() == ("COMPLETED", "0:0")
    assert untimed(job.log) == "slurm: the recipe fits 2 nodes\n"
    assert not (folder / "runs" / "dry").exists()


def test_array_of_jobs_prepares_the_tokens_of_one_machine(cluster: Cluster, folder: Path) -> None:
    write_rows(folder / "rows.jsonl", 40_000)
    common = [str(folder / "rows.jsonl"), "--tokenizer", "train:300", "--cache", str(folder / "cache")]
    assert run_command("scripts/prepare_data.py", *common, folder / "whole")[0] == 0

    def submit(*words: str, flags: list[str]) -> str:
        script = ROOT / "scripts/prepare.sbatch"
        return cluster.submit(script, [*common, *words], folder=folder, flags=flags, variables=environment())

    submit(str(folder / "out"), flags=["--array=1-5"])
    wait_for("the index", lambda: (folder / "out" / "index.json").exists())
    assert everything(folder / "out") == everything(folder / "whole")
    wrong = submit(str(folder / "out"), flags=["--array=2-3"])
    wait_for("the refusal", lambda: cluster.job(wrong)["JobState"] == "FAILED")
