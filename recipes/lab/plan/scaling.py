"""Plans of one recipe for several numbers of GPUs, with the batch that each of them can divide. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recipes.data.config import BatchConfig
from recipes.lab.plan.plan import Plan, plan
from recipes.lab.plan.world import Asked, World, degrees_of, world_of
from recipes.recipe.fields import Problem, refusal
from recipes.recipe.rules import violations
from recipes.recipe.schema import Recipe


@dataclass(frozen=True)
class Size:
    """The plan for one number of GPUs."""

    world: World
    plan: Plan
    """The plan of the recipe with the batch that so many processes can divide."""


def sizes(recipe: Recipe, asked: Asked, *, processes: Sequence[int]) -> list[Size]:
    """A plan for each of these numbers of processes. Raises UserError for one that the mesh does not fit."""
    found = []
    for number in dict.fromkeys(processes):
        world = world_of(recipe, asked, processes=number)
        degrees = degrees_of(recipe, world)
        fitting = replace(recipe, batch=nearest_batch(recipe.batch, shares=degrees.data_parallel))
        broken = violations(fitting, None, processes=number, nodes=world.nodes, elsewhere=True)
        if problems := [Problem(key, message) for key, message in broken]:
            raise refusal(problems, where=f"the recipe on {number} processes")
        found.append(Size(world, plan(fitting, degrees, gpu=world.gpu, rates=world.rates)))
    return found


def nearest_batch(batch: BatchConfig, *, shares: int) -> BatchConfig:
    """The batch itself if so many equal shares can be made of it; or else the nearest, of at least one sequence each.

    What is trained stays if it can: the micro-batch, which changes the speed only, gives way before the global batch.
    """
    size, micro = batch.global_batch_size, batch.micro_batch_size
    fitting = max(1, round(size / shares)) * shares
    own = fitting // shares
    return replace(
        batch,
        global_batch_size=fitting,
        micro_batch_size=max(part for part in range(1, min(micro, own) + 1) if own % part == 0),
    )
