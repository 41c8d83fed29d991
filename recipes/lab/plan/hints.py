"""The one setting that helps a recipe most, found at once; recipes/lab/plan/search.py looks at them together.

Imports no torch.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from parallel.errors import UserError, listed
from recipes.lab.plan.plan import Plan, plan
from recipes.lab.plan.search_space import CHUNKS, PREFETCH, divisors
from recipes.recipe.fields import toml, with_values
from recipes.recipe.rules import violations

WORTH_IT = 0.01
"""Less of a gain is not worth a line."""
FURTHER = "--plan --search looks further"


def hint(asked: Plan) -> str:
    """What to try next."""
    better = max(_others(asked), key=lambda other: other[1].time.tokens_per_second, default=None)
    speed = asked.time.tokens_per_second
    if better is None and not asked.fits:
        return f"no setting alone makes it fit; {FURTHER}, and --processes N at more GPUs"
    if better is None or (asked.fits and better[1].time.tokens_per_second < (1 + WORTH_IT) * speed):
        return f"no setting alone makes it {WORTH_IT:.0%} faster; {FURTHER}"
    setting, other = better
    gain = other.time.tokens_per_second / speed - 1
    what = f"{abs(gain):.0%} {'faster' if gain > 0 else 'slower'}, {other.memory.peak / 1e9:.1f} GB"
    return f"{'' if asked.fits else 'it fits with '}{setting}: {what}; {FURTHER}"


def _others(asked: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans that fit and differ in one setting, which changes nothing of what is trained."""
    world = asked.world
    for values in _settings(asked):
        recipe = with_values(asked.recipe, values)
        if not any(violations(recipe, None, processes=world.processes, nodes=world.nodes, elsewhere=True)):
            with suppress(UserError):  # of what the model of time does not know
                other = plan(recipe, world)
                if other.fits:
                    yield listed(f"{key} = {toml(value)}" for key, value in values.items()), other


def _settings(asked: Plan) -> Iterator[dict[str, Any]]:
    """Each with one other value; another mesh may need two."""
    recipe, mesh = asked.recipe, asked.recipe.mesh
    micro, way = recipe.batch.micro_batch_size, recipe.activation_checkpointing
    yield {"compile.enabled": not recipe.compile.enabled}
    yield from ({"activation_checkpointing.mode": mode} for mode in ("none", "selective", "full") if mode != way.mode)
    yield {"fsdp.reshard_after_forward": not recipe.fsdp.reshard_after_forward}
    yield from ({"fsdp.prefetch": blocks} for blocks in PREFETCH)
    yield from ({"batch.loss_chunks": chunks} for chunks in CHUNKS)
    yield from ({"batch.micro_batch_size": size} for size in (micro // 2, 2 * micro) if size)
    rest = {} if mesh.shard == -1 else {"mesh.shard": -1}
    yield from ({"mesh.replicate": degree, **rest} for degree in divisors(asked.degrees.data_parallel))
    for axis in ("context", "tensor", *(["expert"] if recipe.model.experts else [])):
        degree = getattr(mesh, axis)
        yield from ({f"mesh.{axis}": other} for other in (degree // 2, 2 * degree) if other)
