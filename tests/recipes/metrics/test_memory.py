"""What a run on GPUs says of their memory, from numbers as torch's allocator gives them."""

from collections.abc import Mapping

import pytest
import torch

from parallel.dist import start, stop
from recipes.files.layout import LOG_FILE
from recipes.metrics.memory import FAILURES, GIB, PEAK, RESERVED, RETRIES, GpuMemory
from recipes.schema import Recipe
from tests.processes import run_processes
from tests.training import change, rows, training


def test_torch_still_has_the_numbers_under_their_names() -> None:
    documented = torch.cuda.memory_stats.__doc__ or ""
    for name in (PEAK, RESERVED, RETRIES, FAILURES):
        assert name.split(".")[0] in documented, name


def train_while_one_gpu_is_full(recipe: Recipe) -> int:
    """The second process's GPU was full once in step 2, and three times in step 4."""
    world = start("cpu", seed=0)
    with training(recipe, world, silent=not world.is_main) as trainer:

        def statistics() -> Mapping[str, int]:
            retries = {0: 0, 1: 0, 2: 1, 3: 1}.get(trainer.step, 4) if world.rank == 1 else 0
            return {PEAK: 60 * GIB, RESERVED: 72 * GIB, RETRIES: retries, FAILURES: world.rank}

        trainer.recorder._memory = GpuMemory(world, statistics)
        code: int = trainer.run()
    stop()
    return code


def test_a_run_names_the_process_whose_gpu_was_full_at_the_step_where_it_was(small: Recipe) -> None:
    recipe = change(small, run={"steps": 5, "name": "full"})
    assert run_processes(2, train_while_one_gpu_is_full, recipe) == [0, 0]
    logged = rows(recipe)
    assert [row["allocation_retries"] for row in logged] == [0, 1, 1, 4, 4]
    assert {row["allocation_failures"] for row in logged} == {1}
    assert {(row["peak_memory_gib"], row["reserved_memory_gib"]) for row in logged} == {(60, 72)}
    lines = (recipe.run.folder / LOG_FILE).read_text().splitlines()
    assert sum("  60.00 GiB of 72.00 reserved  " in line for line in lines) == 5
    named = [line for line in lines if "FULL" in line]
    assert [line.split("FULL")[0].split() for line in named] == [["step", "2"], ["step", "4"]]
    assert "the GPU of rank 1 on " in named[0] and "was full 1 x since" in named[0]
    assert "the GPU of rank 1 on " in named[1] and "was full 3 x since" in named[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_numbers_of_a_gpu_can_be_read() -> None:
    torch.ones(1, device="cuda")
    assert {PEAK, RESERVED, RETRIES, FAILURES} <= set(torch.cuda.memory_stats())
