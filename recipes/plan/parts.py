"""What registered parts of a block change in the work of a step. Imports no torch."""

from dataclasses import replace
from math import prod
from typing import Any

from models.config import LINEARS, ModelConfig
from models.hf import inside_block
from models.registry import PLACES
from parallel.config import Float8Config


def of_parts(model: ModelConfig, float8: Float8Config, *, inner: int) -> dict[str, Any]:
    """Fields of recipes.plan.work.Work; none where all parts are ours. inner: as in Work."""
    parts = [model.part(place) for place in PLACES]
    if not any(part.tensors for part in parts):
        return {}
    shapes = inside_block(replace(model, feed_forward_width=inner, experts=0), 0).items()
    whole = float8.plain_linears.issuperset(LINEARS)
    matrices = {name.removesuffix(".weight"): (one[0], prod(one[1:])) for name, one in shapes if len(one) > 1}
    return {
        "parts": tuple(matrices.items()),
        "plain_linears": frozenset(one for one in matrices if whole or {*one.split(".")} & {*float8.exclude}),
        "rows": frozenset(name.rpartition(".")[2] for part in parts for name in part.row),
        "moved": sum(part.costs.moved(model) for part in parts if part.costs),
    }
