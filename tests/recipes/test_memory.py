"""The predicted memory of a step, against steps whose storages are counted and against the page of generated code."""

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from parallel.mesh import build_mesh
from recipes.load import load
from recipes.memory import predict
from recipes.schema import Recipe
from tests.live_bytes import CPU, build, fake_processes, tracked_step

ROOT = Path(__file__).resolve().parents[2]
EAGER = ["--run.device=cpu", "--compile.enabled=false", "--fsdp.param_dtype=bfloat16"]
DEBUG = ["smollm3_debug.toml", "--batch.micro_batch_size=2"]
LLAMA_DEBUG = ["llama3_debug.toml", "--batch.micro_batch_size=2", "--batch.sequence_length=256"]
REAL = ["benchmarks/smollm3_3b_8xh100.toml", "--model.layers=2", "--activation_checkpointing.mode=none"]


def eager(file: str, *changes: str) -> Recipe:
    return load(ROOT / "configs" / file, [*EAGER, *changes], rules=False)


def assert_as_tracked(recipe: Recipe, processes: int) -> None:
    live = tracked_step(recipe, processes)
    predicted = predict(recipe, recipe.mesh.fit(processes), context=False)
    assert predicted.peak == pytest.approx(live.peak, rel=1e-4), f"{predicted.fullest} here, {live.fullest} there"


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("chunks", "reshard", "micro_batches"),
    [(1, "true", 1), (8, "true", 1), (8, "false", 1), (8, "true", 2), (8, "false", 2), (1, "false", 2)],
)
def test_the_predicted_peak_is_that_of_a_step(mode: str, chunks: int, reshard: str, micro_batches: int) -> None:
    recipe = eager(
        *DEBUG,
        f"--activation_checkpointing.mode={mode}",
        f"--batch.loss_chunks={chunks}",
        f"--fsdp.reshard_after_forward={reshard}",
        f"--batch.global_batch_size={16 * micro_batches}",
    )
    assert_as_tracked(recipe, 8)


@pytest.mark.parametrize(
    "changes",
    [
        [*DEBUG, "--mesh.replicate=2", "--mesh.shard=4", "--batch.loss_chunks=8"],
        [*DEBUG, "--fsdp.param_dtype=float32", "--activation_checkpointing.mode=full"],
        [*DEBUG, "--fsdp.prefetch=3", "--batch.loss_chunks=8"],
        [*DEBUG, "--fsdp.reduce_dtype=bfloat16", "--batch.global_batch_size=32"],
        [*LLAMA_DEBUG, "--batch.loss_chunks=8"],
        [*LLAMA_DEBUG, "--batch.loss_chunks=8", "--batch.global_batch_size=32"],
        [*LLAMA_DEBUG, "--batch.loss_chunks=8", "--fsdp.reshard_after_forward=false"],
        [*LLAMA_DEBUG, "--batch.loss_chunks=8", "--activation_checkpointing.mode=full"],
    ],
    ids=lambda changes: " ".join(changes),
)
def test_the_predicted_peak_is_that_of_a_step_with(changes: list[str]) -> None:
    assert_as_tracked(eager(*changes, "--batch.global_batch_size=16", *changes[1:]), 8)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_predicted_peak_is_that_of_a_step_of_one_process(micro_batches: int) -> None:
    assert_as_tracked(eager(*DEBUG, "--batch.loss_chunks=8", f"--batch.global_batch_size={2 * micro_batches}"), 1)


@pytest.mark.parametrize(
    "changes",
    [
        [*REAL, "--batch.global_batch_size=16"],
        [*REAL, "--batch.global_batch_size=16", "--fsdp.reshard_after_forward=false"],
        [*REAL, "--batch.global_batch_size=8", "--activation_checkpointing.mode=selective", "--batch.loss_chunks=1"],
        ["benchmarks/llama3_8b_8xh100.toml", "--model.layers=4", "--activation_checkpointing.mode=full"],
    ],
    ids=lambda changes: " ".join(changes),
)
def test_the_predicted_peak_is_that_of_a_step_in_the_shapes_of_real_models(changes: list[str]) -> None:
    assert_as_tracked(eager(*changes), 8)


def test_counted_storages_are_those_of_the_memory_tracker_of_torch() -> None:
    recipe = eager(*DEBUG, "--batch.loss_chunks=4", "--optimizer.grad_clip=0")
    live = tracked_step(recipe, 8)
    with fake_processes(8):
        mesh = build_mesh(recipe.mesh.fit(8), device_type="cpu")
        with FakeTensorMode(allow_non_fake_inputs=True):
            built = build(recipe, mesh)
            tracker = FSDPMemTracker(built.model, built.optimizer)
            batch = torch.zeros(2, 256, dtype=torch.int64), torch.zeros(2, 256, dtype=torch.int64)
            tracker.track_inputs(batch)
            for step in (1, 2):
                with tracker:
                    built.model(*batch).backward()
                    built.optimizer.step()
                    built.optimizer.zero_grad()
                if step == 1:
                    tracker.reset_mod_stats()
            peak = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    assert live.peak == pytest.approx(peak, abs=64)  # the sums of a step: losses, targets, norm


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_the_predicted_peak_is_that_of_a_step_that_recomputes_some_blocks(mode: str) -> None:
    some = [f"--activation_checkpointing.mode={mode}", "--activation_checkpointing.blocks=2"]
    assert_as_tracked(eager(*DEBUG, "--batch.loss_chunks=8", *some), 8)
