"""What a run on GPUs says of their memory, from numbers as torch's allocator gives them."""

import socket
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from parallel.dist import World, start, stop
from parallel.nodes import Node
from recipes.files.layout import LOG_FILE
from recipes.metrics.memory import FAILURES, GIB, PEAK, RESERVED, RETRIES, Gauges, GpuMemory, nvml
from recipes.recipe.schema import Recipe
from tests.processes import run_processes, untimed
from tests.training import change, rows, run_all, training


def test_torch_still_has_the_numbers_under_their_names() -> None:
    documented = torch.cuda.memory_stats.__doc__ or ""
    for name in (PEAK, RESERVED, RETRIES, FAILURES):
        assert name.split(".")[0] in documented, name


def gauges_of(rank: int) -> Gauges:
    """Rank 0 may not read its power; the others may."""

    def power() -> float:
        if rank == 0:
            raise RuntimeError("Insufficient Permissions\nand more")
        return 500.0

    return {"gpu_utilization": lambda: 1.0 - 0.5 * rank, "gpu_power_watts": power}


def train_while_gpus_are_full(recipe: Recipe) -> int:
    """The last process's GPU is full once in step 2, and all are three times in step 4."""
    world = start("cpu", seed=0)
    with training(recipe, world, silent=not world.is_main) as trainer:

        def statistics() -> Mapping[str, int]:
            is_last = world.rank == world.size - 1
            retries = (is_last and trainer.step >= 2) + 3 * (trainer.step >= 4)
            return {PEAK: (60 - world.rank) * GIB, RESERVED: 72 * GIB, RETRIES: retries, FAILURES: world.rank}

        trainer.recorder._memory = GpuMemory(world, statistics, gauges_of(world.rank))
        code: int = trainer.run()
    stop()
    return code


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_names_processes_whose_gpu_was_full_at_the_step_where_it_was(small: Recipe, processes: int) -> None:
    recipe = change(small, run={"steps": 5, "name": f"full-{processes}"})
    assert run_processes(processes, train_while_gpus_are_full, recipe) == [0] * processes
    logged = rows(recipe)
    later = 1 + 3 * processes
    assert [row["allocation_retries"] for row in logged] == [0, 1, 1, later, later]
    assert {row["allocation_failures"] for row in logged} == {processes - 1}
    assert {(row["peak_memory_gib"], row["reserved_memory_gib"]) for row in logged} == {(60, 72)}
    if processes == 2:
        least = {"peak_memory_gib_least": 59, "peak_memory_gib_least_rank": 1}
        most = {"peak_memory_gib_most": 60, "peak_memory_gib_most_rank": 0}
        gauges = {"gpu_utilization": 0.75, "gpu_power_watts": 500.0}
        assert all(row.items() >= (least | most | gauges).items() for row in logged)
        assert {row["reserved_memory_gib_most"] for row in logged} == {72}
    else:
        assert not [column for column in logged[0] if "_most" in column or "_least" in column or "power" in column]
    lines = untimed((recipe.run.folder / LOG_FILE).read_text()).splitlines()
    assert sum("  60.00 GiB of 72.00 reserved  " in line for line in lines) == 5
    first, second = (line for line in lines if "FULL" in line)
    last = f"rank {processes - 1} on {socket.gethostname()}"
    [unknown] = (line for line in lines if "not known of GPUs" in line)
    assert unknown.endswith(f": gpu_power_watts for 1 of {processes} (Insufficient Permissions)")
    assert first.startswith(f"step      2  FULL: GPU memory ran out on {last} (1 x); ")
    assert second.startswith("step      4  FULL: GPU memory ran out on rank 0 on ") and f"{last} (3 x); " in second


def test_many_full_gpus_are_named_in_one_short_line(alone: World) -> None:
    nodes = tuple(Node(f"gpu-{node}", tuple(range(8 * node, 8 * node + 8))) for node in range(48))
    memory = GpuMemory(replace(alone, size=384, nodes=nodes), lambda: {}, {})
    rows = torch.ones(384, 5)  # retries since the last logged step and in all, failures, GiB allocated and reserved
    [line] = memory.compare(memory.summary(rows).tolist())[1]
    assert "rank 0 on gpu-0 (1 x), rank 1" in line and "rank 383 on gpu-47 (1 x): 384 in all" in line
    assert len(line) < 250
    rows[:, 0] = 0
    assert memory.compare(memory.summary(rows).tolist())[1] == []


def test_gauges_that_a_machine_does_not_have_are_named_once_and_asked_once(alone: World) -> None:
    asked = []

    def missing() -> float:
        asked.append(1)
        raise ModuleNotFoundError("nvidia-ml-py is not installed")

    memory = GpuMemory(
        alone, lambda: dict.fromkeys((PEAK, RESERVED, RETRIES, FAILURES), 0), {"gpu_power_watts": missing}
    )
    for said in (["not known of GPUs: gpu_power_watts for 1 of 1 (nvidia-ml-py is not installed)"], []):
        row, lines = memory.compare(memory.summary(torch.tensor([memory.counts()])).tolist())
        assert "gpu_power_watts" not in row and lines == said
    assert len(asked) == 1


@pytest.mark.slow
def test_the_most_and_the_least_of_several_processes_are_named(small: Recipe) -> None:
    recipe = change(small, run={"steps": 2, "name": "resident"}, checkpoint={"every": 0})
    assert run_processes(2, run_all, [recipe]) == [[0], [0]]
    for row in rows(recipe):
        found = {row[f"peak_memory_gib_{end}_rank"]: row[f"peak_memory_gib_{end}"] for end in ("most", "least")}
        assert set(found) == {0, 1} and found[0] == row["peak_memory_gib"]
        assert 0 < row["peak_memory_gib_least"] <= row["peak_memory_gib_most"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_numbers_of_a_gpu_can_be_read() -> None:
    torch.ones(1, device="cuda")
    assert {PEAK, RESERVED, RETRIES, FAILURES} <= set(torch.cuda.memory_stats())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_load_and_the_power_of_a_gpu_can_be_read() -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    gauges = nvml(torch.device("cuda", 0))
    assert 0 <= gauges["gpu_utilization"]() <= 1 and 10 < gauges["gpu_power_watts"]() < 3000
