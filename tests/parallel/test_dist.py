"""How real processes join the group."""

import os
import socket

from parallel.dist import start, stop
from tests.processes import run_processes

NETWORKS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def networks_after_start(variables: dict[str, str]) -> list[str | None]:
    os.environ.update(variables)
    start("cpu", seed=0)
    stop()
    return [os.environ.get(name) for name in NETWORKS]


def test_processes_of_one_node_meet_on_its_loopback_network() -> None:
    loopback = socket.if_indextoname(1)
    assert run_processes(2, networks_after_start, {}) == [[loopback, f"={loopback}"]] * 2


def test_networks_that_the_user_chose_for_one_node_stay() -> None:
    loopback = socket.if_indextoname(1)
    chosen = dict(zip(NETWORKS, (f"{loopback},{loopback}", "ib0"), strict=True))
    assert run_processes(1, networks_after_start, chosen) == [list(chosen.values())]


def test_processes_of_several_nodes_choose_their_networks_as_torch_does() -> None:
    assert run_processes(2, networks_after_start, {"LOCAL_WORLD_SIZE": "1"}) == [[None, None]] * 2
