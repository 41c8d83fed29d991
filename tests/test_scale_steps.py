"""What rank 0's host has to do as a cluster grows, counted."""

import pytest

from tests.scale.steps import counts

CONSTANT = (
    "logged step: numbers that each host reads",
    "vote on signals: messages through rank 0's host",
    "vote on signals: bytes through rank 0's host",
    "NaN everywhere: bytes to rank 0's host",
)


@pytest.fixture(scope="module")
def rows() -> dict[int, dict[str, float]]:
    return {ranks: counts(ranks) for ranks in (256, 1024)}


@pytest.mark.parametrize("what", CONSTANT)
def test_it_is_the_same_with_four_times_as_many_processes(what: str, rows: dict[int, dict[str, float]]) -> None:
    assert rows[256][what] == rows[1024][what] > 0


def test_a_vote_takes_one_message_after_the_other_for_few_of_the_processes(rows: dict[int, dict[str, float]]) -> None:
    of_vote = "vote on signals: messages one after the other"
    assert rows[1024][of_vote] < 1.5 * rows[256][of_vote] < 0.5 * 256


def test_rank_0_hears_a_few_hundred_bytes_of_each_process_before_the_first_step(
    rows: dict[int, dict[str, float]],
) -> None:
    of_start = "pre-flight: bytes to rank 0's host"
    assert (rows[1024][of_start] - rows[256][of_start]) / (1024 - 256) < 400
