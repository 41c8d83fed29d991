"""Loops in processes of their own take turns, and one that dies is named."""

import time
from contextlib import closing

import pytest
import torch.distributed as dist

from parallel.errors import UserError
from recipes.lab.bench.turns import MeasuredLoop, Turns

pytestmark = pytest.mark.slow


def sleep(turns: Turns, rank: int, processes: int, *, seconds: float) -> None:
    if processes > 1:
        dist.init_process_group("gloo")
    turns.ready(float(processes))
    while True:
        turns.begin()
        time.sleep(seconds if rank == 0 else 0)
        turns.end()


def die(turns: Turns, rank: int, processes: int, *, broken: int) -> None:
    if rank == broken:
        raise SystemExit(3)
    time.sleep(1000)


def loop(work: object, processes: int, **settings: float) -> MeasuredLoop:
    return MeasuredLoop("of this test", work, settings, processes=processes)  # type: ignore[arg-type]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_turn_takes_the_time_of_its_loop(processes: int) -> None:
    slow, fast = loop(sleep, processes, seconds=0.2), loop(sleep, processes, seconds=0)
    with closing(slow), closing(fast):
        assert slow.first_loss() == fast.first_loss() == processes
        assert slow.turn() >= 0.2 and fast.turn() > 0 and slow.turn() >= 0.2


@pytest.mark.parametrize("broken", [0, 1])
def test_a_loop_of_which_a_process_dies_is_named(broken: int) -> None:
    with closing(loop(die, 2, broken=broken)) as dying, pytest.raises(UserError) as refused:
        dying.first_loss()
    assert str(refused.value) == "the loop of this test failed with exit code 3, see above"
