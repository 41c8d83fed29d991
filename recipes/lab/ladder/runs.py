"""Train the runs of a ladder one after another, and read what they reached. Imports no torch."""

import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean

from parallel.errors import UserError
from recipes.files.layout import CHECKPOINTS, DATA, METRICS, RECIPE, checkpoint_steps, step_folder
from recipes.files.reading import json_object, logged_rows, read_text
from recipes.lab.ladder.fit import EndedRun
from recipes.lab.ladder.rungs import Budget
from recipes.lab.sweep.runner import train_apart, write_recipe
from recipes.recipe.fields import field_types, toml, value_of
from recipes.recipe.load import load
from recipes.recipe.rules_ladder import conditions_of
from recipes.recipe.schema import Recipe
from recipes.training.same_run import identity_differences

TIMEOUT = 7 * 86_400.0
"""Seconds after which a run is treated as hung, beyond run.hang_timeout, which sees most hangs."""
SCORED = ("validation.batches", "validation.source", "fsdp.param_dtype", "fsdp.reduce_dtype", "experts.")
"""Beginnings of fields that a run may change between two starts, but its loss depends on, besides conditions_of()."""


def runs_of(budgets: Sequence[Budget]) -> list[Recipe]:
    """The runs that these consist of, each once, trunks before their forks."""
    return list({recipe.run.name: recipe for budget in budgets for recipe in budget.recipes}.values())


def write_recipes(recipes: Sequence[Recipe], folder: Path, *, processes: int) -> None:
    """Write every run as a file that scripts/run.sh takes. Raises UserError if one breaks a rule, if a run of this name
    was trained with other values, or if the folder cannot be written."""
    for recipe in recipes:
        load(write_recipe(recipe, folder), processes=processes)
        if (trained := recipe.run.folder / RECIPE).exists():
            _require_same(load(trained, rules=False, kind=type(recipe)), recipe)


def _require_same(old: Recipe, new: Recipe) -> None:
    """Raises UserError if the loss of the old run is not that of the new one."""
    was, now = (
        {key: value_of(recipe, key) for key in field_types() if key.startswith(SCORED)} | conditions_of(recipe)
        for recipe in (old, new)
    )
    differences = [f"{key}: {toml(was[key])}, {toml(now[key])} now" for key in now if was[key] != now[key]]
    # A ladder may be moved to another folder, and its trunks with it.
    differences += [line for line in identity_differences(old, new) if not line.startswith("run.continue_from")]
    if differences:
        raise UserError(
            f"{new.run.folder} was trained with other values, so its loss does not belong to this ladder:"
            f" {differences[0]}; give the options, the recipe and the NPROC of before, or write another --output"
        )


def train_all(recipes: Sequence[Recipe], folder: Path, *, processes: int, log: Callable[[str], None]) -> dict[str, str]:
    """Train the runs that are not done, resuming those that began. Returns why some failed, by name; others go on.

    Raises UserError if one of them read other text than the first, or if one failed and the disk is full.
    """
    write_recipes(recipes, folder, processes=processes)
    failed: dict[str, str] = {}
    texts: dict[str, str] = {}
    for number, recipe in enumerate(recipes, 1):
        name, which = recipe.run.name, f"[{number}/{len(recipes)}] {recipe.run.name}"
        trunk = recipe.run.continue_from.rpartition("/")[2].rpartition("@")[0]
        seconds = 0.0
        if is_done(recipe):
            problem = _problem(recipe)
        elif trunk in failed:
            problem = f"{trunk} failed, which it continues from"
        else:
            log(f"{which}: {recipe.run.steps:,} steps of {recipe.batch.global_batch_size} sequences")
            ended = train_apart(recipe, folder, processes=processes, timeout=TIMEOUT)
            problem = _problem(recipe) if ended.outcome == "done" else f"{ended.outcome}: {ended.reason}"
            seconds = ended.seconds
            if problem:
                _require_space(recipe, folder, problem)
        if problem:
            failed[name] = problem
            log(f"{which}: FAILED, {problem}")
        else:
            texts[_texts_of(recipe)] = name
            if len(texts) > 1:
                raise UserError(
                    f"{' and '.join(texts.values())} read different texts under the same name, so their losses do not"
                    f" belong together; remove those that read the wrong one from {folder / 'runs'} and put the right"
                    " one back, or write another --output"
                )
            when = f"after {seconds:,.0f} s" if seconds else "done before"
            log(f"{which}: loss {losses_of(recipe)[recipe.run.steps]:.4f}, {when}")
    return failed


def _problem(recipe: Recipe) -> str:
    """Why a run that has ended says nothing; "" if it does."""
    if not is_done(recipe):
        return "it has no validation of its last step, or no checkpoint"
    loss = losses_of(recipe)[recipe.run.steps]
    return "" if isfinite(loss) else f"its loss is {loss}; remove {recipe.run.folder} to train it again"


def is_done(recipe: Recipe) -> bool:
    """Whether the run has its last checkpoint and a validation of that step."""
    saved = recipe.run.steps in checkpoint_steps(recipe.run.folder / CHECKPOINTS)
    return saved and recipe.run.steps in losses_of(recipe)


def _texts_of(recipe: Recipe) -> str:
    """Fingerprints of the tokens that a finished run was trained on, and of those of its validation sources."""
    data = json_object(read_text(step_folder(recipe.run.folder / CHECKPOINTS, recipe.run.steps) / DATA))
    return str([sorted(text["tokens"] for text in data.get(part, {}).values()) for part in ("sources", "validation")])


def losses_of(recipe: Recipe) -> dict[int, float]:
    """Step -> validation loss, the mean over the texts."""
    by_step = {}
    for row in logged_rows(recipe.run.folder / METRICS):
        values = [value for key, value in row.items() if key.split("/")[0] == "validation_loss"]
        if values:
            by_step[row["step"]] = fmean(float("nan") if value is None else value for value in values)
    return by_step


def _epochs(budget: Budget) -> float:
    """How often the run had read the text that it read most."""
    rows = [row["epochs"] for row in logged_rows(budget.recipes[-1].run.folder / METRICS) if row.get("epochs")]
    return max((times for times in (rows[-1].values() if rows else ()) if times is not None), default=0.0)


def _require_space(recipe: Recipe, folder: Path, problem: str) -> None:
    """Raises UserError if there is no room for a checkpoint: no later run would do better."""
    needed = 12 * recipe.model.num_params() + 2**20  # weights and two moments in float32, and the logs
    try:
        with tempfile.TemporaryFile(dir=folder / "logs") as file:
            os.posix_fallocate(file.fileno(), 0, needed)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(
                f"{recipe.run.name} failed ({problem}), and {folder} has no room for the {needed / 1e6:,.0f} MB of its"
                f" checkpoint: {error.strerror}; make room, and the same command goes on"
            ) from None


def point_of(budget: Budget) -> EndedRun | None:
    """What a finished run reached; None unless all its parts are done and sound."""
    if any(map(_problem, budget.recipes)):
        return None
    curve: dict[int, float] = {}
    for recipe, after in zip(budget.recipes, [*budget.recipes[1:], None], strict=True):
        last = int(after.run.continue_from.rpartition("@")[2]) if after else budget.steps
        curve |= {step: loss for step, loss in losses_of(recipe).items() if step <= last}
    shares = tuple((step / budget.steps, loss) for step, loss in sorted(curve.items()))
    rung, loss = budget.rung, curve[budget.steps]
    return EndedRun(rung.name, budget.seed, rung.parameters, budget.tokens, budget.flops, loss, shares, _epochs(budget))
