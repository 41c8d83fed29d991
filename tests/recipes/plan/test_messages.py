"""Seconds of collectives on groups inside of nodes and across them."""

from dataclasses import replace
from pathlib import Path

import pytest

from recipes.plan.hardware import GPUS
from recipes.plan.messages import Group, Messages, small_sums
from recipes.plan.rates import RATES
from recipes.plan.work import work_of
from recipes.recipe.load import load

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
H100 = GPUS["H100"]
GIB = 2**30
NVLINK, ADAPTER = RATES.link * H100.link, RATES.network * H100.network


def group(size: int, stride: int = 1, **changes: object) -> Group:
    return Group("shard", size, stride, replace(H100, **changes), RATES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "stride", "nodes", "rate"),
    [
        (8, 1, 1, NVLINK),
        (4, 2, 1, NVLINK),
        (64, 1, 8, 8 * ADAPTER),
        (16, 4, 8, 2 * ADAPTER),
        (8, 8, 8, ADAPTER),
        (2, 64, 2, ADAPTER),
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_link(size: int, stride: int, nodes: int, rate: float) -> None:
    ring = group(size, stride)
    assert ring.nodes == nodes
    assert ring.name == f"messages: shard, {'inside' if nodes == 1 else 'between'} nodes"
    bytes_alone = ring.ring(64 * GIB) - ring.ring(0)
    assert bytes_alone == pytest.approx(64 * GIB * (size - 1) / size / rate)


def test_a_pair_of_a_board_without_a_switch_has_its_share_of_the_links() -> None:
    pair, four = (group(size, per_node=4, switched=False) for size in (2, 4))
    assert four.rate == NVLINK and pair.rate == pytest.approx(NVLINK / 3)


def test_many_processes_pay_for_steps_and_trees_for_few() -> None:
    small, large = group(64), group(16384)
    assert large.ring(0) > 100 * small.ring(0) > 0
    assert large.sum(0) < large.ring(0) / 10
    assert group(1).ring(GIB) == group(1).sum(GIB) == 0


def test_a_sum_sends_twice_what_a_gather_does() -> None:
    assert group(8).sum(64 * GIB) == pytest.approx(2 * group(8).ring(64 * GIB), rel=0.01)


def test_an_exchange_between_nodes_leaves_by_the_own_adapter_of_each_process() -> None:
    inside, across = group(8), group(16)
    assert inside.exchange(64 * GIB) == pytest.approx(inside.ring(64 * GIB))
    assert across.exchange(64 * GIB) - across.latency == pytest.approx(64 * GIB * 8 / 16 / ADAPTER)
    assert across.exchange(64 * GIB) > 4 * across.ring(64 * GIB)
    assert group(1).exchange(GIB) == 0


def test_what_is_hidden_and_what_is_not_add_up() -> None:
    found = Messages()
    found.add({"a": 3.0, "b": 1.0}, hiding=2.0, times=10)
    found.add({"a": 1.0}, hiding=5.0)
    assert found.exposed == {"a": 15.0, "b": 5.0} and found.hidden == {"a": 16.0, "b": 5.0}


def test_small_messages_of_a_tensor_group_are_as_many_as_a_gpu_that_computes_nothing_was_sent() -> None:
    """Of Llama 3 70B with 4 layers and tensor 8: 112 sums of scales (float64), and 9 of the gradients of norms."""
    recipe = load(CONFIGS / "llama3_70b_32x8h100.toml", ["--model.layers=4"], rules=False)
    work = work_of(recipe, recipe.mesh.fit(256))
    assert small_sums(work) == 9
    assert small_sums(replace(work, float8="tensorwise")) == 112 + 9
    assert small_sums(replace(work, float8="tensorwise", micro_batches=3)) == 3 * 112 + 9
    assert small_sums(replace(work, tensor=1)) == 0
