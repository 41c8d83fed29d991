"""Evaluates the tasks of [validation] on the model of a run, as it is sharded."""

from collections.abc import Callable, Mapping

import torch

from parallel.dist import World, on_main_first
from recipes.evaluation.tasks import harness
from recipes.metrics.clock import RunClock
from recipes.recipe.rules_tasks import require_row
from recipes.recipe.schema import Recipe
from recipes.training.build import Built
from recipes.weights.locate import Description


def validation_tasks(
    recipe: Recipe, built: Built, description: Description, world: World, clock: RunClock
) -> Callable[[], Mapping[str, float]]:
    """Load the tasks with their data. Returns what evaluates them: "TASK/METRIC" -> value, equal on all processes.

    Raises UserError, on all processes, for a task that is not there or that this model cannot answer. The model looks
    at as many tokens as the run's sequences have: it is not trained for more.
    """
    tests, validation, batch = harness(), recipe.validation, recipe.batch
    limit = validation.task_limit or None
    tasks = on_main_first(world, lambda: tests.load_tasks(validation.tasks, limit=limit))
    require_row(recipe.checkpoint.keep_best, tasks.directions)
    model = tests.harness_model(
        tests.Scored(
            built.model,
            built.mesh,
            world.device,
            getattr(torch, recipe.fsdp.param_dtype),
            max_length=batch.sequence_length,
            batch_tokens=batch.micro_batch_size * batch.sequence_length,
            on_batch=clock.progressed,
        ),
        description,
    )
    tests.require_answerable(model, tasks)
    return lambda: tests.rows_of(tests.results_of(model, tasks))
