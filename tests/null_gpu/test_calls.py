"""Reading the logs of NCCL calls, and comparing them between ranks and with the plan."""

from pathlib import Path
from typing import Any

import pytest

from parallel.config import MeshDegrees
from recipes.recipe.load import CONFIGS, load
from tests.null_gpu.calls import Call, along_axes, disorders, read_log, read_logs
from tests.null_gpu.planned import planned
from tests.null_gpu.suite import RECIPES, is_bad, table, variants

LOG = """init aa rank 0 of 4
call aa all_reduce 1 f32
note step 1
call aa all_gather 1000000 bf16
call aa reduce_scatter 500000 f32
split aa-0:1 rank 0
call aa-0:1 send 8 i64
finalize aa
note step 2"""


def test_log_is_read_phase_by_phase() -> None:
    log = read_log(LOG.splitlines())
    assert log.sizes == {"aa": 4}
    assert list(log.phases) == ["", "step 1", "step 2"]
    assert log.phases["step 1"][0] == Call("aa", "all_gather", 1_000_000, "bf16")
    assert len(log.calls) == 4


@pytest.mark.parametrize(
    ("kind", "sent"), [("all_gather", 1200), ("reduce_scatter", 1200), ("all_reduce", 600), ("send", 400), ("recv", 0)]
)
def test_bytes_sent_are_those_that_cross_the_link_of_a_ring(kind: str, sent: int) -> None:
    assert Call("aa", kind, 100, "f32").sent(4) == sent


def test_messages_are_counted_by_axis_and_small_ones_apart() -> None:
    log = read_log(LOG.splitlines())
    found = along_axes([*log.phases[""], *log.phases["step 1"][:2]], {"aa": "shard"}, log.sizes)
    assert found == {"shard": (2, 1, 12_000_006)}


def test_logs_in_the_same_order_have_no_disorder(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"calls.{rank}").write_text(LOG, encoding="utf-8")
    assert disorders(read_logs(tmp_path / "calls")) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            ("all_gather 1000000 bf16", "all_gather 1000000 f32"),
            "call 2: rank 0 all_gather of 1000000 bf16, rank 1 all",
        ),
        (("call aa reduce_scatter 500000 f32\n", ""), "call 3: rank 0 reduce_scatter of 500000 f32, rank 1 none"),
    ],
)
def test_first_call_that_differs_is_named(change: tuple[str, str], found: str) -> None:
    logs = {0: read_log(LOG.splitlines()), 1: read_log(LOG.replace(*change).splitlines())}
    assert [line.startswith(found) for line in disorders(logs)] == [True]


def test_plan_counts_a_gather_and_a_reduction_of_each_block_and_of_the_table() -> None:
    recipe = load(CONFIGS / "benchmarks" / "smollm3_3b_8xh100.toml")
    found = planned(recipe, MeshDegrees(replicate=1, shard=8, context=1, tensor=1))
    micro_batches = recipe.batch.global_batch_size // 8 // recipe.batch.micro_batch_size
    assert list(found) == ["shard"]
    assert not recipe.fsdp.reshard_after_forward and micro_batches > 1
    assert found["shard"].messages == 2 * (36 + 1)  # as the null GPU counts for this recipe
    assert found["shard"].sent == pytest.approx(6 * 7 / 8 * 3_075_000_000, rel=1e-3)


STEP: dict[str, Any] = {
    **{"ranks": 8, "predicted": 51e9, "allocated": 50e9, "reserved": 52e9, "retries": 3, "waits": 0, "copies": 1},
    "sent": {"shard": {"messages": 2, "small": 1, "sent": 4e9}},
    "planned": {"shard": {"messages": 2, "small": 0, "sent": 4e9}},
}


def test_table_has_a_line_for_each_step_and_version_of_torch() -> None:
    steps = {"some": STEP | {"planned": {}}, "broken": {"ranks": 8, "predicted": 9e10, "error": "out of memory: why"}}
    text = "\n".join(table({"2.12.1": {"some": STEP}, "2.13.0": steps}))
    assert "| some | 2.12.1 | 8 | 51.0 | 50.0 | 1.020 | +4.0% | 3/0/1 | 2; 4.0 GB | |" in text
    assert "| some | 2.13.0 | 8 | 51.0 | 50.0 | 1.020 | +4.0% | 3/0/1 | 2 of 0; 4.0 of 0.0 GB | |" in text
    assert "| broken | 2.13.0 | 8 | 90.0 | out of memory | | | | | |" in text


def test_table_says_how_a_whole_run_ended() -> None:
    run = {"ranks": 2, "calls": 7, "disorders": ["call 3: rank 0 none"]}
    text = "\n".join(table({"2.13.0": {"run, shard 2": run, "run, tensor 2": run | {"disorders": []}}}))
    assert "| run, shard 2 | 2.13.0 | 2 | | | | | | 7 | call 3: rank 0 none |" in text
    assert "| run, tensor 2 | 2.13.0 | 2 | | | | | | 7 | equal |" in text
    assert [is_bad(row) for row in (STEP, {"error": "crashed: why"}, run)] == [False, True, True]


def test_recipes_step_eagerly_and_compiled_and_those_that_begin_with_weights_without() -> None:
    found = dict(variants(CONFIGS / "t5_3b_8xh100.toml", eager_only=False))
    assert list(found) == ["t5_3b_8xh100, eager", "t5_3b_8xh100, compiled"]
    for path in (path for name in RECIPES for path in CONFIGS.rglob(name)):
        for overrides in dict(variants(path, eager_only=True)).values():
            assert not load(path, overrides, elsewhere=True, rules=False).model.weights
