"""Whether a ladder predicts the losses of a recipe. Imports no torch."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from recipes.files.reading import user_path
from recipes.metrics.ladder import Ladder, read_ladder
from recipes.recipe.fields import toml, value_of
from recipes.recipe.schema import Recipe

NO_CONDITIONS = {"source", "mixture", "tokenizer", "cache", "shuffle_tokens", "bad_row_budget"}
"""Fields of [data] that change no loss, or that conditions_of() treats by themselves."""


def ladder_for(recipe: Recipe, path: str) -> Ladder:
    """The ladder in this file. Raises UserError if it cannot be read, or does not predict this recipe's losses."""
    if recipe.stages or recipe.model.by_transformers:
        what = "stages" if recipe.stages else "a model of transformers"
        raise UserError(f"a ladder predicts our models, trained in one stage, but this recipe has {what}")
    ladder, here = read_ladder(user_path(path)), conditions_of(recipe)
    for key in {**here, **ladder.conditions}:
        if key not in here or key not in ladder.conditions:
            raise UserError(f"{path} is of another version, which differs in {key}; run scripts/ladder.py again")
        if here[key] != (there := ladder.conditions[key]):
            raise UserError(f"{path} predicts runs with {key} = {toml(there)}, but this recipe has {toml(here[key])}")
    return ladder


def conditions_of(recipe: Recipe) -> dict[str, Any]:
    """Ladder.conditions of a run, as in JSON. Of paths, the last two names: folders move."""

    def named(source: str) -> str:
        return "/".join(Path(source).parts[-2:])

    data, validation = recipe.data, recipe.validation
    whole, texts = sum(data.sources.values()), validation.sources or {"": validation.source}
    kept = ("optimizer.name", "schedule.kind", "model.vocabulary", "model.experts", "batch.sequence_length")
    return {
        "data.mixture": {named(source): round(share / whole, 6) for source, share in data.sources.items()},
        "data.tokenizer": named(data.tokenizer),
        **{f"data.{key}": value for key, value in asdict(data).items() if key not in NO_CONDITIONS},
        "validation.sources": {name: named(source) for name, source in texts.items()},
        **{key: value_of(recipe, key) for key in kept},
    }
