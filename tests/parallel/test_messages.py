"""Messages between hosts along a tree: what arrives where, and how many connections that takes."""

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from parallel.dist import lost_a_peer, start, stop
from parallel.messages import BRANCHES, FRAME, WIDTH, Channel, Messages, children_of, host_group, parent_of
from recipes.recipe.schema import Recipe, RunConfig
from tests.processes import run_processes, wait_for

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 20, 384, 16_384])
def test_every_process_has_one_way_to_rank_0_and_few_neighbours(size: int) -> None:
    for rank in range(1, size):
        assert rank in children_of(parent_of(rank), size)
    assert sum(len(children_of(rank, size)) for rank in range(size)) == size - 1
    assert max(len(children_of(rank, size)) for rank in range(size)) <= WIDTH - 1 + BRANCHES
    depths = [0] * size
    for rank in range(1, size):
        assert parent_of(rank) < rank
        depths[rank] = depths[parent_of(rank)] + 1
    assert max(depths) <= 4


def sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except FileNotFoundError:
            continue
    return found


def exchanged() -> dict[str, Any]:
    world = start("cpu", seed=0)
    before, messages = sockets(), world.messages
    long = "x" * (FRAME + world.rank)
    found: dict[str, Any] = {
        "to_main": messages.to_main(world.rank),
        "from_main": messages.from_main(("a", world.rank)),
        "from_all": messages.from_all(long),
        "reduce": messages.reduce([world.rank], lambda one, other: one + other),
        "other channel": Messages(Channel.SAVES).from_all(world.rank),
        "sockets": sockets() - before,
    }
    messages.barrier()
    dist.barrier()
    stop()
    return found


def test_values_arrive_whole_and_in_the_order_of_ranks() -> None:
    size = 20
    everyone = run_processes(size, exchanged)
    for rank, found in enumerate(everyone):
        assert found["to_main"] == (list(range(size)) if rank == 0 else None)
        assert found["from_main"] == ("a", 0)
        assert found["from_all"] == ["x" * (FRAME + other) for other in range(size)]
        assert found["other channel"] == list(range(size))
        assert found["sockets"] <= 2  # the first message has connected it already
    assert sorted(everyone[0]["reduce"]) == list(range(size))


def bytes_that_pickle_to(length: int) -> bytes:
    """A value whose message has this many bytes behind its length."""
    return next(value for less in range(64) if len(pickle.dumps(value := b"x" * (length - less))) == length)


def lengths_passed_on(lengths: list[int]) -> list[int]:
    """Rank 0's values of these lengths, as each process got them, and a large one up the tree."""
    messages = start("cpu", seed=0).messages
    values = [b"", *map(bytes_that_pickle_to, lengths)]
    found = [messages.from_main(value if messages.rank == 0 else b"other") for value in values]
    assert found == values
    large = messages.to_main(bytes([messages.rank]) * 10**7)
    assert large is None or large == [bytes([rank]) * 10**7 for rank in range(messages.size)]
    stop()
    return [len(pickle.dumps(value)) for value in found[1:]]


def test_values_of_any_length_arrive_whole() -> None:
    lengths = [FRAME - 9, FRAME - 8, FRAME - 7, FRAME, 10**8]
    assert run_processes(2, lengths_passed_on, lengths) == [lengths] * 2


def talk_on_all_channels(rounds: int) -> list[str]:
    """What went wrong on three threads whose first messages to the same processes, not yet connected, meet."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    dist.init_process_group("gloo")
    host_group()  # as start() makes it, without a message
    wrong: list[str] = []

    def talk(channel: Channel) -> None:
        try:
            messages = Messages(channel)
            for turn in range(rounds):
                long = b"x" * (turn * 977 % 9000)
                found = messages.from_all((channel, turn, messages.rank, long))
                assert found == [(channel, turn, rank, long) for rank in range(messages.size)]
        except Exception as error:
            wrong.append(f"{channel.name}: {error}")

    threads = [threading.Thread(target=talk, args=(channel,)) for channel in Channel]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop()
    return wrong


def test_channels_connect_and_talk_at_the_same_time() -> None:
    assert run_processes(4, talk_on_all_channels, 60) == [[]] * 4


def errors_after_a_loss(leaves: int) -> str:
    """How a message ends whose way leads to a process that has gone. A time-out would come later than the test's."""
    world = start("cpu", seed=0)
    world.messages.barrier()
    if world.rank == leaves:
        stop()
        return "left"
    with pytest.raises(RuntimeError) as raised:
        world.messages.from_all(world.rank)
    assert lost_a_peer(raised.value), raised.value
    stop()
    return "lost"


@pytest.mark.parametrize("leaves", [0, 3])
def test_a_process_that_ends_between_two_messages_ends_the_wait_of_all(leaves: int) -> None:
    found = run_processes(4, errors_after_a_loss, leaves)
    assert found == ["left" if rank == leaves else "lost" for rank in range(4)]


def joined_without_rank_2(seconds: float) -> str:
    """How a process ends when another one never joins, though messages are waited for much longer."""
    if os.environ["RANK"] == "2":
        return "absent"
    from recipes.training import run

    run.SLOW_LIMIT = run.WITHOUT_PEER = 0
    with pytest.raises(RuntimeError) as raised:
        run._join(Recipe(run=RunConfig(device="cpu", hang_timeout=seconds / 2)))
    return "gave up" if lost_a_peer(raised.value) else str(raised.value)


def test_a_process_that_never_joins_is_waited_for_as_long_as_the_run_says() -> None:
    assert run_processes(3, joined_without_rank_2, 3.0)[0] == "gave up"


def connected_after_rank_0_left(left: Path) -> str:
    """Two processes send each other their first message when another one has ended."""
    world = start("cpu", seed=0)
    world.messages.barrier()
    if world.rank:
        import torch

        wait_for("the end of rank 0", left.exists)
        mail = torch.full((1,), world.rank)
        dist.send(mail, 2) if world.rank == 1 else dist.recv(mail, 1)
        assert mail.item() == 1
    stop()
    if not world.rank:
        left.touch()
    return "done"


def test_processes_connect_after_another_one_has_ended(tmp_path: Path) -> None:
    assert run_processes(3, connected_after_rank_0_left, tmp_path / "left") == ["done"] * 3
