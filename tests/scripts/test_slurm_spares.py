"""scripts/slurm.sbatch with a spare node: three nodes, of which two train, with real daemons on this machine."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import rank_of, wait_for
from tests.scripts.cluster import Cluster, Job, missing
from tests.scripts.nodes import EVERY, kill
from tests.scripts.test_slurm import without_slurm

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=3)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def worker(cluster: Cluster, node: str) -> int:
    """The process that trains on a node."""
    [found] = [process for process in cluster.processes(node) if rank_of(process) is not None]
    return found


def test_a_spare_node_takes_the_place_of_one_that_slurm_loses_and_the_job_goes_on(
    cluster: Cluster, tmp_path: Path, corpus: Path
) -> None:
    """Then a process of the spare one fails, when the lost one is no longer of the job."""
    whole = without_slurm(tmp_path, corpus, processes=2)
    flags = ["--nodes=3", "--no-kill"]
    job = Job(cluster, tmp_path, corpus, "spared", "--run.spare_nodes", "1", flags=flags)
    job.reach(EVERY + 2)
    assert "attempt 1 on node[0-1], from the beginning\n" in job.log
    cluster.lose("node1")
    try:
        wait_for("the second attempt", lambda: "attempt 2 on node[0,2], from step " in job.log)
        assert "slurm:   lost: killed, or the node failed: node1\n" in job.log
        job.reach(len(job.losses) + 2)
        stopped = [worker(cluster, "node0"), worker(cluster, "node2")]
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        wait_for("the loss", lambda: cluster.job(job.number)["NodeList"] == "node[0,2]")
        kill(stopped[1:])
        os.kill(stopped[0], signal.SIGCONT)
        assert job.finish() == ("COMPLETED", "0:0"), job.log
    finally:
        cluster.start_node("node1")
    assert "attempt 3 on node[0,2], from step " in job.log and "attempt 4 " not in job.log
    assert job.restarts == "0"
    assert job.losses == whole


def test_a_job_with_too_few_nodes_left_returns_to_the_queue(cluster: Cluster, tmp_path: Path, corpus: Path) -> None:
    wait_for("idle nodes", lambda: cluster.do("sinfo", "-h", "-o", "%t %D") == "idle 3\n")
    flags = ["--nodes=3", "--no-kill"]
    job = Job(cluster, tmp_path, corpus, "few", "--run.spare_nodes", "1", flags=flags)
    job.reach(EVERY + 2)
    cluster.lose("node1")
    cluster.lose("node2")
    try:
        wait_for("the requeue", lambda: job.state == "PENDING")
        assert "slurm: requeued; resumes from the checkpoint\n" in job.log
    finally:
        cluster.start_node("node1")
        cluster.start_node("node2")
    assert job.finish() == ("COMPLETED", "0:0"), job.log


def test_a_job_goes_on_with_fewer_nodes_where_the_recipe_allows_it(
    cluster: Cluster, tmp_path: Path, corpus: Path
) -> None:
    wait_for("idle nodes", lambda: cluster.do("sinfo", "-h", "-o", "%t %D") == "idle 3\n")
    flags = ["--nodes=3", "--no-kill"]
    fewer = ("--run.least_nodes", "2", "--batch.global_batch_size", "12")
    job = Job(cluster, tmp_path, corpus, "fewer", *fewer, flags=flags)
    job.reach(EVERY + 2)
    cluster.lose("node1")
    try:
        assert job.finish() == ("COMPLETED", "0:0"), job.log
    finally:
        cluster.start_node("node1")
    assert "attempt 1 on node[0-2], from the beginning\n" in job.log
    assert " on node[0,2], from step " in job.log
    assert job.restarts == "0"
