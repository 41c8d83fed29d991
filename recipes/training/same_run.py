"""Whether a recipe may go on with the run that a folder holds: the same fields, and the same text. Imports no torch."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.errors import TemporaryError, UserError, listed
from recipes.data.config import DataConfig
from recipes.files.layout import CHECKPOINTS, DATA, RECIPE, checkpoint_steps
from recipes.files.lock import another_name
from recipes.files.reading import read_text
from recipes.recipe.fields import field_types, toml, value_of
from recipes.recipe.load import load, read_toml
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import stage_of, stages_of

if TYPE_CHECKING:
    from recipes.weights.locate import Weights

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
    "data.border_targets",
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
        return _differences(old, new, old.schedule.steps or old.run.steps)
    done = max([1, *checkpoint_steps(new.run.folder / CHECKPOINTS)])
    lines: dict[str, None] = {}
    for was in stages_of(old):
        for now in stages_of(new):
            first, last = max(was.first, now.first), min(was.last, now.last, done)
            if first >= last:
                continue
            changed = _differences(was.recipe, now.recipe, was.schedule_span[1])
            if was.own_schedule != now.own_schedule or (was.own_schedule and was.first != now.first):
                changed.append("schedule: it begins with another step")
            lines |= dict.fromkeys(f"steps {first + 1} to {last}, done already: {line}" for line in changed)
    return list(lines)


def _differences(old: Recipe, new: Recipe, steps: int) -> list[str]:
    """The differences between two recipes without stages. steps: those of the old schedule."""
    added = [one for kind in ("optimizer", "schedule") for one in new.added.get(kind, {}).values() if one.fields]
    own = tuple(f"{entry.name}." for entry in added)
    same_phases = old.schedule.phases(steps) == new.schedule.phases(steps)
    differences = [
        f"{key}: {toml(was)} in the folder's recipe.toml, {toml(now)} now"
        for key in field_types(type(new))
        # The last three are used before the first step.
        if key.startswith((*IDENTITY, *own)) and key not in ("model.weights", "model.config", "model.upcycle")
        if (was := value_of(old, key)) != (now := value_of(new, key))
        # A share of the run may be written where its steps were, or the other way round.
        if not (key.endswith(("warmup_steps", "decay_steps")) and same_phases)
        if not (key == "data.border_targets" and not (old.data.document_mask or new.data.document_mask))
    ]
    was, now = old.data.mixture, new.data.mixture
    if was == now and list(was) != list(now):  # equal as dicts, but the data order follows the order of the lines
        orders = f"{toml(was)} in the folder's recipe.toml, {toml(now)} now"
        differences.append(f"data.mixture: the sources are in a different order: {orders}")
    return differences


def require_resumes(recipe: Recipe, file: Path | None, *, where: Path | str) -> None:
    """Raises UserError if a recipe may not go on with the run that this place holds. file: its recipe.toml, if any."""
    other = another_name(recipe.run.folder)
    if recipe.checkpoint.resume == "never":
        raise UserError(
            f'{where} already holds this run, and checkpoint.resume = "never"; {other}'
            ', or continue the run with checkpoint.resume = "auto"'
        )
    if file is None:
        return
    gone = [f"{name} ({version})" for name, version in versions_in(file).items() if name not in recipe.versions]
    if gone:
        rule = f"was trained with {listed(gone)}, which this recipe does not load; name what is missing in [plugins]"
        raise UserError(f"{where} {rule} modules, or {other}")
    try:
        old = load(file, rules=False, kind=type(recipe))
    except TemporaryError:
        raise
    except UserError as error:
        reason = "was written with another version of the recipe schema, or its model is gone"
        raise UserError(f"{where} {reason}; {other}\n{error}") from None
    if differences := identity_differences(old, recipe):
        lines = "".join(f"\n  {line}" for line in differences)
        raise UserError(f"{where} belongs to a different recipe:{lines}\n{other}, or put these keys back")


def versions_in(file: Path) -> dict[str, str]:
    """The plug-ins that a resolved recipe was trained with: name -> version and hash of the content."""
    found = read_toml(file).get("plugins", {}).get("versions", {})
    return found if isinstance(found, dict) else {}


def plugin_notes(file: Path, new: Recipe, done: int) -> list[str]:
    """Which plug-ins of the recipe in this file have other content now."""
    return [
        f"plug-in {name} is {now or 'not loaded'} from step {done + 1} on; before, it was {was}"
        for name, was in versions_in(file).items()
        if (now := new.versions.get(name)) != was
    ]


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


def resumed_data_state(checkpoint: Path) -> dict[str, Any]:
    """The data state at this checkpoint that the run begins from; empty if it cannot be read."""
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


def schedule_notes(old: Recipe, new: Recipe, done: int) -> list[str]:
    """How a change of run.steps, or of stages, changes the learning rate of the next step."""
    before = old if old.stages else replace(old, run=replace(old.run, steps=max(old.run.steps, done + 1)))
    was, now = stage_of(before, done), stage_of(new, done)
    rates = [stage.learning_rate(done) for stage in (was, now)]
    if rates[0] == rates[1]:
        return []
    warmup, longer = (stage.recipe.schedule.phases(stage.schedule_span[1])[0] for stage in (was, now))
    again = ""
    if not (old.stages or new.stages) and warmup <= done < longer:
        again = f"; a share of the run, the warm-up lasts until step {longer} now"
    what = f"run.steps is {new.run.steps} instead of {old.run.steps}"
    if new.run.steps == old.run.steps:
        what = "the stages have changed"
    return [f"{what}: the learning rate of step {done + 1} is {rates[1]:.2e} instead of {rates[0]:.2e}{again}"]


def data_of_run(weights: "Weights") -> DataConfig | None:
    """How the run of a checkpoint, or of its export, read its data; None for weights from elsewhere."""
    path = weights.path.absolute()
    for folder in (path, *path.parents[:2]):  # the copy of a checkpoint at a server has the recipe in it
        if (folder / RECIPE).is_file():
            recipe = load(folder / RECIPE, rules=False, only=("run", "data"))
            step = re.match(r"step-(\d+)", path.name)  # an export is made after the last step
            return stage_of(recipe, int(step[1]) - 1 if step else recipe.run.steps).recipe.data
    return None
