"""Measurements of the network between real processes, and detection of wrong results."""

import math
import os
import time

import pytest
import torch

from parallel.dist import start, stop
from parallel.nodes import arrange
from recipes.cluster import links
from recipes.cluster.links import (
    Links,
    clock_bounds,
    contribution,
    groups_along,
    is_wrong_sum,
    measure_links,
    pairings,
    rounds,
    slow_pairs,
    summand,
    wrong_ranks,
)
from tests.processes import run_processes

CPU = torch.device("cpu")
AHEAD = 1000.0
"""Seconds that rank 1's clock is ahead: far more than any delay here."""


def measure() -> tuple[list[tuple[float, float]], list[Links], list[Links]]:
    """As one of two nodes of two processes: clocks, links, and links when rank 2 sends wrong numbers.

    Rank 1's clock is wrong.
    """
    rank = int(os.environ["RANK"])
    os.environ["GROUP_RANK"] = str(rank // 2)
    if rank == 1:
        own = time.time
        time.time = lambda: own() + AHEAD
    world = start("cpu", seed=0)
    assert [node.ranks for node in world.nodes] == [(0, 1), (2, 3)]
    groups = groups_along(context=2, tensor=2, processes=4)
    clocks, correct = (
        world.messages.from_all(clock_bounds(world)),
        world.messages.from_all(measure_links(world, groups)),
    )
    if rank == 2:
        right = links._pattern
        links.summand = links.contribution = lambda rank, length, device: right(length, device) - 1
    wrong = world.messages.from_all(measure_links(world))
    stop()
    return clocks, correct, wrong


Measured = tuple[list[tuple[float, float]], list[Links], list[Links]]


@pytest.fixture(scope="module")
def answers() -> list[Measured]:
    """What each of four processes returned."""
    return run_processes(4, measure)


@pytest.mark.slow
def test_bounds_of_clocks_contain_the_true_offset(answers: list[Measured]) -> None:
    clocks = answers[0][0]
    assert all(least <= true <= most for (least, most), true in zip(clocks, (0, AHEAD, 0, 0), strict=True))
    assert all(most - least < AHEAD for least, most in clocks)


@pytest.mark.slow
def test_links_are_correct_and_timed_with_the_neighbouring_node(answers: list[Measured]) -> None:
    for rank, link in enumerate(answers[0][1]):
        assert not link.wrong_sum and not link.wrong_parts
        assert list(link.exchanges) == [(rank + 2) % 4]
        speeds = [link.all_reduce_seconds, link.all_gather_seconds, *link.exchanges.values()]
        assert all(math.isfinite(speed) and speed > 0 for speed in speeds)


@pytest.mark.slow
def test_links_inside_tensor_and_context_groups_are_timed(answers: list[Measured]) -> None:
    for rank, link in enumerate(answers[0][1]):
        partners = {axis: list(speeds) for axis, speeds in link.inside.items()}
        assert partners == {"tensor": [rank ^ 1], "context": [rank ^ 2]}
        assert all(speed > 0 and math.isfinite(speed) for speeds in link.inside.values() for speed in speeds.values())


@pytest.mark.slow
def test_a_rank_that_sends_wrong_numbers_is_found_by_all(answers: list[Measured]) -> None:
    assert [(link.wrong_sum, link.wrong_parts) for link in answers[0][2]] == [(True, (2,))] * 4


@pytest.mark.parametrize("ranks", [1, 3, 130])
def test_one_wrong_element_makes_a_sum_wrong(ranks: int) -> None:
    total = torch.stack([summand(rank, 40, CPU) for rank in range(ranks)]).sum(0)
    assert not is_wrong_sum(total, ranks)
    total[39] += 1
    assert is_wrong_sum(total, ranks)


@pytest.mark.parametrize("ranks", [1, 3, 130])
def test_one_wrong_element_makes_its_ranks_part_wrong(ranks: int) -> None:
    gathered = torch.cat([contribution(rank, 40, CPU) for rank in range(ranks)])
    assert wrong_ranks(gathered, ranks) == ()
    gathered[-1] += 1
    assert wrong_ranks(gathered, ranks) == (ranks - 1,)


@pytest.mark.parametrize("ranks", [3, 130])
def test_swapped_parts_are_both_wrong(ranks: int) -> None:
    swapped = torch.cat([contribution(rank, 40, CPU) for rank in (1, 0, *range(2, ranks))])
    assert wrong_ranks(swapped, ranks) == (0, 1)


@pytest.mark.parametrize("count", range(1, 9))
def test_every_process_exchanges_with_both_neighbours_one_at_a_time(count: int) -> None:
    nodes = arrange([(f"gpu-{number}", number) for number in range(count) for _ in range(2)])
    met = set()
    for partners in rounds(nodes):
        assert all(partners[other] == one and one != other for one, other in partners.items())
        met |= set(partners.items())
    neighbours = {(n, (n + step) % count) for n in range(count) for step in (1, -1)} if count > 1 else set()
    assert met == {(one * 2 + local, other * 2 + local) for one, other in neighbours for local in (0, 1)}


@pytest.mark.parametrize("members", range(2, 9))
def test_all_pairs_of_a_group_meet_once_and_one_at_a_time(members: int) -> None:
    groups = [range(first, first + members) for first in (0, members)]
    plan = pairings(groups)
    assert len(plan) == members - 1 + members % 2
    assert all(partners[other] == one and one != other for partners in plan for one, other in partners.items())
    met = [(one, other) for partners in plan for one, other in partners.items()]
    expected = {(one, other) for group in groups for one in group for other in group if one != other}
    assert len(met) == len(set(met)) and set(met) == expected


def test_large_groups_meet_in_few_rounds_only() -> None:
    assert len(pairings([range(512)])) == links.MOST_ROUNDS


def test_groups_are_those_of_the_mesh() -> None:
    found = groups_along(context=2, tensor=3, processes=12)
    assert [list(group) for group in found["tensor"]] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert [list(group) for group in found["context"]] == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]
    between = groups_along(pipeline=3, context=2, tensor=1, processes=12)["pipeline"]
    assert [list(group) for group in between] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert groups_along(pipeline=5, context=1, tensor=1, processes=12) == {}
    assert groups_along(context=1, tensor=1, processes=12) == groups_along(context=1, tensor=5, processes=12) == {}


def pairs(axis: str, groups: list[range], slow: set[tuple[int, int]]) -> list[Links]:
    """What all processes measured in groups whose pairs reach 100 GB/s, and slow ones 10 GB/s."""
    found: dict[int, dict[int, float]] = {}
    for group in groups:
        for one in group:
            others = [other for other in group if other != one]
            found[one] = {other: 1e10 if {(one, other), (other, one)} & slow else 1e11 for other in others}
    return [Links(False, (), 1.0, 1.0, {}, {axis: found[rank]}) for rank in sorted(found)]


def test_a_slow_pair_inside_a_tensor_group_is_named() -> None:
    nodes = arrange([("a", 0)] * 4 + [("b", 1)] * 4)
    groups = groups_along(context=1, tensor=4, processes=8)["tensor"]
    assert list(slow_pairs(pairs("tensor", groups, set()), nodes, share=0.5)) == []
    assert list(slow_pairs(pairs("tensor", groups, {(5, 6)}), nodes, share=0.5)) == [
        ("b", "ranks 5 and 6 of a tensor group exchange 10 GB/s (others reach 100 GB/s)")
    ]


def test_a_process_that_is_slow_with_its_whole_group_is_named_alone() -> None:
    groups = groups_along(context=1, tensor=4, processes=8)["tensor"]
    [found] = slow_pairs(pairs("tensor", groups, {(4, 7), (5, 7), (6, 7)}), arrange([("a", 0)] * 8), share=0.5)
    assert found == ("a", "rank 7 exchanges 10 GB/s (others reach 100 GB/s) with all of its tensor group")


def test_pairs_across_two_islands_of_fast_links_are_slow_though_they_are_most() -> None:
    across = {(one, other) for one in range(4) for other in range(4, 8)}
    groups = groups_along(context=1, tensor=8, processes=8)["tensor"]
    [(_, found)] = slow_pairs(pairs("tensor", groups, across), arrange([("a", 0)] * 8), share=0.5)
    assert found.startswith("ranks 0 and 4 of a tensor group exchange 10 GB/s") and found.endswith("; 15 more are slow")


def test_context_groups_across_nodes_are_not_slow_because_nodes_are_farther_than_neighbours() -> None:
    nodes = arrange([("a", 0)] * 4 + [("b", 1)] * 4)
    between = {(one, other) for one in range(4) for other in range(4, 8)}
    groups = groups_along(context=8, tensor=1, processes=8)["context"]
    assert list(slow_pairs(pairs("context", groups, between), nodes, share=0.5)) == []
