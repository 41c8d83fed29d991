"""Several nodes without a scheduler: one launcher per node, all on this machine."""

import os
import re
import signal
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipes.files.exit_codes import PREEMPTED, is_there
from tests.commands import Command, rank_of_fork
from tests.processes import descendants, free_ports, wait_for
from tests.scripts import network
from tests.scripts.network import DEVICE, Network
from tests.scripts.nodes import EVERY, STEPS, arguments, kill, launch, losses, reached, run_sh

pytestmark = pytest.mark.slow

Node = subprocess.Popen[str] | Command


def run(folder: Path, words: list[str], **variables: str) -> tuple[int, str, str]:
    """A run, in forks."""
    out, err = (process := launch(folder, words, **variables)).communicate()
    return process.wait(), out, err


def ends(nodes: list[Node]) -> list[tuple[str, str]]:
    """Standard output and standard error of each launcher."""
    try:
        return [process.communicate() for process in nodes]
    finally:
        for process in nodes:
            process.kill()


def free_port() -> str:
    return str(free_ports(1)[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[tuple[int, float]]:
    """The losses of two processes on one node."""
    folder = tmp_path_factory.mktemp("whole")
    code, _, err = run(folder, arguments(folder, corpus, "one"), NPROC="2")
    assert (code, err) == (0, "")
    found = losses(folder, "one")
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    return found


@dataclass(frozen=True)
class PerNode:
    """A run of 20 steps on two nodes with mesh.shard = "node", and all steps with the same mesh on one node."""

    folder: Path
    words: list[str]
    """Arguments of both nodes, without the number of steps."""
    codes: list[int]
    outputs: list[tuple[str, str]]
    losses: list[tuple[int, float]]
    one_node_output: str
    one_node_losses: list[tuple[int, float]]


@pytest.fixture(scope="module")
def per_node(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> PerNode:
    """Node 0 finds itself in a host file, node 1 gets its number."""
    folder = tmp_path_factory.mktemp("per-node")
    explicit = ("--mesh.replicate", "2", "--mesh.shard", "2")
    code, one_node_output, err = run(folder, arguments(folder, corpus, "one", *explicit), NPROC="4")
    assert (code, err) == (0, "")
    hosts = folder / "hosts"
    hosts.write_text("# the first node\n127.0.0.1 slots=2\n\nlocalhost\n")
    words, port = arguments(folder, corpus, "two", "--mesh.shard", "node"), free_port()
    short = [*words, "--run.steps", "20"]
    nodes = [  # a real start of both
        run_sh(folder, short, NPROC="2", HOSTFILE=str(hosts), MASTER_PORT=port),
        run_sh(folder, short, NPROC="2", NODE_RANK="1", NNODES="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
    ]
    outputs = ends(nodes)
    codes = [process.returncode for process in nodes]
    return PerNode(folder, words, codes, outputs, losses(folder, "two"), one_node_output, losses(folder, "one"))


def test_only_rank_0_of_two_nodes_prints_anything(per_node: PerNode) -> None:
    (out, err), (other_out, other_err) = per_node.outputs
    assert per_node.codes == [0, 0], err + other_err
    assert (err, other_out, other_err) == ("", "", "")
    assert "= 4 processes on cpu" in out


def test_preflight_lists_the_nodes_and_their_ranks(per_node: PerNode) -> None:
    host, out = socket.gethostname(), per_node.outputs[0][0]
    assert out.startswith("pre-flight: 4 processes on 2 nodes agree: cpu, ")
    assert f"\n  {host}#0  0-1 " in out and f"\n  {host}#1  2-3 " in out


def test_shard_node_keeps_each_shard_group_inside_one_node(per_node: PerNode) -> None:
    host, out = socket.gethostname(), per_node.outputs[0][0]
    assert "  mesh: replicate 2 x shard 2 = 4 processes on cpu\n" in out
    assert f"  nodes: 2 of 2 processes ({host}#0, {host}#1); each shard group is inside one node\n" in out
    assert 'shard = "node"\n' in (per_node.folder / "runs" / "two" / "recipe.toml").read_text()


def test_two_nodes_train_like_the_same_mesh_on_one_node(per_node: PerNode) -> None:
    assert len(per_node.losses) == 20
    assert per_node.losses == per_node.one_node_losses[:20]


def test_a_single_node_has_no_line_about_nodes(per_node: PerNode) -> None:
    assert "\n  nodes: " not in per_node.one_node_output
    assert per_node.one_node_output.startswith("pre-flight: 4 processes on 1 node agree; all-reduce ")


def test_a_run_on_two_nodes_resumes_on_one_with_another_mesh(per_node: PerNode) -> None:
    code, out, err = run(per_node.folder, per_node.words, NPROC="2")
    assert (code, err) == (0, "")
    assert "  mesh: replicate 1 x shard 2 = 2 processes on cpu\n" in out
    assert [step for step, _ in losses(per_node.folder, "two")] == list(range(1, STEPS + 1))


class Nodes:
    """A run on two nodes, which can be started again. Each has one process, where the test is not about its node's."""

    def __init__(
        self, folder: Path, corpus: Path, *overrides: str, network: Network | None = None, **variables: str
    ) -> None:
        """network: its hosts are the nodes; None = both are this machine."""
        self.folder, self.words, self.network = folder, arguments(folder, corpus, "two", *overrides), network
        self.variables = {"NPROC": "1", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        self.variables |= variables
        if network:
            self.variables |= {"MASTER_ADDR": network.address(0), "GLOO_SOCKET_IFNAME": DEVICE}
        self.nodes = [self.start(0), self.start(1)]

    def start(self, rank: int) -> Command:
        network = self.network.namespace(rank) if self.network else None
        return launch(self.folder, self.words, network=network, NODE_RANK=str(rank), **self.variables)

    @property
    def losses(self) -> list[tuple[int, float]]:
        return losses(self.folder, "two")

    def reach(self, step: int) -> None:
        def is_there() -> bool:
            assert self.nodes[0].poll() is None, ends(self.nodes)
            return reached(self.folder, "two", step)

        wait_for(f"step {step}", is_there)

    def worker(self, rank: int) -> int:
        """The process of this rank, as soon as it exists."""
        found: list[int] = []

        def is_there() -> bool:
            for process in (process for node in self.nodes for process in descendants(node.pid)):
                with suppress(OSError):  # it has ended meanwhile
                    if rank_of_fork(process) == rank:
                        found.append(process)
            return bool(found)

        wait_for(f"rank {rank}", is_there)
        return found[0]

    def launcher(self, node: int) -> int:
        """The process that started the workers of this node, under its supervisor."""
        return parent_of(self.worker(node))


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_signal_to_one_node_stops_all_and_loses_no_step(
    tmp_path: Path, corpus: Path, whole: list[tuple[int, float]]
) -> None:
    """Also with RESTARTS: whoever sent the signal wants the machine."""
    job = Nodes(tmp_path, corpus, RESTARTS="2")
    job.reach(EVERY + 2)
    job.nodes[1].terminate()
    (out, err), (other_out, other_err) = ends(job.nodes)
    assert [node.returncode for node in job.nodes] == [PREEMPTED, PREEMPTED], err + other_err
    assert "SIGTERM: interrupted after step " in out and (err, other_out) == ("", "")
    assert other_err == (
        "launch: SIGTERM: the workers finish their step and save it, or end at once if none has begun;"
        " a second one ends them at once\n"
    )
    before = len(job.losses)
    assert before < STEPS
    job.nodes = [job.start(0), job.start(1)]
    (out, err), (_, other_err) = ends(job.nodes)
    assert [node.returncode for node in job.nodes] == [0, 0], err + other_err
    assert f"resumed from {tmp_path}/runs/two/checkpoints/step-{before:08}\n" in out
    assert job.losses == whole


def test_a_signal_before_the_first_step_ends_all_nodes(tmp_path: Path, corpus: Path) -> None:
    job = Nodes(tmp_path, corpus, RESTARTS="2")
    job.worker(1)
    job.nodes[1].terminate()
    (out, err), (_, other_err) = ends(job.nodes)
    assert [node.returncode for node in job.nodes] == [143, 143], err + other_err
    assert "step " not in out and "launch: node 1 ended with exit code 143\n" in err


def test_nodes_restart_after_a_lost_node_a_frozen_process_and_a_killed_launcher(
    tmp_path: Path, corpus: Path, whole: list[tuple[int, float]]
) -> None:
    """Three failures in one run. The lost node is started again from outside."""
    job = Nodes(tmp_path, corpus, "--run.hang_timeout", "5", RESTARTS="3")
    job.reach(EVERY + 2)
    lost = job.nodes[1]
    kill([lost.pid, *descendants(lost.pid)])
    job.nodes[1] = job.start(1)
    lost.communicate()
    job.reach(2 * EVERY + 2)
    os.kill(job.worker(1), signal.SIGSTOP)
    job.reach(4 * EVERY + 2)
    os.kill(job.launcher(1), signal.SIGKILL)
    (out, err), (_, other_err) = ends(job.nodes)
    assert [node.returncode for node in job.nodes] == [0, 0], err + other_err
    assert "supervise: attempt 1 crashed, exit code " in err and "supervise: attempt 2 crashed, exit code 77; " in err
    assert f"  rank 1 on {socket.gethostname()}#1: last seen in phase " in err
    assert "launch: HUNG: workers of this node were frozen" in other_err
    assert out.count("\nresumed from ") == 3
    assert job.losses == whole


@pytest.mark.skipif(network.missing() is not None, reason=str(network.missing()))
def test_a_node_that_is_disconnected_is_waited_for(
    tmp_path: Path, corpus: Path, whole: list[tuple[int, float]]
) -> None:
    """Connections stay open and nothing arrives, as when a node loses power."""
    hosts = Network(2)
    try:
        job = Nodes(tmp_path, corpus, "--run.node_timeout", "4", network=hosts, RESTARTS="2")
        job.reach(EVERY + 2)
        first = job.worker(0)
        hosts.disconnect(1)
        wait_for("the end of rank 0", lambda: not is_there(first))
        hosts.reconnect(1)
        (out, err), (_, other_err) = ends(job.nodes)
    finally:
        hosts.close()
    assert [node.returncode for node in job.nodes] == [0, 0], err + other_err
    assert re.search(r"launch: node 1 on \S+ is lost: silent for more than 4 s\n", err), err
    assert "supervise: attempt 1 crashed, exit code 1; newest checkpoint: step " in err and "attempt 2 " not in err
    assert out.count("\nresumed from ") == 1
    assert job.losses == whole


def test_a_process_that_cannot_start_ends_the_other_nodes(tmp_path: Path, corpus: Path) -> None:
    """They would wait for it, and a restart would not help."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if 'RANK' in os.environ and sys.argv[0].endswith('train.py'):\n"
        "    os._exit(2) if os.environ['RANK'] == '1' else time.sleep(600)"
    )
    words, variables = arguments(tmp_path, corpus, "two"), {"NPROC": "1", "RESTARTS": "2", "PYTHONPATH": str(broken)}
    variables |= {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    nodes = [run_sh(tmp_path, words, NODE_RANK=rank, **variables) for rank in ("0", "1")]
    (_, err), (_, other_err) = ends(nodes)
    assert [node.returncode for node in nodes] == [2, 2], err + other_err
    assert err == "launch: node 1 ended with exit code 2\n"


def checked(folder: Path, words: list[str], **variables: str) -> tuple[int, str, str]:
    """What scripts/run.sh says before it starts a launcher."""
    out, err = (process := run_sh(folder, words, **variables)).communicate()
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NNODES": "2"}, "NNODES=2: set NODE_RANK (0 to NNODES - 1) and MASTER_ADDR"),
        (
            {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"},
            "NODE_RANK=2: must be a number from 0 to 1, as NNODES=2",
        ),
        ({"NNODES": "none"}, "NNODES=none: must be a number of nodes"),
        ({"HOSTFILE": "no-such-file"}, "no-such-file"),
        ({"HOSTFILE": "empty"}, "HOSTFILE=empty does not name a node"),
        ({"HOSTFILE": "others"}, "HOSTFILE=others names this.invalid that.invalid but not this node: localhost"),
    ],
)
def test_inconsistent_variables_of_nodes_are_refused(
    variables: dict[str, str], message: str, tmp_path: Path, corpus: Path
) -> None:
    (tmp_path / "empty").write_text("# no name\n")
    (tmp_path / "others").write_text("this.invalid\nthat.invalid\n")
    code, out, err = checked(tmp_path, arguments(tmp_path, corpus, "none"), NPROC="2", **variables)
    assert (code, out) == (2, "")
    assert message in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("variables", [{}, {"NPROC": "4", "NNODES": "2"}], ids=str)
def test_check_accepts_a_recipe_that_fits(variables: dict[str, str], tmp_path: Path, corpus: Path) -> None:
    """For any number of processes if none is given."""
    assert checked(tmp_path, [*arguments(tmp_path, corpus, "none"), "--check"], **variables)[0] == 0


def test_check_refuses_a_batch_that_does_not_fit_the_processes_of_all_nodes(tmp_path: Path, corpus: Path) -> None:
    code, out, err = checked(tmp_path, [*arguments(tmp_path, corpus, "none"), "--check"], NPROC="4", NNODES="3")
    assert (code, out) == (2, "")
    assert re.search(r"multiple of\s+micro_batch_size 1 x 12 data-parallel\s+processes", err)
