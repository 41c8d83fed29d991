"""The run folder, OUTPUT/NAME, which belongs to one recipe. Imports no torch."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.errors import TemporaryError, UserError
from recipes.data.config import DataConfig
from recipes.files.atomic import PART, cut_back, keep_rows, write_whole
from recipes.files.layout import (
    CHECKPOINTS,
    CURVES,
    DATA,
    ENVIRONMENT,
    FLOAT8_SHARES,
    LOG_FILE,
    METRICS,
    QUARANTINE,
    RECIPE,
    checkpoint_steps,
    holds_results,
)
from recipes.files.lock import ANOTHER_NAME, LOCK, FolderLock, begun_meanwhile
from recipes.files.reading import fault, is_folder, named_faults, names_in, read_text
from recipes.recipe.fields import field_types, toml, value_of
from recipes.recipe.load import load, to_toml
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import stage_of, stages_of

if TYPE_CHECKING:
    from recipes.weights.locate import Weights

PLOT = Path(__file__).resolve().parents[2] / "scripts/plot.py"
DRAWING_SECONDS = 60.0
"""Seconds. On a machine that has never drawn, matplotlib first looks for fonts."""
SILLY = ".nfs"
"""Prefix of the names that NFS gives to deleted files that are still open."""

# Fields that must not change when a run resumes. Everything else (length, mesh, micro-batches, precision, compile,
# checkpoints, metrics ...) may.
IDENTITY = (
    "run.continue_from",
    "run.seed",
    "model.",
    "data.source",
    "data.mixture",
    "data.shuffle_tokens",
    "data.text_field",
    "data.prompt_",
    "data.answer_",
    "data.messages_field",
    "data.chat_date",
    "data.long_pairs",
    "data.tokenizer",
    "data.bos",
    "data.document_mask",
    "data.validation_fraction",
    "batch.sequence_length",
    "batch.global_batch_size",
    "optimizer.",
    "schedule.",
)


def identity_differences(old: Recipe, new: Recipe) -> list[str]:
    """Why `new` cannot continue in the run folder of `old`: one line per field that must not change and did.

    Stages that have begun are compared step by step; those to come may change.
    """
    if not old.stages and not new.stages:
        return _differences(old, new, old.run.steps)
    done = max([1, *checkpoint_steps(new.run.folder / CHECKPOINTS)])
    found: dict[str, None] = {}
    for was in stages_of(old):
        for now in stages_of(new):
            first, last = max(was.first, now.first), min(was.last, now.last, done)
            if first >= last:
                continue
            lines = _differences(was.recipe, now.recipe, was.schedule_span[1])
            if was.own_schedule != now.own_schedule or (was.own_schedule and was.first != now.first):
                lines.append("schedule: it begins with another step")
            found |= dict.fromkeys(f"steps {first + 1} to {last}, done already: {line}" for line in lines)
    return list(found)


def _differences(old: Recipe, new: Recipe, steps: int) -> list[str]:
    """The differences between two recipes without stages. steps: those of the old schedule."""
    same_phases = old.schedule.phases(steps) == new.schedule.phases(steps)
    differences = [
        f"{key}: {toml(was)} in the folder's recipe.toml, {toml(now)} now"
        for key in field_types()
        # The last three are used before the first step.
        if key.startswith(IDENTITY) and key not in ("model.weights", "model.config", "model.upcycle")
        if (was := value_of(old, key)) != (now := value_of(new, key))
        # A share of the run may be written where its steps were, or the other way round.
        if not (key.endswith(("warmup_steps", "decay_steps")) and same_phases)
    ]
    was, now = old.data.mixture, new.data.mixture
    if was == now and list(was) != list(now):  # equal as dicts, but the data order follows the order of the lines
        orders = f"{toml(was)} in the folder's recipe.toml, {toml(now)} now"
        differences.append(f"data.mixture: the sources are in a different order: {orders}")
    return differences


def check_output_folder(recipe: Recipe) -> None:
    """Raises UserError if the run's files cannot be written, or if the folder holds something else."""
    folder = recipe.run.folder
    if not is_folder(folder):
        if folder.is_file():
            raise UserError(f"{folder} is a file, but the run's files go there; {ANOTHER_NAME}")
        place = next(parent for parent in folder.absolute().parents if parent.exists())
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            what = "may not be written to" if place.is_dir() else "is no folder"
            raise UserError(f"run.output = {toml(recipe.run.output)}: {place} {what}; write another run.output")
        return
    # Empty, or left by a killed start.
    names = [name for name in names_in(folder) if name != LOCK and not name.startswith((PART, SILLY))]
    _require_writable(folder, names)
    if not names:
        return
    if RECIPE not in names and holds_results(folder):
        raise UserError(
            f"{folder} holds a run without its {RECIPE}, which says how it trains. Bring it back, or write it anew"
            " with the recipe and the options that the run had: python train.py RECIPE [--section.field value ...]"
            f" --run.name OTHER --check > {folder / RECIPE}"
        )
    if RECIPE not in names:
        raise UserError(f"{folder} is not empty and has no {RECIPE}, so it is not a run folder; {ANOTHER_NAME}")
    if not holds_results(folder):  # a run that ended before its first logged step
        return
    require_resumable(recipe, folder)
    try:
        old = load(folder / RECIPE, rules=False)
    except TemporaryError:
        raise
    except UserError as error:
        reason = "was written with another version of the recipe schema, or its model is gone"
        raise UserError(f"{folder} {reason}; {ANOTHER_NAME}\n{error}") from None
    require_same_run(old, recipe, folder)


def _require_writable(folder: Path, names: Sequence[str]) -> None:
    """Raises UserError if this user may not write in the folder, or what a run changes in it."""
    for place in (folder, *(folder / name for name in (CHECKPOINTS, METRICS, LOG_FILE) if name in names)):
        if os.access(place, os.W_OK) or (place.is_symlink() and not place.exists()):  # that is refused below
            continue
        with named_faults(place):
            os.stat(place)
        raise UserError(
            f"{place} may not be written to by this user. If another one began the run, chmod -R g+rwX {folder} lets"
            f" the group go on with it (and umask 002 in what starts it); or {ANOTHER_NAME}"
        )


def require_resumable(recipe: Recipe, place: Path | str) -> None:
    """Raises UserError if the recipe may not resume the run that this place holds."""
    if recipe.checkpoint.resume == "never":
        raise UserError(
            f'{place} already holds this run, and checkpoint.resume = "never"; {ANOTHER_NAME}'
            ', or continue the run with checkpoint.resume = "auto"'
        )


def require_same_run(old: Recipe, new: Recipe, place: Path | str) -> None:
    """Raises UserError if `new` cannot continue the run of `old` that this place holds."""
    if differences := identity_differences(old, new):
        lines = "".join(f"\n  {line}" for line in differences)
        raise UserError(f"{place} belongs to a different recipe:{lines}\n{ANOTHER_NAME}, or put these keys back")


def claim_run_folder(recipe: Recipe, *, done: int, environment: dict[str, Any], lock: FolderLock) -> list[str]:
    """Make the folder this run's own: write recipe.toml and environment.json. Returns notes for the user.

    Nothing is lost: a folder with results but no checkpoint to resume from is moved aside, a recipe that changed is
    kept under another name, and only the rows of steps that will be repeated are cut off. done: steps of the checkpoint
    that the run resumes from, or 0. environment: the content of environment.json. lock: of the folder; held already if
    the folder was there when the run looked for checkpoints. Raises UserError if another process uses the folder, or
    has begun a run there since, or it cannot be written.
    """
    folder = recipe.run.folder
    notes: list[str] = []
    if folder.is_symlink():  # old and new files stay where the link points
        folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if lock.take(folder, log=notes.append) and holds_results(folder):
            raise begun_meanwhile(folder)
        if done == 0 and holds_results(folder):
            aside = next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}.{n}")).exists())
            folder.rename(aside)
            notes.append(f"{folder} held results but no checkpoint to resume from; they are in {aside} now")
            folder.mkdir(parents=True, exist_ok=True)
            lock.take(folder, log=notes.append)
        if done < recipe.run.steps:
            text, file = to_toml(recipe), folder / RECIPE
            if done > 0 and file.is_file() and (old := file.read_text(encoding="utf-8")) != text:
                notes += _note_schedule(load(file, rules=False), recipe, done)
                kept = folder / f"recipe-until-{done:08d}.toml"
                if not kept.exists():  # if it exists, no step of the recipe in `file` remains
                    write_whole(kept, old, sync=True)
            _update(file, text)
            # Rewritten up to the present step; the stages before had other sources, too.
            present = set(stage_of(recipe, done).recipe.data.sources)
            earlier = {name for stage in stages_of(recipe) if stage.last <= done for name in stage.recipe.data.sources}
            keep_rows(folder / QUARANTINE, "source", [*(earlier - present)].__contains__)
            _update(folder / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
        for name in (METRICS, FLOAT8_SHARES):
            cut_back(folder / name, done)
    except OSError as error:
        place = error.filename or folder
        raise fault(f"{place} cannot be written", error, "; write another run.output") from None
    return notes


def _update(file: Path, text: str) -> None:
    """Replace the text of the file, if it differs, atomically."""
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        write_whole(file, text, sync=True)


def read_data_state(checkpoint: Path) -> dict[str, Any]:
    """The data state of a checkpoint, which its data order depends on. Raises UserError if it cannot be read."""
    file = checkpoint / DATA
    try:
        facts = json.loads(read_text(file))
        sources = facts.get("sources") if isinstance(facts, dict) else None
        if not isinstance(sources, dict) or not all(isinstance(about, dict) for about in sources.values()):
            raise ValueError("unexpected content")
        return facts
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read ({error}); remove {checkpoint} to resume from an older one") from None


def resumed_data_state(checkpoint: Path | None) -> dict[str, Any]:
    """The data state at this checkpoint; empty if the run does not begin from one."""
    if checkpoint is None:
        return {}
    try:
        return read_data_state(checkpoint)
    except TemporaryError:
        raise
    except UserError:  # loading the checkpoint reports what is wrong with it
        return {}


def require_same_data(checkpoint: Path, data_state: dict[str, Any]) -> None:
    """Raises UserError if the data order now yields other tokens than those the checkpoint was trained on."""
    then = read_data_state(checkpoint)
    same_tokenizer = then.get("tokenizer") == data_state["tokenizer"]
    texts, others = [], []
    for name, now in data_state["sources"].items():
        if (was := then["sources"].get(name)) is None:  # a stage or a fork begins to read it
            continue
        # Older checkpoints have neither "text" nor "prepared".
        if ("text" in was and was["text"] != now["text"]) or (same_tokenizer and was.get("tokens") != now["tokens"]):
            texts.append(f"other text behind {toml(name)}: {was.get('about')} then, {now['about']} now")
        elif "prepared" in was and was["prepared"] != now["prepared"]:
            kinds = f"{_kind(was['prepared'])} then, {_kind(now['prepared'])} now"
            others.append(f"another order of {toml(name)}: {kinds}")
    if not same_tokenizer:
        others.append("another tokenizer" + (' (one of "train:N" changes with the text)' if texts else ""))
    problems = texts + others
    if problems:
        raise UserError(
            f"{checkpoint} was trained on {'; '.join(problems)}. Its data order does not apply to them"
            "; restore the old files (.txt files of a run from before data.text_documents existed need"
            " --data.text_documents pieces), or start another run (--run.name OTHER)"
        )


def _kind(prepared: bool) -> str:
    return "prepared shards" if prepared else "text that is tokenized during training"


def _note_schedule(old: Recipe, new: Recipe, done: int) -> list[str]:
    """How a change of run.steps, or of stages, changes the learning rate of the next step."""
    before = old if old.stages else replace(old, run=replace(old.run, steps=max(old.run.steps, done + 1)))
    was, now = stage_of(before, done), stage_of(new, done)
    rates = [stage.learning_rate(done) for stage in (was, now)]
    if rates[0] == rates[1]:
        return []
    warmup, longer = (recipe.schedule.phases(recipe.run.steps)[0] for recipe in (old, new))
    again = ""
    if not (old.stages or new.stages) and warmup <= done < longer:
        again = f"; a share of the run, the warm-up lasts until step {longer} now"
    what = f"run.steps is {new.run.steps} instead of {old.run.steps}"
    if new.run.steps == old.run.steps:
        what = "the stages have changed"
    return [f"{what}: the learning rate of step {done + 1} is {rates[1]:.2e} instead of {rates[0]:.2e}{again}"]


def draw_curves(folder: Path, *, log: Callable[[str], None]) -> None:
    """Draw a run's curves.png. In a process of its own: whatever happens there, the run ends as it does without."""
    command = [sys.executable, str(PLOT), str(folder), "--out", str(folder / CURVES)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DRAWING_SECONDS,
            start_new_session=True,
        )
        said = done.stderr.strip() or f"exit code {done.returncode}"
        failure = said.splitlines()[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"it took more than {DRAWING_SECONDS:.0f} s"
    except OSError as error:
        failure = str(error)
    if failure:
        log(f"{CURVES} was not drawn: {failure}; scripts/plot.py {folder} draws it later")


def data_of_run(weights: "Weights") -> DataConfig | None:
    """How the run of a checkpoint, or of its export, read its data; None for weights from elsewhere."""
    for folder in weights.path.absolute().parents[:2]:
        if (folder / RECIPE).is_file():
            recipe = load(folder / RECIPE, rules=False)
            step = weights.path.name.removeprefix("step-")  # an export is made after the last step
            return stage_of(recipe, int(step) - 1 if step.isdecimal() else recipe.run.steps).recipe.data
    return None
