"""Spare nodes: two nodes that train and one that waits, with real launchers, all on this machine."""

import os
import re
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.files.exit_codes import PREEMPTED
from tests.commands import Command
from tests.processes import descendants, wait_for
from tests.scripts import test_memory as in_memory
from tests.scripts.nodes import EVERY, STEPS, arguments, kill, launch, losses
from tests.scripts.test_nodes import Nodes, checked, ends

pytestmark = pytest.mark.slow

WAITS = "launch: waits as a spare node\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[tuple[int, float]]:
    """The losses of two processes on one node."""
    folder = tmp_path_factory.mktemp("whole")
    _, err = (run := launch(folder, arguments(folder, corpus, "one"), NPROC="2")).communicate()
    assert (run.wait(), err) == (0, "")
    return losses(folder, "one")


def spared(folder: Path, corpus: Path, *overrides: str) -> Nodes:
    """A run on two of three nodes, of which the last one waits."""
    job = Nodes(folder, corpus, "--run.spare_nodes", "1", *overrides, NNODES="3", RESTARTS="3")
    job.nodes.append(job.start(2))
    until(job.nodes[2], WAITS)
    return job


def until(node: Command, line: str) -> str:
    """What a node says up to the line that ends in this."""
    said = ""
    while not said.endswith(line):
        more = node.stderr.readline()
        assert more, f"it has ended without {line!r}: {said}"
        said += more
    return said


def lose(node: Command) -> None:
    """Kill all processes of a node, as when it loses power."""
    kill([node.pid, *descendants(node.pid)])
    node.communicate()


def while_it_stands(job: Nodes, act: Callable[[], None]) -> None:
    """Act while the processes that train are stopped, which is too short for a hang."""
    workers = [job.worker(0), job.worker(1)]
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    act()
    for worker in workers:
        os.kill(worker, signal.SIGCONT)


def test_a_spare_node_takes_the_place_of_a_lost_one_which_comes_back_as_the_spare(
    tmp_path: Path, corpus: Path, whole: list[tuple[int, float]]
) -> None:
    job = spared(tmp_path, corpus)
    job.reach(EVERY + 2)
    lose(job.nodes[1])
    said = until(job.nodes[2], "launch: takes the place of node 1, which has not come\n")
    assert "supervise: attempt 1 crashed, exit code 1; newest checkpoint: step " in said
    job.nodes.pop(1)
    job.reach(2 * EVERY + 2)

    def come_back() -> None:
        job.nodes.append(job.start(1))
        until(job.nodes[2], WAITS)

    while_it_stands(job, come_back)
    (out, err), *others = ends(job.nodes)
    assert [node.returncode for node in job.nodes] == [0, 0, 0], err + str(others)
    assert f"launch: node 1 on {socket.gethostname()} is lost: its launcher has ended without a word\n" in err
    assert [err for _, err in others] == ["", ""]
    assert out.count("\nresumed from ") == 1
    assert job.losses == whole


def test_the_loss_of_a_spare_node_does_not_end_the_run_and_it_may_come_back(
    tmp_path: Path, corpus: Path, whole: list[tuple[int, float]]
) -> None:
    job = spared(tmp_path, corpus)
    job.reach(EVERY + 2)

    def go_and_come_back() -> None:
        lose(job.nodes[2])
        how = "its launcher has ended without a word; it was a spare node, and the run goes on"
        until(job.nodes[0], f"launch: node 2 on {socket.gethostname()} is lost: {how}\n")
        job.nodes[2] = job.start(2)
        until(job.nodes[2], WAITS)

    while_it_stands(job, go_and_come_back)
    (out, err), *others = ends(job.nodes)
    assert [node.returncode for node in job.nodes] == [0, 0, 0], err + str(others)
    assert [err, *(err for _, err in others)] == ["", "", ""]
    assert "resumed from" not in out
    assert job.losses == whole


def test_a_frozen_spare_node_ends_nothing_and_waits_again(tmp_path: Path, corpus: Path) -> None:
    job = spared(tmp_path, corpus, "--run.node_timeout", "4")
    job.reach(EVERY + 2)
    launcher = descendants(job.nodes[2].pid)[0]

    def freeze() -> None:
        os.kill(launcher, signal.SIGSTOP)
        until(job.nodes[0], "silent for more than 4 s; it was a spare node, and the run goes on\n")
        os.kill(launcher, signal.SIGCONT)
        until(job.nodes[2], WAITS)

    while_it_stands(job, freeze)
    (out, err), *others = ends(job.nodes)
    assert [node.returncode for node in job.nodes] == [0, 0, 0], err + str(others)
    assert "resumed from" not in out


def test_a_signal_to_a_spare_node_ends_it_and_one_to_another_node_ends_all(tmp_path: Path, corpus: Path) -> None:
    job = spared(tmp_path, corpus)
    job.reach(EVERY + 2)

    def leave_and_come_back() -> None:
        job.nodes[2].terminate()
        assert job.nodes[2].wait() == 143
        job.nodes[2] = job.start(2)
        until(job.nodes[2], WAITS)

    while_it_stands(job, leave_and_come_back)
    job.nodes[1].terminate()
    (out, _), *_ = outputs = ends(job.nodes)
    assert [node.returncode for node in job.nodes] == [PREEMPTED] * 3, outputs
    assert "SIGTERM: interrupted after step " in out and len(job.losses) < STEPS


def test_a_single_node_may_train_while_the_other_waits_and_a_recipe_is_proved_by_it(
    tmp_path: Path, corpus: Path
) -> None:
    job = Nodes(tmp_path, corpus, "--run.spare_nodes", "1", "--run.prove_first", "true", RESTARTS="1")
    (out, err), (other_out, other_err) = ends(job.nodes)
    assert [node.returncode for node in job.nodes] == [0, 0], err + other_err
    assert "PROVED in " in out and f"done: {STEPS} steps" in out
    assert other_out == "" and other_err.count(WAITS) == 2


def test_fewer_nodes_go_on_from_memory_where_a_lost_one_stays_away_and_all_start_again_when_it_comes(
    tmp_path: Path, corpus: Path
) -> None:
    replicas = ("--mesh.replicate", "-1", "--mesh.shard", "1", "--batch.global_batch_size", "12")
    (expected := launch(tmp_path, arguments(tmp_path, corpus, "one", *replicas), NPROC="2")).communicate()
    least = ("--run.least_nodes", "2", *replicas, *in_memory.words(tmp_path))
    job = Nodes(tmp_path, corpus, *least, NNODES="3", RESTARTS="5")
    job.nodes.append(job.start(2))
    wait_for("copies after the checkpoint", lambda: in_memory.in_memory(tmp_path) > in_memory.ON_DISK)
    lose(job.nodes.pop())
    for path in (tmp_path / "memory").glob("*/*/*#2"):
        shutil.rmtree(path)
    until(job.nodes[0], "launch: trains with 2 nodes, without node 2 of 3\n")
    reached = len(job.losses)
    wait_for("more steps", lambda: len(job.losses) > reached)
    while_it_stands(job, lambda: job.nodes.append(job.start(2)) or until(job.nodes[2], WAITS))
    (out, err), *others = ends(job.nodes)
    assert [node.returncode for node in job.nodes] == [0, 0, 0], err + str(others)
    assert "launch: node 2 has come: all start again with it\n" in err
    assert re.findall("  mesh: replicate (.)", out) == ["3", "2", "3"]
    assert len(re.findall(r"\nbegins from the memory of the nodes: step (\d+); ", out)) == 2 and "\nresumed" not in out
    assert expected.wait() == 0
    assert [loss for _, loss in job.losses] == pytest.approx([x for _, x in losses(tmp_path, "one")], rel=1e-4)


def test_spare_nodes_do_not_count_when_a_recipe_is_checked(tmp_path: Path, corpus: Path) -> None:
    words = [*arguments(tmp_path, corpus, "none"), "--check"]
    code, out, err = checked(tmp_path, [*words, "--run.spare_nodes", "1"], NPROC="4", NNODES="3")
    assert code == 0, err
    assert "# on 8 processes: " in out
    code, _, err = checked(tmp_path, [*words, "--run.spare_nodes", "3"], NPROC="4", NNODES="3")
    assert code == 2
    assert "run.spare_nodes = 3: must be fewer than the 3 nodes; start more, or write less\n" in err


@pytest.mark.parametrize(
    ("least", "message"),
    [("4", "run.least_nodes = 4: more than the 2 nodes that train; write 2 or fewer\n"),
     ("1", "run.least_nodes = 1: 4 processes on so few nodes cannot train the recipe; write more, or mend this:\n")],
)  # fmt: skip
def test_fewer_nodes_must_fit_the_recipe(least: str, message: str, tmp_path: Path, corpus: Path) -> None:
    words = [*arguments(tmp_path, corpus, "none"), "--mesh.replicate", "1", "--mesh.shard", "8", "--check"]
    code, _, err = checked(tmp_path, [*words, "--run.least_nodes", least], NPROC="4", NNODES="2")
    assert code == 2
    assert message in err


def test_spare_nodes_without_restarts_or_other_nodes_are_refused(tmp_path: Path, corpus: Path) -> None:
    words = arguments(tmp_path, corpus, "none", "--run.spare_nodes", "1")
    code, _, err = checked(tmp_path, words, NPROC="2", RESTARTS="1")
    assert code == 2
    assert "run.spare_nodes: needs several nodes; to start on one, write --run.spare_nodes 0\n" in err
    network = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NNODES": "2", "NODE_RANK": "0"}
    code, _, err = checked(tmp_path, words, NPROC="2", **network)
    assert code == 2
    assert "run.spare_nodes: needs RESTARTS=10, or so, on all nodes; or write --run.spare_nodes 0\n" in err
