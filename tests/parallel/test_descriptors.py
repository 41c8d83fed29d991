"""The limit on open files of real processes."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.dist import start, stop
from parallel.errors import UserError
from parallel.messages import children_of
from parallel.nodes import TREE, needed
from tests.processes import PATIENCE, run_processes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def limit_after_start(soft: int, hard: int) -> tuple[int, int] | str:
    """The limits of a process that started with these, or the error."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        start("cpu", seed=0)
    except UserError as error:
        return str(error)
    stop()
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_a_low_soft_limit_is_raised_before_processes_connect() -> None:
    assert run_processes(2, limit_after_start, 24, 1000) == [(1000, 1000)] * 2


def test_a_hard_limit_that_is_too_low_is_refused_on_all_processes_before_they_connect() -> None:
    expected = "each of 2 processes needs about 101 open files and connections, and this node allows 80"
    for answer in run_processes(2, limit_after_start, 40, 80):
        assert answer.startswith(expected) and "LimitNOFILE=202 in the systemd unit" in answer


def test_one_process_is_not_refused() -> None:
    assert run_processes(1, limit_after_start, 24, 100) == [(100, 100)]


@pytest.mark.parametrize(("processes", "expected"), [(2, 101), (32, 140), (384, 156), (16_384, 176)])
def test_the_need_stays_below_256_at_any_size(processes: int, expected: int) -> None:
    assert needed(processes) == expected


def test_the_tree_has_no_more_neighbours_than_counted() -> None:
    size = 16_384
    assert max(len(children_of(rank, size)) + (rank > 0) for rank in range(size)) <= TREE


def test_a_run_with_too_low_a_hard_limit_ends_with_one_message(tmp_path: Path) -> None:
    """Processes with 60 open files each hung in silence."""
    launch = [sys.executable, str(ROOT / "scripts/launch.py"), "--standalone", "--nproc-per-node=2"]
    command = [*launch, str(ROOT / "train.py"), str(ROOT / "configs/smollm3_debug.toml"), "--run.device", "cpu"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 60; exec "$@"', "-", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("each of 2 processes needs about") == 1 and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_limit_too_low_for_the_store_is_refused_by_its_launcher(tmp_path: Path) -> None:
    launch = [sys.executable, str(ROOT / "scripts/launch.py"), "--standalone", "--nproc-per-node=100"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 200; exec "$@"', "-", *launch, str(ROOT / "train.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    expected = "launch: the launcher of node 0, which serves 100 processes, needs about 234 open files and connections,"
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(expected), done.stderr
