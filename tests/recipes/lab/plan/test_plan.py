"""The batch that a recipe has on another number of processes."""

import pytest

from recipes.data.config import BatchConfig
from recipes.lab.plan.plan import nearest_batch


@pytest.mark.parametrize(
    ("asked", "shares", "expected"),
    [
        ((128, 2), 8, (128, 2)),  # as it is
        ((1024, 8), 512, (1024, 2)),  # the micro-batch gives way first
        ((128, 4), 64, (128, 2)),
        ((96, 8), 8, (96, 6)),  # 12 sequences each: 6 is the largest micro-batch of at most 8 that divides them
        ((128, 1), 12, (132, 1)),  # 132 is nearer than 120
        ((1024, 8), 2048, (2048, 1)),  # every process has a sequence
        ((512, 16), 1, (512, 16)),
    ],
)
def test_the_nearest_batch_keeps_as_much_as_it_can(
    asked: tuple[int, int], shares: int, expected: tuple[int, int]
) -> None:
    batch = nearest_batch(BatchConfig(global_batch_size=asked[0], micro_batch_size=asked[1]), shares=shares)
    assert (batch.global_batch_size, batch.micro_batch_size) == expected


@pytest.mark.parametrize("shares", range(1, 200, 7))
def test_every_process_gets_the_same_number_of_full_micro_batches(shares: int) -> None:
    batch = nearest_batch(BatchConfig(global_batch_size=96, micro_batch_size=4), shares=shares)
    assert batch.global_batch_size % (shares * batch.micro_batch_size) == 0
    assert batch.micro_batch_size <= 4
