"""Finds the checkpoint that a run begins from, its newest or one of its trunk, and continues from it."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.registry import parts_not_ours
from parallel.errors import UserError
from recipes.checkpoint.checkpoints import Checkpoints
from recipes.checkpoint.folder import newest_whole, none_left
from recipes.data.history import from_json
from recipes.data.loader import DataLoader
from recipes.evaluation.beside import MOST, waiting
from recipes.files.layout import CHECKPOINTS, DATA, SAVED
from recipes.files.reading import read_text
from recipes.recipe.load import LoadedRecipe
from recipes.recipe.schema import Recipe
from recipes.training.run_folder import is_in_memory, is_of_trunk, own_checkpoint, step_of
from recipes.training.same_run import require_same_data
from recipes.weights.description import Description, checkpoint_files
from recipes.weights.locate import Weights, find_weights, trained_description

if TYPE_CHECKING:
    from recipes.data.text.pair_format import PairFormat
    from recipes.data.text.tokenizer import Tokenizer
    from recipes.training.build import Built


def find_checkpoint(loaded: LoadedRecipe, names: Collection[str], *, log: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint of this run; if it never had one, that of the run that it forks; if it forks none,
    None. Sets damaged ones aside. names: of what is in the run's folder.

    Raises UserError if there were some but none is whole, TemporaryError if this cannot be determined now; and what
    find_trunk() raises.
    """
    recipe, step = loaded.recipe, None
    folder = recipe.run.folder / CHECKPOINTS
    if {CHECKPOINTS, SAVED} & {*names}:
        step = newest_whole(folder, log=log)
    if SAVED in names:
        saved = read_text(recipe.run.folder / SAVED, errors="replace")
        if step is None:
            known = saved if saved.isdecimal() else "unknown, as .saved is damaged"
            raise UserError(none_left(folder, [f"the newest was of step {known}"]))
        if saved.isdecimal() and int(saved) > step:  # a kill between the two leaves an older one
            log(f"the newest checkpoint was of step {saved}; the newest intact one now is of step {step}")
    if step is not None:
        return own_checkpoint(recipe, step)
    if not recipe.run.continue_from:
        return None
    from recipes.training.fork import find_trunk

    return find_trunk(recipe, log=log, origins=loaded.origins)


def describe(
    recipe: Recipe, loader: DataLoader, weights: Weights | None, checkpoint: Path | None, *, log: Callable[[str], None]
) -> Description:
    """What accompanies the weights of a run, wherever they are written. log: receives one line of text per message."""
    start = weights if recipe.model.weights else None
    if start is None and checkpoint is not None:  # weights that an earlier start named, perhaps
        start = find_weights(checkpoint)
    length = recipe.batch.sequence_length
    description = trained_description(recipe.model, loader.tokenizer, start, length=length, log=log)
    if recipe.loads:
        needed = bool(parts_not_ours(recipe.model))
        about = {"modules": recipe.loads, "versions": recipe.versions, "build_models": needed}
        description = replace(description, plugins=about)
    if loader.pairing is None or not loader.pairing.format.template:
        return description
    return _of_chats(description, loader.pairing.format, loader.tokenizer, log=log)


def _of_chats(
    description: Description, format: "PairFormat", tokenizer: "Tokenizer", *, log: Callable[[str], None]
) -> Description:
    """The description with the chat template, and with what ends its answers among what ends texts."""
    from recipes.data.text.chat import TEMPLATE, ends_of_answers
    from recipes.data.text.pair_format import template_of
    from recipes.weights.companions import GENERATION_CONFIG, TOKENIZER_CONFIG

    template, companions = template_of(format, tokenizer), dict(description.companions)
    eos = description.facts.eos_token_id
    given = eos if isinstance(eos, tuple) else () if eos is None else (eos,)
    answer_ends, note = ends_of_answers(template, tokenizer)
    if note:
        log(f"data.messages_field: {note}")
    ends = tuple(dict.fromkeys((*given, *answer_ends)))
    config = json.loads(companions.get(TOKENIZER_CONFIG, "{}"))
    config = {name: token for name, token in template.special_tokens.items() if name in format.template} | config
    config.pop("chat_template", None)
    if answer_ends and "eos_token" not in format.template:  # which may write it elsewhere
        config["eos_token"] = tokenizer.backend.id_to_token(answer_ends[0])
    texts = {TOKENIZER_CONFIG: config}
    if GENERATION_CONFIG in companions and answer_ends:
        texts[GENERATION_CONFIG] = json.loads(companions[GENERATION_CONFIG]) | {"eos_token_id": [*ends]}
    companions |= {name: json.dumps(content, indent=2) + "\n" for name, content in texts.items()}
    facts = replace(description.facts, eos_token_id=ends if ends != given else eos)
    return replace(description, facts=facts, companions={**companions, TEMPLATE: format.template})


def resume(
    recipe: Recipe,
    built: "Built",
    loader: DataLoader,
    checkpoint: Path | None,
    description: Description,
    *,
    log: Callable[[str], None],
) -> tuple[Checkpoints, Mapping[str, Any]]:
    """The checkpoints of the run, and what the one that it begins from, which is loaded, records of the run so far.

    description: what accompanies the tensors. log: receives one line of text per message.
    """
    remote = None
    if recipe.checkpoint.remote:
        from recipes.training.fetch import remote_folder

        remote = remote_folder(recipe)
    checkpoints = Checkpoints(
        recipe.run.folder / CHECKPOINTS,
        recipe.checkpoint,
        log=log,
        files=checkpoint_files(description) | {DATA: json.dumps(loader.data_state, indent=2) + "\n"},
        mark=recipe.run.folder / SAVED,
        remote=remote,
        pipeline=recipe.mesh.pipeline,
        held=(lambda: sorted(waiting(recipe.run.folder))[-MOST:]) if recipe.validation.job else tuple,
    )
    if checkpoint is None:
        return checkpoints, {}
    model, optimizer, check = built.model, built.optimizer, partial(require_same_data, data_state=loader.data_state)
    if is_in_memory(checkpoint):
        from recipes.checkpoint.memory import load

        progress = load(model, optimizer, checkpoint, check=check)
    elif is_of_trunk(checkpoint, recipe):
        from recipes.training.fork import taken_over

        progress = taken_over(checkpoints.fork(model, optimizer, checkpoint=checkpoint, check=check), checkpoint)
    else:
        progress = checkpoints.resume(model, optimizer, step=step_of(checkpoint), check=check)
    history = from_json(progress.get("history", []))  # older versions had one segment
    if not loader.continue_after(history, first_batch=progress["step"] if history else 0):
        progress.pop("loss_window", None)  # losses on other text say nothing of spikes
        for line in loader.consumed(progress["step"]):
            log(line)
    if progress["step"] < recipe.run.steps:  # a finished run reads nothing more
        loader.require_trained_on(progress.get("trained_on", {}), batches=progress["step"])
    if built.float8_all_gather:
        from parallel.float8 import precompute_scales

        precompute_scales(model)
    return checkpoints, progress
