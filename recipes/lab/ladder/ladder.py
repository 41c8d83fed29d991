"""What `scripts/ladder.py` does, from a recipe to its predicted loss. Imports no torch."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy
from pydantic import TypeAdapter

from parallel.errors import UserError
from recipes.files.atomic import write_whole
from recipes.files.lock import FolderLock
from recipes.lab.ladder.fit import SAME, EndedRun, best_rates, fit_law, miss_of_top
from recipes.lab.ladder.rungs import Budget, budgets, require_scalable, rung_sizes
from recipes.lab.ladder.runs import point_of, runs_of, train_all, write_recipes
from recipes.metrics.ladder import Fit, Ladder
from recipes.recipe.load import load, shown
from recipes.recipe.rules_ladder import conditions_of
from recipes.recipe.schema import Recipe

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of a run's steps, after which the losses of all runs get a law of their own."""
FILE = "ladder.json"
FEWEST = 3
"""Sizes that determine a law."""
GROUPS = 5
"""Rungs times seeds: the bootstrap draws among these."""


def climb(
    options: Namespace, overrides: list[str], *, task: str | None, processes: int, log: Callable[[str], None]
) -> int:
    """Train the runs that are not done, and answer. Returns the exit code, 1 if a run failed.

    task: of a SLURM array, which trains one rung and seed, and answers nothing. Raises UserError.
    """
    recipe = load(options.recipe, overrides, rules=False)
    require_scalable(recipe, options.recipe)
    folder = options.output / recipe.run.name
    planned = _budgets(recipe, options, folder=folder, processes=processes)
    groups = [list(group) for _, group in groupby(planned, lambda budget: (budget.rung.name, budget.seed))]
    runs = runs_of(planned)
    flops, large = sum(_own_flops(run) for run in runs), _flops(recipe)
    log(
        f"{recipe.run.name}: {len({run.rung.name for run in planned})} rungs, {len(runs)} runs in {len(groups)} groups,"
        f" NPROC={processes}, {flops:.2e} FLOPs in all, {flops / large:,.2%} of the recipe's; in {folder}"
    )
    if task is not None:
        if not task.isdecimal() or int(task) >= len(groups):
            raise UserError(f"SLURM_ARRAY_TASK_ID={task}: this ladder has the tasks 0 to {len(groups) - 1}")
        log(f"only task {task} of these groups, because SLURM_ARRAY_TASK_ID is {task}")
        runs = runs_of(groups[int(task)])
    lock = FolderLock()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}; write another --output") from None
    if task is None:  # tasks of an array share the folder
        lock.take(folder, log=log, remedy="write another --output", here=0, elsewhere=0)
    try:
        write_recipes(runs, folder, processes=processes)
        if options.dry_run:
            for line in _listed(groups):
                log(line)
            return 0
        failed = train_all(runs, folder, processes=processes, log=log)
        if task is None:
            try:
                answer = _answer(recipe, options, planned, failed, folder=folder)
            except UserError as error:
                old = f"; {folder / FILE} is still the answer of before" if (folder / FILE).exists() else ""
                raise UserError(f"{error}{old}") from None
            for line in ["", *answer]:
                log(line)
    finally:
        lock.release()
    return int(bool(failed))


def _listed(groups: Sequence[Sequence[Budget]]) -> Iterator[str]:
    """The runs of each task of an array, with what a rung may not follow exactly: its batch."""
    for number, group in enumerate(groups):
        first, names = group[0].recipes[0], [run.run.name for run in runs_of(group)]
        rate = f"{first.batch.global_batch_size} sequences, learning rate {first.optimizer.lr:.3g}"
        yield f"  task {number}: {rate}: {', '.join(names)}"


def _budgets(recipe: Recipe, options: Namespace, *, folder: Path, processes: int) -> list[Budget]:
    """The runs that the options ask for. Raises UserError if they determine no law."""
    for key, value, least in (("--rungs", options.rungs, FEWEST), ("--seeds", options.seeds, 1)):
        if value < least:
            raise UserError(f"{key} {value}: must be {least} or more")
    if 0 < len(options.parameters) < FEWEST:
        raise UserError(f"--parameters: a ladder of {len(options.parameters)} sizes has no law; write {FEWEST} or more")
    if (len(options.parameters) or options.rungs) * options.seeds < GROUPS:
        raise UserError(f"fewer than {GROUPS} rungs and seeds give no interval; write --seeds 2, or more rungs")
    if len(tokens := sorted(options.tokens or options.tokens_per_parameter)) < 2:
        raise UserError("one length of runs says nothing of others; write two or more, such as --tokens 1B,2B")
    return budgets(
        recipe,
        sorted(map(round, options.parameters)) or rung_sizes(recipe, options.rungs),
        folder=folder,
        tokens=tokens,
        per_parameter=not options.tokens,
        seeds=options.seeds,
        rates=options.rates,
        processes=processes,
    )


def _answer(
    recipe: Recipe, options: Namespace, planned: Sequence[Budget], failed: Mapping[str, str], *, folder: Path
) -> list[str]:
    """Fit the laws and write them, with a page. Returns the lines for the screen. Raises UserError if too few runs have
    ended, or if they do not determine a law."""
    from recipes.lab.ladder.answer import LadderAnswer, lines
    from recipes.lab.ladder.page import write_ladder_page

    reached = [(budget, point) for budget in planned if (point := point_of(budget))]
    points = [point for budget, point in reached if not budget.sweep]
    swept = {budget.rung: budget.tokens for budget, _ in reached if budget.sweep}
    trials = [
        (point.parameters, budget.recipes[0].optimizer.lr, point.loss)
        for budget, point in reached
        if budget.seed == recipe.run.seed and abs(budget.tokens / swept.get(budget.rung, 1) - 1) < SAME
    ]
    missed, unchecked = [], "without its largest rung, the ladder has too few rungs for a law; add one"
    if len({point.parameters for point in points}) > FEWEST:
        try:
            missed = miss_of_top(points)
        except UserError as error:
            unchecked = str(error)
    answer = LadderAnswer(
        model=recipe.model,
        tokens=recipe.run.steps * recipe.batch.global_batch_size * recipe.batch.sequence_length,
        sequence_length=recipe.batch.sequence_length,
        learning_rate=recipe.optimizer.lr,
        ladder=Ladder(
            recipe=shown(options.recipe),
            conditions=conditions_of(recipe),
            fits=tuple(_fits(points)),
            parameters=max(point.parameters for point in points),
            tokens=max(point.tokens for point in points),
        ),
        points=points,
        rates=best_rates(trials),
        missed=missed,
        unchecked=unchecked,
        failed=failed,
    )
    write_whole(folder / FILE, TypeAdapter(Ladder).dump_json(answer.ladder).decode())
    write_ladder_page(folder, answer, command=options.command)
    return [*lines(answer), "", f"wrote {folder}: {FILE} ladder.md ladder.png"]


def _fits(points: Sequence[EndedRun]) -> Iterator[tuple[float, Fit]]:
    """The fit after each share; before the end only where losses fall with size and tokens already."""
    for share in SHARES:
        with suppress(UserError) if share < 1 else nullcontext():
            yield share, fit_law([replace(point, loss=_between(point.curve, share)) for point in points])


def _between(curve: Sequence[tuple[float, float]], share: float) -> float:
    shares, losses = map(list, zip(*curve, strict=True))
    return float(numpy.interp(share, shares, losses))


def _flops(recipe: Recipe) -> float:
    """Of a whole run."""
    length = recipe.batch.sequence_length
    tokens = recipe.run.steps * recipe.batch.global_batch_size * length
    return float(tokens) * recipe.model.flops_per_token(length, "causal")


def _own_flops(recipe: Recipe) -> float:
    """Of a run, without those of its trunk."""
    before = int(recipe.run.continue_from.rpartition("@")[2] or 0)
    return _flops(recipe) * (1 - before / recipe.run.steps)
