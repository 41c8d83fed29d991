"""Starts a run from a checkpoint of another one, its trunk, which is only read. Imports no torch."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from parallel.errors import TemporaryError, UserError
from recipes.checkpoint.files import read_manifest
from recipes.checkpoint.folder import check, left_overs
from recipes.checkpoint.manifest import Damage
from recipes.data.history import Segment, Window, to_json
from recipes.data.text.sources import is_prepared
from recipes.files.atomic import write_whole
from recipes.files.layout import CHECKPOINTS, ORIGIN, RECIPE, checkpoint_step, checkpoint_steps, step_folder
from recipes.files.reading import is_folder, names_in, read_text, user_path
from recipes.recipe.fields import COMMAND_LINE, field_types, toml, value_of
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import stage_of
from recipes.training.run_folder import step_of
from recipes.training.same_run import plugin_notes, read_data_state, versions_in
from recipes.weights.description import differences as model_differences
from recipes.weights.description import read_description

SETTING = "run.continue_from"
OF_WEIGHTS = ("rope_", "logit_softcap")
"""Beginnings of the fields of a model that its weights were trained with, although their tensors fit any value."""
FREE = ("name", "weights", "config", "upcycle", "init_std", "dropout", *OF_WEIGHTS)
"""Beginnings of the fields of a model that a fork may change."""
OF_TEXT = ("data.validation_fraction", "data.text_field", "data.text_documents")
"""Fields that decide which tokens a source consists of."""
CONTINUED = ("step", "sequences", "tokens", "history", "trained_on", "skipped_in_a_row", "loss_window")
"""What a fork takes over of the trunk's progress. Its goodput and its page at Weights & Biases begin anew."""


def find_trunk(recipe: Recipe, *, log: Callable[[str], None], origins: Mapping[str, str] | None = None) -> Path:
    """The checkpoint that run.continue_from names: the same at every start of the fork until it has its
    own. origins: of the fields of the recipe, see LoadedRecipe.

    Raises UserError if there is none that is whole, or if the recipe cannot continue from it.
    """
    named = recipe.run.continue_from
    if (begun := _begun_from(recipe)) is not None:
        if not is_folder(begun):
            raise UserError(
                f"{SETTING}: {recipe.run.folder} began from {begun}, which is gone; bring it back, or write another"
                " run.name to fork from what is left"
            )
        _require_whole(begun)
    elif named.rpartition("@")[2].isdecimal() and not user_path(named).exists():
        trunk, _, step = named.rpartition("@")
        begun = _of_step(_checkpoints_in(trunk, recipe), int(step))
    else:
        begun = _newest(_checkpoints_in(named, recipe), log)
    problems = [*trunk_differences(recipe, begun)]
    notes = plugin_notes(begun.absolute().parents[1] / RECIPE, recipe, step_of(begun))
    for line, is_own in (*changed_computation(recipe, begun, origins), *((note, True) for note in notes)):
        if is_own:
            log(line)
        else:
            problems.append(line)
    if problems:
        lines = "".join(f"\n  {line}" for line in problems)
        raise UserError(f"{SETTING}: this recipe cannot continue from {begun}:{lines}")
    return begun


def _begun_from(recipe: Recipe) -> Path | None:
    """The checkpoint that an earlier start of this fork began from, unless the recipe names another trunk now."""
    file = recipe.run.folder / ORIGIN
    if not file.is_file():
        return None
    try:
        origin = json.loads(read_text(file))
        begun = Path(origin["checkpoint"])
        if checkpoint_step(begun.name) is None:
            raise ValueError(f"{str(begun)[:100]!r} is no checkpoint")
        return begun if origin["continue_from"] == recipe.run.continue_from else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({error}); remove it, or write another run.name") from None


def _checkpoints_in(name: str, recipe: Recipe) -> list[Path]:
    """The complete checkpoints of a run folder or of its `checkpoints` folder, or the one at this path."""
    folder = user_path(name)
    if not is_folder(folder):
        raise UserError(f"{SETTING}: {folder} {'is not a folder' if folder.exists() else 'does not exist'}")
    if recipe.run.folder.resolve() in {folder.resolve(), *folder.resolve().parents[:2]}:
        raise UserError(
            f"{SETTING}: {folder} belongs to this run itself; give the fork another name (--run.name OTHER)"
        )
    if folder in (step_folder(folder.parent, step) for step in checkpoint_steps(folder.parent)):
        return [folder]
    inner = folder / CHECKPOINTS if CHECKPOINTS in names_in(folder) else folder
    if steps := checkpoint_steps(inner):
        return [step_folder(inner, step) for step in steps]
    writing = f"; {left_overs(inner)[0].name} is still being written" if left_overs(inner) else ""
    raise UserError(f"{SETTING}: {folder} holds no complete checkpoint{writing}")


def _of_step(checkpoints: list[Path], step: int) -> Path:
    path = step_folder(checkpoints[0].parent, step)
    if path not in checkpoints:
        steps = [step_of(path) for path in checkpoints]
        kept = ", ".join(map(str, steps[:20])) + (f" ... {steps[-1]}" if len(steps) > 20 else "")
        raise UserError(
            f"{SETTING}: {checkpoints[0].parent} has no checkpoint of step {step}; it has those of {kept}"
            " (checkpoint.keep_every keeps more)"
        )
    _require_whole(path)
    return path


def _newest(checkpoints: list[Path], log: Callable[[str], None]) -> Path:
    """The newest one that shows no damage. Those that do are only named: the trunk will set them aside."""
    problems = []
    for path in reversed(checkpoints):
        try:
            check(path.parent, step_of(path))
        except Damage as damage:
            problems.append(str(damage))
        else:
            for problem in problems:
                log(f"{problem}; an older one is used")
            return path
    raise UserError(f"{SETTING}: no checkpoint can be used: {'; '.join(problems)}")


def _require_whole(path: Path) -> None:
    try:
        check(path.parent, step_of(path))
    except Damage as damage:
        raise UserError(f"{SETTING}: {damage}; name another one with @STEP") from None


def trunk_recipe(checkpoint: Path, fork: type[Recipe] = Recipe) -> Recipe:
    """The recipe of the run that made this checkpoint, with the fork's plug-ins. Raises UserError if it is gone."""
    file = checkpoint.absolute().parents[1] / RECIPE
    try:
        return load(file, rules=False, kind=fork if versions_in(file).keys() <= fork.versions.keys() else None)
    except TemporaryError:
        raise
    except UserError as error:
        raise UserError(f"{SETTING}: the recipe of the run that made {checkpoint} cannot be read: {error}") from None


def trunk_differences(recipe: Recipe, checkpoint: Path) -> Iterator[str]:
    """Why a recipe cannot continue from a checkpoint of another run, one line each."""
    done = step_of(checkpoint)
    trunk, recipe = stage_of(trunk_recipe(checkpoint, type(recipe)), done).recipe, stage_of(recipe, done).recipe
    reasons = {"run.seed": "the data order follows it"}
    reasons |= {key: "the weights are of that model" for key in field_types() if key.startswith("model.")}
    if trunk.data.sources.keys() & recipe.data.sources.keys():
        reasons |= dict.fromkeys(OF_TEXT, "a source that goes on would be other text")
    for key, why in reasons.items():
        was, now = value_of(trunk, key), value_of(recipe, key)
        if was != now and not key.startswith(tuple(f"model.{name}" for name in FREE)):
            yield f"{key}: {toml(was)} in the trunk, {toml(now)} now; {why}, so write {toml(was)}"
    if trunk.optimizer.name != recipe.optimizer.name:
        yield (
            f"optimizer.name: {toml(trunk.optimizer.name)} in the trunk, {toml(recipe.optimizer.name)} now; their"
            f' moments are not the same. To take the weights alone, write model.weights = "{checkpoint}" instead'
        )
    if recipe.run.steps <= done:
        yield f"run.steps: {recipe.run.steps} now, but the trunk's {done} steps count; write more than {done}"


def changed_computation(
    recipe: Recipe, checkpoint: Path, origins: Mapping[str, str] | None
) -> Iterator[tuple[str, bool]]:
    """A line for each value that the weights of a checkpoint were not trained with, and whether the fork may use it.

    It may use what it writes itself: on the command line, in its stage, or in a file unless the trunk's recipe has the
    same value outside of its stages. origins: None = every field is written in a file.
    """
    stage, usual = stage_of(recipe, step_of(checkpoint)), trunk_recipe(checkpoint, type(recipe)).model
    model, in_stage = stage.recipe.model, recipe.stages[stage.number].changes if recipe.stages else {}
    for name, theirs in model_differences(model, read_description(checkpoint)[0]):
        if model.by_transformers:  # its config.json says it
            is_own = any(part in name for part in ("rope", "position", "drop"))
            key, now, remedy = f"model.config: {name}", model.settings.get(name), ""
        elif name.startswith(OF_WEIGHTS):
            key, now = f"model.{name}", getattr(model, name)
            origin = (origins or {}).get(key)
            is_own = key in in_stage or origin == COMMAND_LINE
            is_own |= (origins is None or origin is not None) and now != getattr(usual, name)
            remedy = f", or --{key} {toml(now)} to change it"
        else:  # trunk_differences() has it
            continue
        if is_own:
            yield f"{key} is {toml(now)} from here on; {checkpoint} was trained with {toml(theirs)}", True
        else:
            said = f"{key}: {toml(theirs)} in {checkpoint}, {toml(now)} now, which the fork does not write itself"
            yield f"{said}; write {toml(theirs)} to go on with it{remedy}", False


def taken_over(progress: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """What the fork takes over of the progress in this checkpoint."""
    taken = {key: progress[key] for key in CONTINUED if key in progress}
    if "history" not in taken:  # of an older version, which had neither stages nor forks
        trunk = stage_of(trunk_recipe(checkpoint), step_of(checkpoint)).recipe
        entries = read_data_state(checkpoint)["sources"]
        length, sources = trunk.batch.sequence_length, trunk.data.sources
        window = Window(max(1, trunk.data.shuffle_tokens // length) * length, False)
        raw = () if trunk.data.has_pairs else sources
        windows = {name: window for name in raw if not entries.get(name, {}).get("prepared", is_prepared(name))}
        sequences = progress["step"] * trunk.batch.global_batch_size
        taken["history"] = to_json((Segment(sources, length, sequences, windows),))
    return taken


def note_origin(recipe: Recipe, checkpoint: Path) -> None:
    """Write origin.json, which says what the run is a fork of."""
    progress: dict[str, Any] = read_manifest(checkpoint).state["progress"]
    origin = {
        "continue_from": recipe.run.continue_from,
        "checkpoint": str(checkpoint.resolve()),
        "run_folder": str(checkpoint.resolve().parents[1]),
        "step": step_of(checkpoint),
        "tokens": progress.get("tokens"),
        "wandb_id": progress.get("wandb_id"),
    }
    write_whole(recipe.run.folder / ORIGIN, json.dumps(origin, indent=2) + "\n", sync=True)
