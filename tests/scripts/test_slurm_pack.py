"""PACK with real daemons: two nodes, each with its own disk, run from what they have unpacked."""

import json
import os
import shutil
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.cluster.pack import CHECKOUT
from tests.processes import wait_for
from tests.scripts.cluster import Cluster, Job, cannot_mount, missing
from tests.scripts.looked_at import HOOK, looked_at
from tests.scripts.nodes import EVERY, ROOT, kill, losses, reached

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.skipif(missing() is None and cannot_mount() is not None, reason="mounting is not allowed here"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("pack"), own_disks=True)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def checkout(cluster: Cluster) -> Path:
    """A copy of the checkout, with a virtual environment whose packages are those of this Python."""
    copy = cluster.folder / "checkout"
    for part in CHECKOUT:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part)
        else:
            shutil.copy2(ROOT / part, copy / part)
    venv.create(copy / "environment", symlinks=True)
    packages = next((copy / "environment" / "lib").glob("python3*/site-packages"))
    # Copying torch would take half a minute.
    (packages / "shared.pth").write_text(f"{next(path for path in sys.path if path.endswith('-packages'))}\n")
    return copy


@pytest.fixture
def disks(cluster: Cluster) -> Iterator[list[Path]]:
    """The disks of both nodes, as this process sees them; empty before and after each test."""
    both = [cluster.folder / "disk-node0", cluster.folder / "disk-node1"]
    yield both
    assert [name for disk in both for name in os.listdir(disk)] == []


def packed(cluster: Cluster, checkout: Path, corpus: Path, name: str, *words: str, **more: str) -> Job:
    """A run of the copied checkout, from the nodes' own disks."""
    variables = {"PYTHON": f"{checkout}/environment/bin/python", "PACK": f"{cluster.folder}/disk"} | more
    script = checkout / "scripts" / "slurm.sbatch"
    return Job(cluster, cluster.folder, corpus, name, "--run.steps", "8", *words, script=script, **variables)


def test_nodes_run_from_their_own_disks_also_after_a_crash(
    cluster: Cluster, checkout: Path, corpus: Path, disks: list[Path]
) -> None:
    opened = cluster.folder / "opened"
    opened.mkdir()
    (opened / "sitecustomize.py").write_text(HOOK)
    variables = {"PYTHONPATH": str(opened), "LOOKED_AT": str(opened)}
    job = packed(cluster, checkout, corpus, "own", "--run.steps", "24", **variables)
    wait_for("steps", lambda: reached(cluster.folder, "own", EVERY + 2) or job.state == "FAILED")
    kill(cluster.processes("node1"))
    assert job.finish() == ("COMPLETED", "0:0"), job.log
    assert "attempt 2 on node[0-1], from step " in job.log
    assert job.log.count("slurm: packed the ") == 2
    assert job.log.count("unpacked in ") == 1, job.log  # the second attempt finds it
    by_rank = looked_at(opened)
    assert {0, 1} <= set(by_rank)
    shared = {path for rank in (0, 1) for path in by_rank[rank] if path.startswith((f"{checkout}/", sys.base_prefix))}
    outside = {path for path in shared if "-packages" not in path}
    assert not outside, sorted(outside)[:20]
    assert sum(path.startswith(f"{cluster.folder}/disk/shardwright-job-") for path in by_rank[1]) > 1000
    recorded = json.loads((cluster.folder / "runs" / "own" / "environment.json").read_text())
    assert recorded["git_commit"] is None  # as the copy of the checkout has none
    assert not [path for path in checkout.glob(".pack/.*")]


def test_ended_job_leaves_nothing_on_the_disks(
    cluster: Cluster, checkout: Path, corpus: Path, disks: list[Path]
) -> None:
    left = disks[1] / "shardwright-job-99999"
    left.mkdir()
    os.utime(left, (0, 0))
    job = packed(cluster, checkout, corpus, "cancelled", "--run.steps", "100000")
    wait_for("steps", lambda: reached(cluster.folder, "cancelled", 2) or job.state == "FAILED")
    assert f"slurm: node1: deletes {cluster.folder}/disk/{left.name}, which an ended job has left\n" in job.log
    cluster.do("scancel", job.number)
    assert job.finish()[0] == "CANCELLED"
    wait_for("empty disks", lambda: not any(os.listdir(disk) for disk in disks))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere", "slurm: node0 node1: PACK={disk}/nowhere is not a folder there; name one on its own disk\n"),
        ("../runs", "{disk}/../runs is one folder on several nodes; name one on each node's own disk\n"),
    ],
    ids=["missing", "shared"],
)
def test_wrong_folder_is_refused_on_all_nodes_with_the_reason(
    cluster: Cluster, checkout: Path, corpus: Path, disks: list[Path], place: str, message: str
) -> None:
    (cluster.folder / "runs").mkdir(exist_ok=True)
    disk = cluster.folder / "disk"
    job = packed(cluster, checkout, corpus, "wrong", PACK=str(disk / place))
    assert job.finish() == ("FAILED", "2:0"), job.log
    assert message.format(disk=disk) in job.log
    assert not losses(cluster.folder, "wrong")
    for left in (cluster.folder / "runs").glob("shardwright-job-*"):
        shutil.rmtree(left)
