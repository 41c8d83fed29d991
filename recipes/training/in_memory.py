"""Begins a run from the memory of its nodes, and keeps its steps there; see recipes/checkpoint/memory.py."""

from collections.abc import Mapping
from pathlib import Path

from recipes.checkpoint import memory
from recipes.checkpoint.memory_folder import KeptRun
from recipes.checkpoint.storage import local
from recipes.optimization.optimizer import matrices_of
from recipes.recipe.load import to_toml
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import Stage
from recipes.training.build import Built
from recipes.training.process import Process
from recipes.training.run_folder import is_in_memory


def newest(recipe: Recipe, process: Process, *, after: int) -> Path | None:
    """This process's part of the newest step after this one that is whole in memory; None if there is none."""
    return memory.newest(_kept(recipe, process), process.world, after=after, log=process.console.log)


def memory_of(
    recipe: Recipe, stage: Stage, process: Process, built: Built, checkpoint: Path | None, *, files: Mapping[str, str]
) -> memory.Memory:
    """What keeps the steps of a stage. recipe: of all stages. checkpoint: what it begins from. files: see Memory."""
    parts, matrices = [local(one) for one in built.parameters], [local(one) for one in matrices_of(built.optimizer)]
    elements, of_matrices = (sum(part.numel() for part in some) for some in (parts, matrices))
    moments = stage.recipe.optimizer.state_bytes(elements, len(parts), matrices=(of_matrices, len(matrices)))
    return memory.Memory(
        _kept(recipe, process),
        process.world,
        every=stage.recipe.checkpoint.memory_every,
        begun_from=checkpoint if is_in_memory(checkpoint) else None,
        own_bytes=sum(part.nbytes for part in parts) + moments,
        files=files,
        log=process.console.log,
    )


def _kept(recipe: Recipe, process: Process) -> KeptRun:
    degrees = recipe.mesh.fit(process.world.size, nodes=len(process.world.nodes))
    return KeptRun(recipe.run.folder, recipe.checkpoint.memory_folder, to_toml(recipe), degrees)
