"""Finds the checkpoint that a run begins from, its newest or one of its trunk, and continues from it."""

import json
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from parallel.errors import UserError
from recipes.checkpoint.checkpoints import Checkpoints
from recipes.checkpoint.folder import newest_whole, none_left
from recipes.data.history import from_json
from recipes.data.loader import DataLoader
from recipes.files.layout import CHECKPOINTS, DATA, SAVED
from recipes.files.reading import read_text
from recipes.recipe.load import LoadedRecipe
from recipes.recipe.schema import Recipe
from recipes.training.border import Beginning
from recipes.training.console import Console
from recipes.training.run_folder import require_same_data
from recipes.weights.description import Description, checkpoint_files

if TYPE_CHECKING:
    from recipes.training.build import Built


def find_beginning(loaded: LoadedRecipe, names: Collection[str], console: Console) -> Beginning:
    """The newest checkpoint of this run; if it has none, the one of the run that it forks; if it forks none, its
    weights. names: of what is in the run's folder. Raises what newest_checkpoint() and find_trunk() do."""
    recipe = loaded.recipe
    if (step := newest_checkpoint(recipe, names, console)) is not None:
        return Beginning.own(recipe, step)
    if not recipe.run.continue_from:
        return Beginning()
    from recipes.training.fork import find_trunk

    step, checkpoint = find_trunk(recipe, log=console.log, origins=loaded.origins)
    return Beginning(step, checkpoint, of_trunk=True)


def newest_checkpoint(recipe: Recipe, names: Collection[str], console: Console) -> int | None:
    """The step of the newest whole checkpoint of this run, None if there never was one. Sets damaged ones aside.

    Raises UserError if there were some but none is whole, TemporaryError if this cannot be determined now.
    """
    folder = recipe.run.folder / CHECKPOINTS
    if not {CHECKPOINTS, SAVED} & {*names}:
        return None
    step = newest_whole(folder, log=console.log)
    if SAVED in names:
        saved = read_text(recipe.run.folder / SAVED, errors="replace")
        if step is None:
            known = saved if saved.isdecimal() else "unknown, as .saved is damaged"
            raise UserError(none_left(folder, [f"the newest was of step {known}"]))
        if saved.isdecimal() and int(saved) > step:  # a kill between the two leaves an older one
            console.log(f"the newest checkpoint was of step {saved}; the newest intact one now is of step {step}")
    return step


def open_checkpoints(recipe: Recipe, loader: DataLoader, description: Description, console: Console) -> Checkpoints:
    """The checkpoints of the run, with what accompanies their tensors."""
    remote = None
    if recipe.checkpoint.remote:
        from recipes.training.fetch import remote_folder

        remote = remote_folder(recipe)
    return Checkpoints(
        recipe.run.folder / CHECKPOINTS,
        recipe.checkpoint,
        log=console.log,
        files=checkpoint_files(description) | {DATA: json.dumps(loader.data_state, indent=2) + "\n"},
        mark=recipe.run.folder / SAVED,
        remote=remote,
        pipeline=recipe.mesh.pipeline,
    )


def resume(
    recipe: Recipe,
    built: "Built",
    loader: DataLoader,
    checkpoints: Checkpoints,
    begin: Beginning,
    console: Console,
) -> Mapping[str, Any]:
    """Load the checkpoint that the run begins from, if there is one. Returns what it records of the run so far."""
    if begin.checkpoint is None:
        return {}
    check = partial(require_same_data, data_state=loader.data_state)
    if begin.of_trunk:
        from recipes.training.fork import taken_over

        progress = checkpoints.fork(built.model, built.optimizer, checkpoint=begin.checkpoint, check=check)
        progress = taken_over(progress, begin.checkpoint)
    else:
        progress = checkpoints.resume(built.model, built.optimizer, step=begin.step, check=check)
    history = from_json(progress.get("history", []))  # older versions had one segment
    if not loader.continue_after(history, first_batch=progress["step"] if history else 0):
        progress.pop("loss_window", None)  # losses on other text say nothing of spikes
        for line in loader.consumed(progress["step"]):
            console.log(line)
    if progress["step"] < recipe.run.steps:  # a finished run reads nothing more
        loader.require_trained_on(progress.get("trained_on", {}), batches=progress["step"])
    if built.float8_all_gather:
        from parallel.float8 import precompute_scales

        precompute_scales(built.model)
    return progress
