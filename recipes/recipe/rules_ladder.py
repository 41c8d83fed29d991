"""Whether a ladder predicts the losses of a recipe. Imports no torch."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.registry import OURS, PLACES
from parallel.errors import UserError
from recipes.files.reading import user_path
from recipes.metrics.ladder import Ladder, read_ladder
from recipes.recipe.fields import toml, value_of
from recipes.recipe.paths import is_path
from recipes.recipe.schema import Recipe

NO_CONDITIONS = {"source", "mixture", "tokenizer", "cache", "shuffle_tokens", "bad_row_budget", "border_targets"}
"""Fields of [data] that change no loss, or that conditions_of() treats by themselves."""
KEPT = (
    *("optimizer.name", "schedule.kind", "batch.sequence_length", "model.vocabulary", "model.tied_embeddings"),
    *("model.window", "model.experts", "model.experts_per_token", "model.shared_experts", "model.router"),
)
"""Fields of other sections that losses depend on and that rungs have from the recipe."""


def ladder_for(recipe: Recipe, path: str) -> Ladder:
    """The ladder in this file. Raises UserError if it cannot be read, or does not predict this recipe's losses."""
    if recipe.stages or recipe.model.by_transformers or recipe.schedule.steps:
        what = "stages" if recipe.stages else "a model of transformers" if recipe.model.by_transformers else ""
        what = what or f"schedule.steps = {recipe.schedule.steps}"
        raise UserError(f"a ladder predicts our models, trained in one stage, but this recipe has {what}")
    ladder, here = read_ladder(user_path(path)), conditions_of(recipe)
    for key in {**here, **ladder.conditions}:
        if key not in here or key not in ladder.conditions:
            raise UserError(f"{path} is of another version, which differs in {key}; run scripts/ladder.py again")
        if here[key] != (there := ladder.conditions[key]):
            raise UserError(f"{path} predicts runs with {key} = {toml(there)}, but this recipe has {toml(here[key])}")
    return ladder


def conditions_of(recipe: Recipe) -> dict[str, Any]:
    """Ladder.conditions of a run, as in JSON. Of paths, the last three names: folders move."""

    def named(source: str) -> str:
        is_local = source and is_path(source, "data.source")
        return "/".join(Path(os.path.abspath(user_path(source))).parts[-3:]) if is_local else source

    data, validation, steps = recipe.data, recipe.validation, recipe.run.steps
    whole, texts = sum(data.sources.values()), validation.sources or {"": validation.source}
    return {
        "data.mixture": [[named(source), round(share / whole, 6)] for source, share in data.sources.items()],
        "data.tokenizer": named(data.tokenizer),
        **{f"data.{key}": value for key, value in asdict(data).items() if key not in NO_CONDITIONS},
        # Older ladders had no such fields.
        **({"data.border_targets": False} if data.document_mask and not data.border_targets else {}),
        **({"schedule.decay": recipe.schedule.decay} if recipe.schedule.decay != "linear" else {}),
        "validation.sources": {name: named(source) for name, source in texts.items()},
        **{key: value_of(recipe, key) for key in KEPT},
        **{f"model.{place}": name for place in PLACES if (name := getattr(recipe.model, place)) != OURS},
        "schedule.min_lr_ratio": recipe.schedule.learning_rate(steps, peak=1.0, steps=steps),  # 1 without a decay
    }
