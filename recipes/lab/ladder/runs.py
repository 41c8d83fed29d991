"""Train the runs of a ladder one after another, and read what they reached. Imports no torch."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from parallel.errors import UserError
from recipes.files.layout import CHECKPOINTS, METRICS, RECIPE, checkpoint_steps
from recipes.lab.ladder.points import Point
from recipes.lab.ladder.rungs import Budget
from recipes.lab.sweep.results import logged_rows
from recipes.lab.sweep.runner import run
from recipes.recipe.load import load, to_toml
from recipes.recipe.schema import Recipe
from recipes.training.run_folder import identity_differences

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT = 7 * 86_400.0
"""Seconds after which a run is treated as hung, beyond run.hang_timeout, which sees most hangs."""


@dataclass(frozen=True)
class Failed:
    """A run that did not end well."""

    name: str
    reason: str


def runs_of(budgets: Sequence[Budget]) -> list[Recipe]:
    """The runs that these consist of, each once, trunks before their forks."""
    return list({recipe.run.name: recipe for budget in budgets for recipe in budget.recipes}.values())


def write_recipes(recipes: Sequence[Recipe], folder: Path, *, processes: int) -> None:
    """Write every run as a file that scripts/run.sh takes. Raises UserError if one breaks a rule, or if a run of this
    name was trained with other values."""
    for place in ("recipes", "logs"):
        (folder / place).mkdir(parents=True, exist_ok=True)
    for recipe in recipes:
        path = _file(recipe, folder)
        path.write_text(to_toml(recipe), encoding="utf-8")
        load(path, processes=processes)
        trained = recipe.run.folder / RECIPE
        differences = identity_differences(load(trained, rules=False), recipe) if trained.exists() else []
        # A ladder may be moved to another folder, and its trunks with it.
        if wrong := [line for line in differences if not line.startswith("run.continue_from")]:
            raise UserError(
                f"{recipe.run.folder} was trained with other values, so its loss does not belong to this ladder:"
                f" {wrong[0]}; remove it, or write another --output"
            )


def train(recipes: Sequence[Recipe], folder: Path, *, processes: int, log: Callable[[str], None]) -> list[Failed]:
    """Train the runs that are not done, resuming those that began. Returns those that failed; others go on."""
    failed: list[Failed] = []
    for number, recipe in enumerate(recipes, 1):
        name, place = recipe.run.name, f"[{number}/{len(recipes)}] {recipe.run.name}"
        trunk = recipe.run.continue_from.rpartition("/")[2].rpartition("@")[0]
        if is_done(recipe):
            log(f"{place}: done before, loss {losses_of(recipe)[recipe.run.steps]:.4f}")
            continue
        if trunk in {one.name for one in failed}:
            failed.append(Failed(name, f"{trunk} failed, which it continues from"))
        else:
            launch = [sys.executable, str(ROOT / "scripts/launch.py"), "--standalone", f"--nproc-per-node={processes}"]
            log(f"{place}: {recipe.run.steps:,} steps of {recipe.batch.global_batch_size} sequences")
            threads = str(max(1, (os.cpu_count() or 1) // processes))
            ended = run(
                [*launch, str(ROOT / "train.py"), str(_file(recipe, folder))],
                stdout=folder / "logs" / f"{name}.out",
                stderr=folder / "logs" / f"{name}.err",
                timeout=TIMEOUT,
                environment={"OMP_NUM_THREADS": threads, **os.environ},
            )
            if ended.outcome == "done" and is_done(recipe):
                log(f"{place}: loss {losses_of(recipe)[recipe.run.steps]:.4f} after {ended.seconds:,.0f} s")
                continue
            failed.append(Failed(name, f"{ended.outcome}: {ended.reason or 'it has no validation of its last step'}"))
        log(f"{place}: FAILED, {failed[-1].reason}")
    return failed


def is_done(recipe: Recipe) -> bool:
    """Whether the run has its last checkpoint and a validation of that step."""
    saved = recipe.run.steps in checkpoint_steps(recipe.run.folder / CHECKPOINTS)
    return saved and recipe.run.steps in losses_of(recipe)


def losses_of(recipe: Recipe) -> dict[int, float]:
    """Step -> validation loss, the mean over the texts."""
    found = {}
    for row in logged_rows(recipe.run.folder / METRICS):
        values = [value for key, value in row.items() if key.split("/")[0] == "validation_loss"]
        if values:
            found[row["step"]] = fmean(float("nan") if value is None else value for value in values)
    return found


def point_of(budget: Budget) -> Point | None:
    """What a finished run reached; None unless all its parts are done."""
    if not all(map(is_done, budget.recipes)):
        return None
    curve: dict[int, float] = {}
    for recipe, after in zip(budget.recipes, [*budget.recipes[1:], None], strict=True):
        last = int(after.run.continue_from.rpartition("@")[2]) if after else budget.steps
        curve |= {step: loss for step, loss in losses_of(recipe).items() if step <= last}
    shares = tuple((step / budget.steps, loss) for step, loss in sorted(curve.items()))
    rung, loss = budget.rung, curve[budget.steps]
    return Point(rung.name, budget.seed, rung.parameters, budget.tokens, budget.flops, loss, shares)


def _file(recipe: Recipe, folder: Path) -> Path:
    return folder / "recipes" / f"{recipe.run.name}.toml"
