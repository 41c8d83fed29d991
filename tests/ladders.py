"""Made-up ladders for tests."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter

from recipes.metrics.ladder import Fit, Ladder, Law
from recipes.recipe.rules_ladder import conditions_of
from recipes.recipe.schema import Recipe

LAW = Law(1.7, 45.0, 0.27, 400.0, 0.36)


def constant(loss: float) -> Law:
    """A law that predicts this loss of every run."""
    return Law(loss, 1e-9, 1.0, 1e-9, 1.0)


def fit(law: Law = LAW) -> Fit:
    """A fit that is 1% uncertain."""
    return Fit(law, (law,), (-0.01, 0.01))


def write_ladder(file: Path, recipe: Recipe, laws: Mapping[float, Law] | None = None) -> str:
    """Write a ladder of rungs up to 1M parameters and 10M tokens for this recipe; laws: share of the steps -> law."""
    fits = tuple((share, fit(law)) for share, law in (laws or {1.0: LAW}).items())
    ladder = Ladder("configs/large.toml", conditions_of(recipe), fits, parameters=10**6, tokens=10**7)
    file.write_bytes(TypeAdapter(Ladder).dump_json(ladder))
    return str(file)
