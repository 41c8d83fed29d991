"""How launchers notify each other, through a real store."""

import socket
import threading
from collections.abc import Callable

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError

from parallel.errors import UserError
from recipes.cluster.rendezvous import ENDED, Cause, Launchers
from recipes.cluster.store import serve, serve_alone
from tests.processes import PATIENCE, free_ports, wait_for


def store() -> TCPStore:
    """A store like that of node 0's launcher."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def fail(line: str) -> None:
    raise AssertionError(line)


def node(number: int, port: int, *, nodes: int = 3, log: Callable[[str], None] | None = None) -> Launchers:
    return Launchers(("127.0.0.1", port), node=number, nodes=nodes, log=log or fail)


def die(launcher: Launchers) -> None:
    """What the system does at the end of a launcher's process."""
    assert launcher._neighbours
    launcher._neighbours._listener.close()


def test_a_restarted_node_ends_the_run_it_was_in_and_waits_for_a_new_store() -> None:
    kept = [store()]
    port = kept[0].port
    lines: list[str] = []
    first, other, again = node(1, port), node(2, port), node(1, port, log=lines.append)
    first.join()
    other.join()
    die(first)
    waits = threading.Thread(target=again.join)
    waits.start()
    wait_for("the request to end", lambda: kept[0].check([ENDED]))
    ended = threading.Event()
    other.watch(ended.set, grace=1000)
    assert other.wait_for_cause() == Cause("node 1 was started again", 1, crashed=True)
    wait_for("the end", ended.is_set)
    assert waits.is_alive()
    kept.clear()  # node 0's launcher ends
    waits.join(timeout=PATIENCE)
    assert not waits.is_alive()
    assert lines == ["node 0 is still in the run that this node was in before: waiting for that to end"]


def test_a_node_may_start_before_node_0() -> None:
    kept = store()
    port = kept.port
    del kept
    node(1, port).join()


@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 0)])
def test_the_end_of_one_launcher_reaches_the_others(sender: int, receiver: int) -> None:
    kept = store()
    ended = threading.Event()
    other = node(receiver, kept.port)
    other.watch(ended.set, grace=1000)
    assert other.wait_for_cause() is None
    node(sender, kept.port).announce_end(2, crashed=False)
    assert other.wait_for_cause() == Cause(f"node {sender} ended with exit code 2", 2, crashed=False)
    assert not ended.is_set()  # its workers end by themselves


def test_losing_the_launcher_of_node_0_ends_a_node() -> None:
    kept = store()
    other, ended = node(1, kept.port), threading.Event()
    other.join()
    other.watch(ended.set, grace=0)
    del kept
    wait_for("the end", ended.is_set)
    assert other.cause == Cause("the launcher of node 0 is gone", 1, crashed=False)
    other.announce_end(1, crashed=True)  # no launcher receives it, which is not an error


def test_missing_nodes_are_named_and_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.cluster.rendezvous.SILENT_SECONDS", 0.0)
    monkeypatch.setattr("recipes.cluster.rendezvous.WAIT_SECONDS", 3.0)
    kept = store()
    lines: list[str] = []
    gave_up = threading.Event()
    main, came = node(0, kept.port, nodes=4, log=lines.append), node(2, kept.port)
    came.join()
    main.watch(lambda: None, grace=1000)
    main.await_all(gave_up.is_set, give_up=gave_up.set)
    wait_for("giving up", gave_up.is_set)
    assert lines[0].startswith("waiting for node ")
    assert lines[-1] == "the nodes did not meet: node 1, 3 of 4 did not come within 0.05 minutes"


def test_a_missing_node_0_is_named_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.cluster.rendezvous.SILENT_SECONDS", 0.0)
    kept = store()
    port = kept.port
    del kept
    lines: list[str] = []
    node(1, port, log=lines.append).await_all(lambda: bool(lines), give_up=lambda: None)
    wait_for("a line", lambda: lines)
    assert lines == [f"waiting for node 0 at 127.0.0.1:{port}"]


def test_a_node_reaches_a_store_that_is_served_later_and_gets_its_address() -> None:
    [port] = free_ports(1)
    found: list[str] = []
    other = Launchers(("localhost", port), node=1, nodes=2, log=fail)
    waits = threading.Thread(target=lambda: found.append(other.reach()))
    waits.start()
    served = serve("127.0.0.1", port, remote=True)
    waits.join(timeout=PATIENCE)
    assert served and found == ["127.0.0.1"]


def test_torchruns_store_of_the_same_port_is_the_served_one() -> None:
    served = serve_alone(0)
    served.store.set("who", "we")
    theirs = TCPStore(served.address, served.port, 1, is_master=True, multi_tenant=True)
    assert theirs.get("who") == b"we"


def test_two_runs_on_one_machine_get_ports_of_their_own() -> None:
    first, second = serve_alone(0), serve_alone(0)
    assert first.port != second.port


def test_an_address_of_another_machine_is_left_to_torchrun() -> None:
    assert serve("203.0.113.9", free_ports(1)[0], remote=True) is None


def test_a_name_that_only_this_machine_takes_for_the_loopback_network_is_left_to_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the /etc/hosts of Debian. Other nodes know another address of that name."""
    own = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: own)
    assert serve("node-1", 0, remote=True) is None
    assert serve("node-1", 0, remote=False) is not None


def test_a_taken_port_and_an_unknown_name_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            RendezvousError, match=rf"cannot listen on 127\.0\.0\.1, port {port}: Address already in use$"
        ):
            serve("127.0.0.1", port, remote=True)
    with pytest.raises(RendezvousError, match=r"^the address no-such-host\.invalid of node 0: "):
        serve("no-such-host.invalid", port, remote=True)


def test_a_second_start_of_a_number_is_refused_and_the_first_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.cluster.rendezvous.SILENT_SECONDS", 1.0)
    monkeypatch.setattr("recipes.cluster.rendezvous.LOOK_SECONDS", 0.1)
    kept = store()
    first, again, right = node(1, kept.port), node(1, kept.port), node(2, kept.port)
    first.join()
    first.watch(lambda: None, grace=0)
    with pytest.raises(UserError, match=r"NODE_RANK=1 was started on .* already.* its own number, 0 to 2"):
        again.join()
    right.join()
    assert first.cause is None and not kept.check([ENDED])
