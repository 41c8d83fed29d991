"""Finds the checkpoint that a run begins from, its newest or one of its trunk, and continues from it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.errors import UserError
from recipes.data.history import from_json
from recipes.data.loader import DataLoader
from recipes.files.layout import CHECKPOINTS, DATA, SAVED, step_folder
from recipes.files.reading import names_in, read_text
from recipes.recipe.load import LoadedRecipe
from recipes.recipe.schema import Recipe
from recipes.training.console import Console
from recipes.training.run_folder import require_same_data
from recipes.weights.description import Description, checkpoint_files
from recipes.weights.locate import Weights, find_weights, initial_weights

if TYPE_CHECKING:
    from recipes.checkpoint.checkpoints import Checkpoints
    from recipes.training.built import Built


@dataclass(frozen=True)
class Beginning:
    """What a process begins to train from."""

    step: int = 0
    checkpoint: Path | None = None
    """None = the weights of the recipe."""
    of_trunk: bool = False
    """Whether it is another run's, see fork.py."""

    @classmethod
    def own(cls, recipe: Recipe, step: int) -> "Beginning":
        """The run's own checkpoint of this step."""
        return cls(step, step_folder(recipe.run.folder / CHECKPOINTS, step))

    def note_origin(self, recipe: Recipe) -> None:
        """Write down what the run is a fork of, if it begins as one."""
        if self.of_trunk and self.checkpoint is not None:
            from recipes.training.fork import note_origin

            note_origin(recipe, self.checkpoint)


def find_beginning(recipe: Recipe, console: Console) -> Beginning:
    """The newest checkpoint of this run; if it has none, the one of the run that it forks; if it forks none, its
    weights. Raises what newest_checkpoint() and find_trunk() do."""
    if (step := newest_checkpoint(recipe, console)) is not None:
        return Beginning.own(recipe, step)
    if not recipe.run.continue_from:
        return Beginning()
    from recipes.training.fork import find_trunk

    step, checkpoint = find_trunk(recipe, log=console.log)
    return Beginning(step, checkpoint, of_trunk=True)


def newest_checkpoint(recipe: Recipe, console: Console) -> int | None:
    """The step of the newest whole checkpoint of this run, None if there never was one. Sets damaged ones aside.

    Raises UserError if there were some but none is whole, TemporaryError if this cannot be determined now.
    """
    folder, names = recipe.run.folder / CHECKPOINTS, names_in(recipe.run.folder)
    if not {CHECKPOINTS, SAVED} & {*names}:
        return None
    from recipes.checkpoint.folder import newest_whole, none_left

    step = newest_whole(folder, log=console.log)
    if SAVED in names:
        saved = read_text(recipe.run.folder / SAVED, errors="replace")
        if step is None:
            known = saved if saved.isdecimal() else "unknown, as .saved is damaged"
            raise UserError(none_left(folder, [f"the newest was of step {known}"]))
        if saved.isdecimal() and int(saved) > step:  # a kill between the two leaves an older one
            console.log(f"the newest checkpoint was of step {saved}; the newest intact one now is of step {step}")
    return step


def weights_for(loaded: LoadedRecipe, begin: Beginning) -> Weights | None:
    """What load() found; looked up again only if that was a checkpoint of this run that has been set aside since, or if
    the run begins as a fork."""
    found, recipe = loaded.weights, loaded.recipe
    if begin.of_trunk and begin.checkpoint is not None:
        return find_weights(begin.checkpoint)
    stale = found is not None and begin.checkpoint is None and recipe.run.folder in found.path.parents
    assert found is not None or not recipe.model.weights, "a recipe whose weights load_run() has not located"
    return initial_weights(recipe.model.weights, recipe.run.folder) if stale else found


def open_checkpoints(
    recipe: Recipe, loader: DataLoader, description: Description, begin: Beginning, console: Console
) -> "Checkpoints | None":
    if recipe.checkpoint.every == 0 and begin.checkpoint is None:
        return None
    from recipes.checkpoint.checkpoints import Checkpoints

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
    )


def resume(
    recipe: Recipe,
    built: "Built",
    loader: DataLoader,
    checkpoints: "Checkpoints | None",
    begin: Beginning,
    console: Console,
) -> Mapping[str, Any]:
    """Load the checkpoint that the run begins from, if there is one. Returns what it records of the run so far."""
    if checkpoints is None or begin.checkpoint is None:
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
