"""Where the processes of a run accept connections, from their start on."""

import ipaddress
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import descendants, free_ports, listening, wait_for
from tests.scripts.nodes import arguments, kill, launch, losses

pytestmark = pytest.mark.slow

if sys.platform != "linux":
    pytest.skip("reads /proc/net", allow_module_level=True)


def end(run: "subprocess.Popen[str]") -> tuple[str, str]:
    """Kill a run. Returns its output and errors."""
    kill([run.pid, *descendants(run.pid)])
    return run.communicate()


@dataclass(frozen=True)
class Running:
    """A run on one node that still runs."""

    folder: Path
    places: set[tuple[str, int]]
    """Every address and port on which it has listened since its start."""

    @property
    def steps(self) -> int:
        return len(losses(self.folder, "one"))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Running]:
    folder, seen = tmp_path_factory.mktemp("listening"), set[tuple[str, int]]()
    words = arguments(folder, corpus, "one", "--run.steps", "100000", "--checkpoint.every", "0")
    run = launch(folder, words, NPROC="2", RESTARTS="2")

    def trains() -> bool:
        assert run.poll() is None, run.communicate()
        for process in [run.pid, *descendants(run.pid)]:
            with suppress(OSError):  # it has ended meanwhile
                seen.update(listening([process]))
        return len(losses(folder, "one")) > 2

    try:
        wait_for("the first steps", trains)
        yield Running(folder, seen)
    finally:
        end(run)


def test_a_run_on_one_node_listens_on_the_loopback_network_only(running: Running) -> None:
    assert len(running.places) >= 3  # the store, and gloo in each process
    assert [place for place in running.places if not ipaddress.ip_address(place[0]).is_loopback] == []


def test_a_run_on_one_node_cannot_be_reached_at_the_address_of_the_machine(running: Running) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing, but picks the network that leads elsewhere
        except OSError:
            pytest.skip("this machine has only a loopback network")
        [own, _] = probe.getsockname()
    for _, port in running.places:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((own, port), timeout=5)


def test_garbage_on_every_port_of_a_run_does_not_stop_it(running: Running) -> None:
    with ExitStack() as stack:
        for place in running.places:
            for garbage in (b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 4096, pickle.dumps(["a stranger's object"]), b""):
                with suppress(ConnectionError):  # closed by the other side
                    stack.enter_context(socket.create_connection(place, timeout=5)).sendall(garbage)
        before = running.steps
        wait_for("more steps", lambda: running.steps > before + 20)


def test_node_0_of_several_listens_only_at_the_address_that_the_others_are_told(tmp_path: Path, corpus: Path) -> None:
    [port] = free_ports(1)
    nodes = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port)}
    run = launch(tmp_path, arguments(tmp_path, corpus, "two"), NPROC="2", **nodes)
    found = set[tuple[str, int]]()

    def serves() -> bool:
        assert run.poll() is None, run.communicate()
        found.update(listening([run.pid]))
        return bool(found)

    try:
        wait_for("the store", serves)
        assert found == {("127.0.0.2", port)}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
    finally:
        end(run)
