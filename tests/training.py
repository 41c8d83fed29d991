"""Training runs for tests: the small recipe, the one place that builds a Trainer, and what a run has written."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.config import FROM_WEIGHTS
from parallel.dist import World, start, stop
from recipes.metrics.clock import RunClock
from recipes.recipe.load import LoadedRecipe, load
from recipes.recipe.schema import Recipe
from recipes.training.build_run import build_run
from recipes.training.console import Console
from recipes.training.process import Process
from recipes.training.trainer import Trainer
from recipes.weights.locate import Weights, initial_weights

DEBUG = Path(__file__).parents[1] / "configs" / "smollm3_debug.toml"
SMALL_MODEL = {"layers": 2, "width": 64, "feed_forward_width": 96, "heads": 4, "key_value_heads": 2, "head_width": 16}


def change(recipe: Recipe, **sections: dict[str, Any]) -> Recipe:
    """The recipe with fields replaced, section by section."""
    return replace(recipe, **{name: replace(getattr(recipe, name), **fields) for name, fields in sections.items()})


def small_recipe(corpus: Path, folder: Path, *, steps: int = 8) -> Recipe:
    """A model that trains within a second and saves every second step; further steps may follow.

    Runs go to FOLDER/runs. The tests of one session share the tokens of the corpus.
    """
    return change(
        load(DEBUG),
        run={"steps": steps, "output": str(folder / "runs")},
        model=SMALL_MODEL,
        data={"source": str(corpus), "tokenizer": "train:512", "cache": str(corpus.parent / "cache")},
        batch={"sequence_length": 32, "global_batch_size": 8, "micro_batch_size": 1},
        schedule={"kind": "constant", "warmup_steps": 2, "decay_steps": 0},
        fsdp={"param_dtype": "float32"},
        checkpoint={"every": 2, "keep": 2},
        metrics={"every": 1, "picture": False},
        validation={"every": 0, "sample_tokens": 0},
    )


def weights_of(recipe: Recipe) -> Weights | None:
    """The weights that a run of the recipe starts from, as load_run() would find them."""
    if not recipe.model.weights and recipe.data.tokenizer != FROM_WEIGHTS:
        return None
    return initial_weights(recipe.model.weights, recipe.run.folder)


@contextmanager
def training(recipe: Recipe, world: World, *, silent: bool = True, clock: RunClock | None = None) -> Iterator[Any]:
    """The Trainer of a recipe, ready for its first step; every rank calls this."""
    with Console(silent=silent) as console:
        loaded = LoadedRecipe(recipe, weights_of(recipe))
        yield Trainer(build_run(loaded, Process(world, console, clock or RunClock(world.device))))


def train(recipe: Recipe, world: World, *, silent: bool = True) -> int:
    """Run a recipe to its end; the exit code."""
    with training(recipe, world, silent=silent) as trainer:
        return trainer.run()


def take_step(trainer: Any) -> Any:
    """One optimizer step outside of the loop; what it found."""
    return trainer.take_step()


def run_all(recipes: list[Recipe], silent: bool = True) -> list[int]:
    """Run recipes one after the other in this process and those beside it; exit codes. silent: without a log."""
    world = start("cpu", seed=0)
    codes = [train(recipe, world, silent=silent) for recipe in recipes]
    stop()
    return codes


def rows(recipe: Recipe) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (recipe.run.folder / "metrics.jsonl").read_text().splitlines()]


def curve(recipe: Recipe) -> list[float]:
    """The losses and validation losses of a run, in order."""
    return [row["loss"] if "loss" in row else row["validation_loss"] for row in rows(recipe)]


def largest_gap(one: list[float], other: list[float]) -> float:
    """Largest relative difference between two curves of the same length."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))
