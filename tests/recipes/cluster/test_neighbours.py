"""How launchers notice that one is lost: processes that only beat, as many as give the tree three levels."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from recipes.cluster import neighbours
from recipes.cluster.neighbours import BRANCHES, Neighbours, above, below, gone, lives
from tests.processes import wait_for

NODES, SECRET, TIMEOUT = 20, "secret", 4.0
"""Node 1 has three below it, the others have none but node 0."""
BEATS = """if True:
    import json, sys, time
    from pathlib import Path
    from recipes.cluster import neighbours

    node, nodes, timeout, folder = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
    neighbours.REACH_SECONDS = 0.2

    def places(missing):
        there = {other: folder / f"place-{other}" for other in missing}
        return {other: tuple(json.loads(file.read_text())) for other, file in there.items() if file.exists()}

    def heard(line):
        print(line, flush=True)

    ours = neighbours.Neighbours("secret", node=node, nodes=nodes, timeout=timeout, loss=str, heard=heard, log=heard)
    if node:
        (folder / "new").mkdir(exist_ok=True)
        new = folder / "new" / str(node)
        new.write_text(json.dumps(ours.listen("127.0.0.1")))
        new.rename(folder / f"place-{node}")
    ours.start(places)
    while len(ours._links) < bool(node) + len(neighbours.below(node, nodes)) or not all(l.met for l in ours._links):
        time.sleep(0.05)
    (folder / f"met-{node}").touch()
    for line in sys.stdin:
        ours.leave() if line == "leave\\n" else ours.tell(line.strip())
"""


class Nodes:
    """Processes that beat, all of them connected."""

    def __init__(self, folder: Path, *, nodes: int = NODES, timeout: float = TIMEOUT) -> None:
        self.folder, self.all = folder, list[subprocess.Popen[str]]()
        for node in range(nodes):
            words = [sys.executable, "-c", BEATS, str(node), str(nodes), str(timeout), str(folder)]
            with (folder / f"out-{node}").open("w") as out:
                process = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, text=True
                )
            self.all.append(process)
        wait_for("their meeting", lambda: len([*folder.glob("met-*")]) == nodes)

    def place(self, node: int) -> tuple[str, int]:
        host, port = json.loads((self.folder / f"place-{node}").read_text())
        return host, port

    def say(self, node: int, line: str) -> None:
        pipe = self.all[node].stdin
        assert pipe
        pipe.write(line + "\n")
        pipe.flush()

    def heard(self, node: int) -> str:
        return (self.folder / f"out-{node}").read_text()

    def send(self, number: signal.Signals, *nodes: int) -> None:
        for node in nodes or range(len(self.all)):
            self.all[node].send_signal(number)

    def require_heard(self, text: str, *, but: int) -> None:
        """All of them but one have heard this line, and nothing else."""
        others = [node for node in range(len(self.all)) if node != but]
        wait_for(text, lambda: all(self.heard(node) for node in others))
        assert {self.heard(node) for node in others} == {text + "\n"}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    started = Nodes(tmp_path)
    try:
        yield started
    finally:
        for process in started.all:
            process.kill()
            process.wait()


def test_each_launcher_has_few_neighbours_however_many_there_are() -> None:
    """16,384 processes on 2,048 nodes: at most 17 connections, so 34 messages a second."""
    edges = [[above(node), *below(node, 2048)] for node in range(2048)]
    assert max(map(len, edges)) == BRANCHES + 1
    assert all(above(child) == node for node in range(2048) for child in below(node, 2048))
    assert sorted(child for node in range(2048) for child in below(node, 2048)) == [*range(1, 2048)]


@pytest.mark.slow
def test_a_killed_launcher_is_named_to_all_and_one_that_took_leave_is_not(nodes: Nodes) -> None:
    nodes.say(7, "leave")
    time.sleep(1)
    nodes.send(signal.SIGKILL, 7)
    time.sleep(1)
    assert not any(map(nodes.heard, range(NODES)))
    nodes.send(signal.SIGKILL, 1)  # three others are connected to the rest by it only
    began = time.monotonic()
    wait_for("the loss", lambda: all(nodes.heard(node) for node in range(NODES) if node not in (1, 7)))
    assert time.monotonic() - began < TIMEOUT  # the end of a process shows at once
    said = {nodes.heard(node) for node in range(NODES) if node not in (1, 7)}
    assert said == {f"node 1 on {socket.gethostname()} is lost: its launcher has ended without a word\n"}


@pytest.mark.slow
def test_a_silent_launcher_is_lost_and_a_run_that_was_stopped_as_a_whole_goes_on(nodes: Nodes) -> None:
    nodes.send(signal.SIGSTOP)
    time.sleep(1.5 * TIMEOUT)
    nodes.send(signal.SIGCONT)
    time.sleep(TIMEOUT)
    assert not any(map(nodes.heard, range(NODES)))
    nodes.send(signal.SIGSTOP, 18)
    nodes.require_heard(f"node 18 on {socket.gethostname()} is lost: silent for more than {TIMEOUT:g} s", but=18)
    nodes.send(signal.SIGCONT, 18)
    wait_for("its end", lambda: "is lost" in nodes.heard(18))


@pytest.mark.slow
def test_one_that_cannot_be_reached_is_named_once_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall. The store tells it what the others tell one another."""
    monkeypatch.setattr(neighbours, "SAID_SECONDS", 0.1)
    monkeypatch.setattr(neighbours, "REACH_SECONDS", 0.1)
    said, heard = list[str](), list[str]()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place: tuple[str, int] = closed.getsockname()
        ours = Neighbours(SECRET, node=0, nodes=2, timeout=0.2, loss=str, heard=heard.append, log=said.append)
        ours.start(lambda missing: {node: place for node in missing})
        wait_for("its name", lambda: said)
        time.sleep(1)
    ours.tell("end")
    why = f"node 1 does not answer at 127.0.0.1, port {place[1]} (Connection refused)"
    assert said == [f"{why}: if it is lost, only run.hang_timeout ends the run"] and heard == ["end"]


@pytest.mark.slow
def test_a_line_from_any_launcher_reaches_all_and_strangers_reach_none(nodes: Nodes) -> None:
    place = nodes.place(1)
    hello = json.dumps([SECRET, 0, "host"]).encode()
    for words in (
        b"",
        b"\n",
        b"\xff" * 30_000,
        b"[]\n",
        b'["", 0, ""]\ncause\n',
        b"{" * 9000 + b"\n",
        b"[" * 5000 + b"\n",
        b"left\n",
    ):
        with suppress(OSError), socket.create_connection(place) as stranger:
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""  # nothing is said to it
    many = [socket.create_connection(place) for _ in range(2 * neighbours.STRANGERS)]
    assert lives(place, SECRET) and not lives(place, "guessed")
    for stranger in many:
        stranger.close()
    with socket.create_connection(place) as wrong:  # the secret, and no neighbour
        wrong.sendall(hello.replace(b"0", b"5") + b"\ncause\n")
        assert wrong.recv(100) == b""
    assert not any(map(nodes.heard, range(NODES)))
    nodes.say(19, "cause")
    nodes.say(3, "cause")
    wait_for("the cause", lambda: all(map(nodes.heard, range(NODES))))
    assert {nodes.heard(node) for node in range(NODES)} == {"cause\n"}
    os.kill(nodes.all[1].pid, 0)


def test_launchers_that_do_not_answer_are_gone_unless_all_are_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall. One that refuses the connection is gone."""
    monkeypatch.setattr(neighbours, "ANSWER_SECONDS", 0.5)
    ours = Neighbours(SECRET, node=1, nodes=0, timeout=TIMEOUT, loss=str, heard=print, log=print)
    lives_there = ours.listen("127.0.0.1")
    ours.start(lambda nodes: {})
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refuses = closed.getsockname()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        places = {2: refuses, 3: silent.getsockname()}
        assert gone(places, SECRET) == {2}
        assert gone({1: lives_there, **places}, SECRET) == {2, 3}
    assert gone({}, SECRET) == set()
