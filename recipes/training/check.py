"""What train.py --check prints: a summary, as comments, and the resolved recipe below it. Imports no torch."""

import signal
import sys

from recipes.load import to_toml
from recipes.rules import fitted_mesh
from recipes.schema import Recipe
from recipes.training.run_folder import check_output_folder

LARGEST_DEVICE = 192e9
"""Bytes; no device that the recipes name has more."""


def check(recipe: Recipe, *, processes: int | None, nodes: int | None) -> None:
    """Print them; all of standard output is TOML. Raises UserError if the run's folder cannot be used."""
    check_output_folder(recipe)
    run, batch, parameters = recipe.run, recipe.batch, recipe.model.num_params()
    tokens = batch.global_batch_size * batch.sequence_length
    degrees = fitted_mesh(recipe.mesh, processes, nodes)
    moments = 8 if recipe.optimizer.state_dtype == "float32" else 4
    states = parameters * (8 + moments) / degrees.shard
    warmup, decay = recipe.schedule.phases(run.steps)
    lines = [
        f"{run.name}: {recipe.model.name} with {parameters:,} parameters",
        f"{run.steps:,} steps of {batch.global_batch_size:,} x {batch.sequence_length:,} = {tokens:,} tokens,"
        f" {run.steps * tokens:,} in all; warm-up {warmup:,} steps, final decay {decay:,}",
        f"mesh: replicate {degrees.replicate} x shard {degrees.shard}; parameters, gradients and moments take"
        f" {states / 1e9:,.2f} GB per process, activations and logits more",
    ]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is not an error
    print("".join(f"# {line}\n" for line in lines) + "\n" + to_toml(recipe), end="")
    if states > LARGEST_DEVICE:
        print(
            f"warning: parameters, gradients and moments take {states / 1e9:,.0f} GB on each of {degrees.data_parallel}"
            " processes, more than any device has; shard over more of them (--check --processes N tells for N)",
            file=sys.stderr,
        )
