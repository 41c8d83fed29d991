"""Faults among many light processes on one machine, each allowed as few open files as `ulimit -n 256` leaves.

They take minutes, and not in CI: pytest -m exhaustive tests/test_scale_faults.py. SCALE_NODES=3 takes 3 nodes, not 8.
"""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipes.files.exit_codes import HUNG
from tests.scale.nodes import LIMIT, Nodes
from tests.scale.proxy import slow_proxy

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc"),
    pytest.mark.exhaustive,
]
HOST = socket.gethostname()
FROZEN = 19
TIMEOUT = 12
"""Seconds without progress. A step of 32 processes takes about one on two cores."""
NODES, EACH = int(os.environ.get("SCALE_NODES", "8")), 8
SLOW = (NODES // 2) * EACH + 5


@contextmanager
def running(*words: object, **options: object) -> Iterator[Nodes]:
    nodes = Nodes(*words, **options)  # type: ignore[arg-type]
    try:
        yield nodes
    finally:
        nodes.kill()


def goes_on(steps: list[int], last: int) -> bool:
    """Whether every step is there once."""
    return steps == list(range(1, last + 1))


@dataclass(frozen=True)
class Hung:
    """A run of 32 processes on 2 nodes with a frozen one, and the same run resumed by 8 on one node."""

    codes: list[int]
    seconds: float
    """From the freeze to the end of all launchers."""
    errors: str
    open_files: int
    """Of the worker with most."""
    left: list[int]
    """Processes that outlived the first run."""
    resumed_codes: list[int]
    resumed_output: str
    resumed_errors: str
    steps: list[int]


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Hung:
    folder, words = tmp_path_factory.mktemp("hung"), ("--run.hang_timeout", str(TIMEOUT))
    with running(folder, corpus, *words, "--run.steps", "100000", count=2, each=16) as nodes:
        nodes.reach(4)
        nodes.wait_for(lambda: "  saved " in nodes.said(0, "out"), "a save")
        workers = {rank: process for node in range(2) for rank, process in nodes.workers(node).items()}
        open_files = max(len(os.listdir(f"/proc/{process}/fd")) for process in workers.values())
        os.kill(workers[FROZEN], signal.SIGSTOP)
        began = time.monotonic()
        codes = nodes.end()
        seconds = time.monotonic() - began
        errors = "".join(nodes.said(node) for node in range(2))
        left = [process for process in workers.values() if Path(f"/proc/{process}/task").exists()]
        last = nodes.steps[-1] + 3
    for stream in ("out", "err"):
        (folder / f"{stream}-0").write_text("")
    size = ("--batch.global_batch_size", "32", "--run.steps", str(last))
    with running(folder, corpus, *size, count=1, each=8) as nodes:
        again = nodes.end()
        return Hung(codes, seconds, errors, open_files, left, again, nodes.said(0, "out"), nodes.said(), nodes.steps)


def test_one_frozen_process_of_32_ends_all_and_is_the_only_one_named(hung: Hung) -> None:
    assert hung.codes == [HUNG] * 2, hung.errors
    assert hung.errors.count("HUNG: no progress for ") == 1
    assert f"  rank {FROZEN} on {HOST}#{FROZEN // 16}: last seen in phase " in hung.errors
    assert "  31 of 32 processes wait for it, " in hung.errors
    assert "Traceback" not in hung.errors and hung.left == []
    assert hung.seconds < 4 * TIMEOUT


def test_a_process_of_32_needs_fewer_than_256_open_files(hung: Hung) -> None:
    assert hung.open_files < LIMIT / 2


def test_a_run_of_32_resumes_on_8_processes(hung: Hung) -> None:
    assert (hung.resumed_codes, hung.resumed_errors) == ([0], ""), hung.resumed_output
    assert "\nresumed from " in hung.resumed_output
    assert goes_on(hung.steps, hung.steps[-1])


@pytest.mark.parametrize("lost", [[NODES - 1], [NODES - 2, NODES - 1], [0]], ids=["one", "two", "node 0"])
def test_lost_nodes_of_64_processes_come_back_and_the_run_goes_on(
    lost: list[int], tmp_path: Path, corpus: Path
) -> None:
    """Whatever starts the nodes starts the lost ones again."""
    words = ("--run.steps", "12", "--run.hang_timeout", "60")
    with running(tmp_path, corpus, *words, count=NODES, each=EACH, RESTARTS="2") as nodes:
        nodes.reach(4)
        for node in lost:
            nodes.lose(node)
        for node in lost:
            nodes.launchers[node] = nodes.start(node)
        assert nodes.end() == [0] * NODES, nodes.said()
        assert goes_on(nodes.steps, 12)
        assert nodes.said(0, "out").count("\nresumed from ") == 1


def test_the_only_slow_process_of_64_is_named(tmp_path: Path, corpus: Path) -> None:
    words = ("--run.steps", "40", "--checkpoint.every", "0")
    with running(tmp_path, corpus, *words, count=NODES, each=EACH, SCALE_FAULT=f"{SLOW}:slow") as nodes:
        assert nodes.end(seconds=500) == [0] * NODES, nodes.said()
        # 64 processes on a few cores: links between some of them are slow, too, and named for communication.
        named = re.findall(r"STRAGGLER: rank (\d+) on (\S+) takes \S+ s for (?:data|compute)", nodes.said(0, "out"))
        assert set(named) == {(str(SLOW), f"{HOST}#{SLOW // EACH}")}, nodes.said(0, "out")


@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_a_signal_while_64_processes_start_ends_all_of_them(when: str, tmp_path: Path, corpus: Path) -> None:
    """Before any joins the group, while one is missing in it, and after that."""
    fault = {"SCALE_FAULT": f"{SLOW}:absent"} if when == "while" else {}
    with running(tmp_path, corpus, "--run.steps", "100000", count=NODES, each=EACH, RESTARTS="2", **fault) as nodes:
        if when == "after":
            nodes.wait_for(lambda: "pre-flight" in nodes.said(0, "out"), "pre-flight")
        else:
            nodes.wait_for(lambda: len(nodes.workers(NODES // 2)) == EACH, "workers")
            time.sleep(10 if when == "while" else 0)
        nodes.launchers[NODES // 2].terminate()
        codes = nodes.end(seconds=120)
        assert codes in ([143] * NODES, [75] * NODES), (codes, nodes.said())
        assert "Traceback" not in "".join(nodes.said(node) for node in range(NODES))


def test_late_messages_and_a_slow_store_only_cost_time(tmp_path: Path, corpus: Path) -> None:
    """1% of the messages between hosts come 1 s late, and the store of node 0 answers the other nodes after 0.1 s."""
    words = ("--run.steps", "12", "--run.hang_timeout", "30")
    with (
        slow_proxy(0.05) as proxy,
        running(tmp_path, corpus, *words, count=NODES, each=EACH, proxy=proxy, SCALE_FAULT="all:late") as nodes,
    ):
        assert nodes.end(seconds=500) == [0] * NODES, nodes.said()
        assert goes_on(nodes.steps, 12) and "HUNG" not in nodes.said()
