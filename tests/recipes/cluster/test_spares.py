"""Which nodes train, as node 0 decides it in a real store."""

import threading
import time
from collections.abc import Collection
from functools import partial

import pytest
from torch.distributed import TCPStore

from recipes.cluster.spares import Numbers, agreed, chosen, known, nodes_below
from tests.processes import wait_for


@pytest.mark.parametrize(
    ("came", "expected"),
    [
        ({0, 1, 2, 3, 4}, [0, 1, 2]),
        ({0, 2, 3, 4}, [0, 3, 2]),
        ({0, 3, 4}, [0, 3, 4]),
        ({4, 3, 0}, [0, 3, 4]),
    ],
)
def test_nodes_keep_their_places_and_the_lowest_spare_ones_take_those_of_the_lost(
    came: set[int], expected: list[int]
) -> None:
    assert chosen(came, 3) == expected


@pytest.mark.parametrize("active", [[*range(30)], [0, 35, *range(2, 29), 38]])
def test_in_the_tree_nobody_is_below_a_spare_node(active: list[int]) -> None:
    below = {node: nodes_below(node, active, nodes=40) for node in range(40)}
    assert sorted(node for nodes in below.values() for node in nodes) == list(range(1, 40))
    assert not [node for node in below if below[node] and node not in active]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((2, 0), [0, 0, 0, 0, 0, 0, 6, 6, 6]),
        ((0, 3), [0, 0, 0, 0, 4, 4, 4, 4, 8]),
        ((2, 3), [0, 0, 0, 0, 4, 4, 6, 6, 6]),
    ],
    ids=["spare", "fewer", "both"],
)
def test_as_many_nodes_train_as_fit_the_recipe(numbers: tuple[int, int], expected: list[int]) -> None:
    """Of 8, whose number must be a power of two for fewer."""
    found = Numbers(*numbers, lambda processes, nodes: processes == 2 * nodes and nodes in (1, 2, 4, 8))
    assert [found.most(came, started=8, processes=2) for came in range(9)] == expected


def agree(store: TCPStore, came: set[int], *, node: int = 0, gone: Collection[int] = ()) -> list[int]:
    most = partial(Numbers(2, 0, lambda processes, nodes: False).most, started=4, processes=1)
    here = lambda _: came - {*gone}  # noqa: E731
    return agreed(lambda: store, lambda _: set(came), here, node=node, nodes=4, most=most)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_node_0_waits_some_seconds_for_more_nodes_than_are_needed_and_all_nodes_learn_whom_it_chose(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.cluster.spares.SETTLE_SECONDS", 2.0)
    came, found = {0, 3}, dict[int, list[int]]()
    waits = [
        threading.Thread(target=lambda node=node: found.update({node: agree(store, came, node=node)}))
        for node in (0, 3)
    ]
    for thread in waits:
        thread.start()
    time.sleep(1)
    assert not known(store)
    came.add(2)
    wait_for("the choice", lambda: len(found) == 2)
    assert found == {0: [0, 2], 3: [0, 2]}


def test_node_0_does_not_choose_before_enough_nodes_have_come_nor_wait_when_all_have(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.cluster.spares.SETTLE_SECONDS", 0.0)
    came, found = {0}, list[int]()
    thread = threading.Thread(target=lambda: found.extend(agree(store, came)))
    thread.start()
    time.sleep(1)
    assert thread.is_alive()
    monkeypatch.setattr("recipes.cluster.spares.SETTLE_SECONDS", 1e9)
    came.update({1, 2, 3})
    thread.join()
    assert found == [0, 1]


def test_a_node_that_has_come_and_gone_is_not_chosen(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.cluster.spares.SETTLE_SECONDS", 0.0)
    assert agree(store, {0, 1, 2, 3}, gone={1}) == [0, 2]
