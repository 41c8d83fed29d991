"""What a run on GPUs says of their memory, from numbers as torch's allocator gives them."""

import socket
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from parallel.dist import World, start, stop
from parallel.nodes import Node
from recipes.files.layout import LOG_FILE
from recipes.metrics.memory import FAILURES, GIB, PEAK, RESERVED, RETRIES, GpuMemory
from recipes.schema import Recipe
from tests.processes import run_processes
from tests.training import change, rows, training


def test_torch_still_has_the_numbers_under_their_names() -> None:
    documented = torch.cuda.memory_stats.__doc__ or ""
    for name in (PEAK, RESERVED, RETRIES, FAILURES):
        assert name.split(".")[0] in documented, name


def train_while_gpus_are_full(recipe: Recipe) -> int:
    """The last process's GPU is full once in step 2, and all are three times in step 4."""
    world = start("cpu", seed=0)
    with training(recipe, world, silent=not world.is_main) as trainer:

        def statistics() -> Mapping[str, int]:
            is_last = world.rank == world.size - 1
            retries = (is_last and trainer.step >= 2) + 3 * (trainer.step >= 4)
            return {PEAK: 60 * GIB, RESERVED: 72 * GIB, RETRIES: retries, FAILURES: world.rank}

        trainer.recorder._memory = GpuMemory(world, statistics)
        code: int = trainer.run()
    stop()
    return code


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_names_processes_whose_gpu_was_full_at_the_step_where_it_was(small: Recipe, processes: int) -> None:
    recipe = change(small, run={"steps": 5, "name": f"full-{processes}"})
    assert run_processes(processes, train_while_gpus_are_full, recipe) == [0] * processes
    logged = rows(recipe)
    later = 1 + 3 * processes
    assert [row["allocation_retries"] for row in logged] == [0, 1, 1, later, later]
    assert {row["allocation_failures"] for row in logged} == {processes - 1}
    assert {(row["peak_memory_gib"], row["reserved_memory_gib"]) for row in logged} == {(60, 72)}
    lines = (recipe.run.folder / LOG_FILE).read_text().splitlines()
    assert sum("  60.00 GiB of 72.00 reserved  " in line for line in lines) == 5
    first, second = (line for line in lines if "FULL" in line)
    last = f"rank {processes - 1} on {socket.gethostname()}"
    assert first.startswith(f"step      2  FULL: GPU memory ran out on {last} (1 x); ")
    assert second.startswith("step      4  FULL: GPU memory ran out on rank 0 on ") and f"{last} (3 x); " in second


def test_many_full_gpus_are_named_in_one_short_line(alone: World) -> None:
    nodes = tuple(Node(f"gpu-{node}", tuple(range(8 * node, 8 * node + 8))) for node in range(48))
    memory = GpuMemory(replace(alone, size=384, nodes=nodes), lambda: {PEAK: 1, RESERVED: 1})
    [line] = memory.compare([1] * 384, [0] * 384)[1]
    assert "rank 383 on gpu-47 (1 x): 384 in all" in line and len(line) < 250
    assert memory.compare([1] * 384, [0] * 384)[1] == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_numbers_of_a_gpu_can_be_read() -> None:
    torch.ones(1, device="cuda")
    assert {PEAK, RESERVED, RETRIES, FAILURES} <= set(torch.cuda.memory_stats())
