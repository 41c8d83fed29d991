"""The columns of metrics.jsonl on meshes whose processes share sequences and matrices: every token counts once."""

from typing import Any

import pytest

from parallel.dist import start, stop
from recipes.metrics import throughput
from recipes.recipe.schema import Recipe
from tests.processes import run_processes
from tests.training import change, rows, train

pytestmark = pytest.mark.slow

MESHES = {
    "tensor": {"shard": 2, "tensor": 2},
    "context and tensor": {"context": 2, "tensor": 2},
    "gather": {"shard": 2, "context": 2, "context_by": "gather"},
}
PEAK = 989.4e12
EQUAL = {"step", "tokens", "lr", "epochs", "attention_length"}
CLOSE = {"loss": 1e-5, "validation_loss": 1e-5, "grad_norm": 1e-4}
"""Relative. CPUs sum a norm's squares one by one, so that of a whole embedding is less exact than that of its parts."""


def run_on_known_devices(recipes: list[Recipe]) -> list[int]:
    """Runs on devices with a peak, so that MFU is known."""
    throughput.device_name = lambda device: "H100"
    world = start("cpu", seed=0)
    codes = [train(recipe, world) for recipe in recipes]
    stop()
    return codes


@pytest.fixture(scope="module")
def found(small: Recipe) -> dict[str, list[dict[str, Any]]]:
    """Mesh -> its rows, with attention inside documents and validation; "" is one process."""
    recipe = change(
        small,
        run={"steps": 2},
        data={"document_mask": True, "validation_fraction": 0.05},
        batch={"global_batch_size": 4},
        checkpoint={"every": 0},
        validation={"every": 2, "batches": 2},
    )
    recipes = {name: change(recipe, run={"name": f"columns {name}"}) for name in ("", *MESHES)}
    on_meshes = [change(recipes[name], mesh=mesh) for name, mesh in MESHES.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "device_name", throughput.device_name)
        assert run_on_known_devices([recipes[""]]) == [0]
    assert run_processes(4, run_on_known_devices, on_meshes) == [[0] * len(MESHES)] * 4
    return {name: rows(recipe) for name, recipe in recipes.items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_writes_the_losses_and_tokens_of_one_process(mesh: str, found: dict[str, list[dict[str, Any]]]) -> None:
    assert len(found[mesh]) == 2 + 1
    for row, alone in zip(found[mesh], found[""], strict=True):
        assert {column for column in row if "_most" not in column and "_least" not in column} == alone.keys()
        for column in row.keys() & EQUAL:
            assert row[column] == alone[column], column
        for column in row.keys() & CLOSE.keys():
            assert row[column] == pytest.approx(alone[column], rel=CLOSE[column]), column


@pytest.mark.parametrize("mesh", ["", *MESHES])
def test_rates_count_every_token_once_and_divide_by_all_processes(
    mesh: str, found: dict[str, list[dict[str, Any]]], small: Recipe
) -> None:
    processes = 4 if mesh else 1
    for row in (row for row in found[mesh] if "loss" in row):
        per_second = 4 * 32 / row["step_seconds"]
        flops = small.model.flops_per_token(row["attention_length"], "causal")
        assert row["tokens"] == row["step"] * 4 * 32
        assert row["tokens_per_second"] == pytest.approx(per_second)
        assert row["tokens_per_second_per_device"] == pytest.approx(per_second / processes)
        assert row["tflops_per_device"] == pytest.approx(per_second / processes * flops / 1e12)
        assert row["mfu"] == pytest.approx(per_second / processes * flops / PEAK)
