"""Copies in memory of a run of one process: what they leave, and what a start makes of an earlier one's."""

from pathlib import Path

import pytest

from parallel.config import MeshDegrees
from parallel.dist import World
from recipes.checkpoint.memory import Memory
from recipes.checkpoint.memory_folder import KeptRun, Mark, read_mark
from recipes.cluster.restarts import newest_step
from recipes.files.layout import MEMORY
from recipes.recipe.schema import Recipe
from tests.recipes.checkpoint.small import trained
from tests.training import change, train


def test_what_is_not_whole_is_removed_with_the_step_before(alone: World, tmp_path: Path) -> None:
    """As a full folder leaves it, which has room again later."""
    (tmp_path / "run").mkdir()
    run = KeptRun(tmp_path / "run", str(tmp_path), "recipe", MeshDegrees(replicate=1, shard=1))
    said: list[str] = []
    memory = Memory(run, alone, every=1, begun_from=None, own_bytes=1, files={}, log=said.append)
    model, optimizer = trained()
    own = memory._place.own
    for step in (1, 2):
        (own / ".partial-00000007").mkdir(parents=True)
        memory.save(model, optimizer, step=step, progress={})
        memory.finish()
        assert [path.name for path in own.iterdir()] == [f"step-{step:08d}"], said
    mark = read_mark(tmp_path / "run")
    assert mark and mark.step == 2
    memory.end(keep=False)
    assert not own.exists() and not (tmp_path / "run" / MEMORY).exists()


@pytest.mark.slow
def test_a_start_that_does_not_begin_from_memory_drops_what_an_earlier_one_noted(small: Recipe, alone: World) -> None:
    """Supervisors would count its step as progress, and stop a run that gets on."""
    assert train(change(small, run={"steps": 4}), alone) == 0
    Mark("0a", "another", 7).write(small.run.folder)
    assert newest_step(small.run.folder) == 7
    assert train(change(small, run={"steps": 6}), alone) == 0
    assert newest_step(small.run.folder) == 6 and not (small.run.folder / MEMORY).exists()
