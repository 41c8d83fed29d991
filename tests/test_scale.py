"""What may not grow with the number of processes, counted on real ones."""

from itertools import pairwise

import pytest

from parallel.messages import children_of, parent_of
from tests.scale.processes import PHASES, Phases, measure
from tests.scale.store import Load, requests

FEW, MANY = 4, 16


@pytest.fixture(scope="module")
def runs() -> dict[int, Phases]:
    """Starts, steps, saves and resumes of few processes and of many."""
    return {size: measure(size) for size in (FEW, MANY)}


def neighbours(rank: int, size: int) -> int:
    return len(children_of(rank, size)) + (parent_of(rank) >= 0)


@pytest.mark.slow
def test_a_process_that_has_started_is_connected_to_the_store_and_its_neighbours_in_the_tree(
    runs: dict[int, Phases],
) -> None:
    for size, phases in runs.items():
        others = [one.sockets - one.to_store for one in phases["start"][0]]
        listening = 2  # one of each of the two gloo groups
        assert others == [listening + neighbours(rank, size) for rank in range(size)]
        assert all(one.to_store == 1 for one in phases["start"][0])


@pytest.mark.slow
def test_meshes_and_steps_connect_a_process_to_its_neighbours_in_rings(runs: dict[int, Phases]) -> None:
    for size, phases in runs.items():
        for start, step in zip(phases["start"][0], phases["step"][0], strict=True):
            groups = 1 if size <= 8 else 2  # shard, and replicate from the second node on
            assert step.sockets - start.sockets <= groups * 3  # a listener, and both neighbours of the ring


@pytest.mark.slow
def test_saves_and_resumes_connect_nobody_and_ask_the_store_for_nothing(runs: dict[int, Phases]) -> None:
    for phases in runs.values():
        for before, after in pairwise(("step", "save", "resume")):
            assert [one.sockets for one in phases[after][0]] == [one.sockets for one in phases[before][0]]
            assert phases[after][1].operations.total() == 0


@pytest.mark.slow
def test_the_store_is_asked_as_often_by_each_process_however_many_there_are(runs: dict[int, Phases]) -> None:
    for size, phases in runs.items():
        load = phases["start"][1]
        # Each connects, counts itself and leaves two addresses; each end of a connection waits for the other twice.
        assert load.connections == size
        assert load.operations.total() == 5 * size + 6 * (size - 1), load
        assert load.bytes_in + load.bytes_out < 1500 * size


@pytest.mark.slow
def test_files_that_a_process_opens_are_as_few_however_many_processes_there_are(runs: dict[int, Phases]) -> None:
    for phase in ("save", "resume"):
        few, many = ([one.files for one in runs[size][phase][0]] for size in (FEW, MANY))
        assert max(many) <= max(few) + 2, phase  # of the 12 more processes and two nodes: a second shard to read from


@pytest.mark.slow
def test_memory_of_a_process_does_not_grow_with_their_number(runs: dict[int, Phases]) -> None:
    few, many = (runs[size][PHASES[-1]][0][-1].private for size in (FEW, MANY))
    assert many < few + 10_000_000  # before the tree 30 KB per process; the rest is the allocator's


def test_no_process_of_16384_has_more_than_24_neighbours() -> None:
    assert max(neighbours(rank, 16_384) for rank in range(16_384)) <= 24


def test_requests_to_a_store_are_counted_however_they_arrive_in_pieces() -> None:
    def text(value: bytes) -> bytes:
        return len(value).to_bytes(8, "little") + value

    stream = b"\0" + bytes(4) + b"\1" + text(b"key") + text(b"") + b"\6" + (2).to_bytes(8, "little")
    stream += text(b"a") + text(b"b") + b"\4" + text(b"n") + bytes(8)
    load = Load()
    parser = requests(load)
    needed = next(parser)
    while stream:
        piece, stream = stream[:needed], stream[needed:]
        needed = parser.send(piece)
    assert load.operations == {"validate": 1, "set": 1, "wait": 1, "add": 1}
