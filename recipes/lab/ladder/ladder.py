"""What `scripts/ladder.py` does, from a recipe to its predicted loss. Imports no torch."""

import time
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import inf, log
from operator import mul
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
from pydantic import TypeAdapter

from parallel.errors import UserError
from recipes.files.atomic import write_whole
from recipes.files.layout import RECIPE
from recipes.files.lock import FolderLock
from recipes.files.reading import fault
from recipes.lab.ladder.fit import EndedRun, Trial, best_rates, fit_law, too_close
from recipes.lab.ladder.rungs import Budget, budgets, require_scalable, rung_sizes
from recipes.lab.ladder.runs import is_done, point_of, runs_of, train_all, write_recipes
from recipes.metrics.ladder import Fit, Ladder
from recipes.plan.hardware import devices, gpu_named, gpu_of
from recipes.plan.rates import RATES
from recipes.plan.time import step_time
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
CLOSE = 0.01
"""Losses that differ by this share are as good: seeds differ as much."""
HALVINGS = 3
"""Rates below those that were asked for, each half of the one before, tried while the lowest is the best."""


def trials_of(planned: Sequence[Budget]) -> list[Trial]:
    """The trials among these runs."""
    return [
        Trial(one.rung.name, one.rung.parameters, one.tries, one.recipes[0].optimizer.lr, point.loss if point else inf)
        for one in planned
        if one.tries
        for point in [point_of(one)]
    ]


def settle_factor(trials: Sequence[Trial]) -> float:
    """The factor of all other runs, as far as these trials say.

    All rungs get one factor of the rate that their size asks for, so that rates stay a power of N: the largest one up
    to 1 whose loss, in the mean over the rungs that tried, is within CLOSE of the best. It only goes down: a rate at
    the edge of stability costs far more than one below it (Wortsman et al. 2023, arXiv 2309.14322), and the best rate
    falls with the length of a run (Bjorck et al. 2024, arXiv 2409.19913), while the trials are the shortest runs.
    """
    factors = {trial.factor for trial in trials if trial.factor <= 1}
    means = {factor: fmean(log(trial.loss) for trial in trials if trial.factor == factor) for factor in factors}
    least = min(means.values())
    return max(factor for factor in factors if means[factor] <= least + CLOSE) if least < inf else min(factors)


def factor_before(planned: Sequence[Budget], rates: Collection[float]) -> float | None:
    """The factor of the runs that were trained already, if it is one that trials of these rates may suggest, else 1;
    None if there are none."""
    may_be = [rate / 2**halved for rate in rates for halved in range(HALVINGS + 1)]
    for run in (budget.recipes[0] for budget in planned):
        if (trained := run.run.folder / RECIPE).exists():
            ratio = load(trained, rules=False, kind=type(run)).optimizer.lr / run.optimizer.lr
            return next((factor for factor in may_be if abs(ratio / factor - 1) < 1e-6), 1.0)
    return None


def climb(
    options: Namespace, overrides: list[str], *, task: str | None, processes: int, log: Callable[[str], None]
) -> int:
    """Train the runs that are not done, and answer. Returns the exit code, 1 if a run failed.

    task: of a SLURM array: the trials of rates, or one rung and seed, and no answer. Raises UserError.
    """
    recipe = load(options.recipe, overrides, rules=False)
    require_scalable(recipe, options.recipe)
    folder = options.output / recipe.run.name
    budgeted = partial(budgets, recipe, folder=folder, processes=processes, **_asked(recipe, options))
    rates = {1.0, *options.rates} if options.rates else set[float]()
    began = factor_before(budgeted(), rates)
    planned = budgeted(rates=rates, factor=began or 1.0)
    groups = [list(group) for _, group in groupby(planned, lambda one: not one.tries and (one.rung.name, one.seed))]
    runs = runs_of(planned)
    flops, large = sum(map(_flops, runs)), _flops(recipe)
    log(
        f"{recipe.run.name}: {len({run.rung.name for run in planned})} rungs, {len(runs)} runs in {len(groups)} groups,"
        f" NPROC={processes}, {flops:.2e} FLOPs in all, {flops / large:,.2%} of the recipe's; in {folder}"
    )
    if close := too_close([(one.rung.parameters, one.tokens) for one in planned]):
        log(f"caution: {close}")
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
            for line in [*_listed(groups), _cost(runs, options, processes=processes)]:
                log(line)
            return 0
        train = partial(train_all, folder=folder, processes=processes, log=log)
        first = train if task is None or groups[int(task)][0].tries else partial(_require_done, tasks=len(groups) - 1)
        failed, tried, factor = _try_rates(budgeted, rates, first)
        if began and factor != began:
            log(f"learning rates: the trials suggest {factor:g} times those of these runs: write another --output")
        planned = budgeted(rates=tried, factor=(factor := began or factor))
        if factor != 1:
            log(f"learning rates: {factor:g} times those that the sizes ask for, as the trials suggest")
        names = {run.run.name for run in runs}
        runs = [run for run in runs_of([one for one in planned if not one.tries]) if run.run.name in names]
        failed |= train(runs)
        if task is None:
            for line in ["", *_answer(recipe, options, planned, failed, folder=folder, factor=factor)]:
                log(line)
    except OSError as error:
        raise fault(f"{error.filename or folder} cannot be written", error, "; the same command goes on here") from None
    finally:
        lock.release()
    return int(bool(failed))


def _require_done(recipes: Sequence[Recipe], *, tasks: int) -> dict[str, str]:
    """Raises UserError unless these trials have ended."""
    if waiting := [recipe.run.name for recipe in recipes if not is_done(recipe)]:
        raise UserError(f"{waiting[0]} has not ended: rates are tried first; run task 0, then the tasks 1 to {tasks}")
    return {}


def _try_rates(
    plan: Callable[..., list[Budget]], rates: Set[float], train: Callable[[list[Recipe]], dict[str, str]]
) -> tuple[dict[str, str], Set[float], float]:
    """Train the trials of the learning rates, and of lower ones while the lowest is the best. Returns what failed, the
    rates that were tried, and the factor of the other runs."""
    failed, tried, factor = dict[str, str](), set[float](), 1.0
    for halved in range(HALVINGS + 1 if rates else 0):
        if not tried or factor == min(tried):
            new = {min(rates) / 2**halved} if halved else {*rates}
            tried |= new
            failed |= train(runs_of([one for one in plan(rates=new) if one.tries]))
            factor = settle_factor(trials_of(plan(rates=tried)))
    return failed, tried, factor


def _listed(groups: Sequence[Sequence[Budget]]) -> Iterator[str]:
    """The runs of each task of an array, with what a rung may not follow exactly: its batch."""
    for number, group in enumerate(groups):
        first, names = group[0].recipes[0], [run.run.name for run in runs_of(group)]
        rate = f"{first.batch.global_batch_size} sequences, learning rate {first.optimizer.lr:.3g}"
        yield f"  task {number}: {'rates, before the others' if group[0].tries else rate}: {', '.join(names)}"


def _cost(runs: Sequence[Recipe], options: Namespace, *, processes: int) -> str:
    """The least time that these runs take on the GPUs that are named or here, or on this CPU, and what that costs."""
    gpu = gpu_named(options.gpu) if options.gpu else next((gpu_of(name) for name, _ in devices()), None)
    if gpu is None:
        matrix, began = numpy.ones((2048, 2048), numpy.float32), time.perf_counter()
        rate = 2 * len(matrix @ matrix) ** 3 / (time.perf_counter() - began)
        hours = sum(map(_flops, runs)) / rate / 3600
        return f"  at least {hours:,.1f} hours here, at the {rate / 1e9:,.0f} GFLOP/s of matrix products; or --gpu NAME"
    times = (step_time(run, run.mesh.fit(processes, nodes=1), gpu=gpu, rates=RATES).step_seconds for run in runs)
    hours = sum(map(mul, times, map(_steps, runs))) / 3600
    money = f", {hours * processes * options.price:,.2f} in all" if options.price else ""
    return f"  at least {hours:,.1f} hours on {processes} {gpu.name}, as planned, without starts{money}"


def _asked(recipe: Recipe, options: Namespace) -> dict[str, Any]:
    """What the options ask budgets() for. Raises UserError if such runs determine no law."""
    for key, value, least in (("--rungs", options.rungs, FEWEST), ("--seeds", options.seeds, 1)):
        if value < least:
            raise UserError(f"{key} {value}: must be {least} or more")
    if 0 < len(options.parameters) < FEWEST:
        raise UserError(f"--parameters: a ladder of {len(options.parameters)} sizes has no law; write {FEWEST} or more")
    if (len(options.parameters) or options.rungs) * options.seeds < GROUPS:
        raise UserError(f"fewer than {GROUPS} rungs and seeds give no interval; write --seeds 2, or more rungs")
    if len(tokens := sorted(options.tokens or options.tokens_per_parameter)) < 2:
        raise UserError("one length of runs says nothing of others; write two or more, such as --tokens 1B,2B")
    sizes = sorted(map(round, options.parameters)) or rung_sizes(recipe, options.rungs)
    return {"parameters": sizes, "tokens": tokens, "per_parameter": not options.tokens, "seeds": options.seeds}


def _answer(
    recipe: Recipe,
    options: Namespace,
    planned: Sequence[Budget],
    failed: Mapping[str, str],
    *,
    folder: Path,
    factor: float,
) -> list[str]:
    """Fit the laws and write them, with a page. Returns the lines for the screen. Raises UserError if too few runs have
    ended, or if they do not determine a law: the page says what there is."""
    from recipes.lab.ladder.answer import PAGE, LadderAnswer, lines, write_ladder_page

    points = [point for budget in planned if not budget.tries and (point := point_of(budget))]
    trials = trials_of(planned)
    answer = LadderAnswer(
        recipe=shown(options.recipe),
        model=recipe.model,
        tokens=recipe.run.steps * recipe.batch.global_batch_size * recipe.batch.sequence_length,
        sequence_length=recipe.batch.sequence_length,
        learning_rate=recipe.optimizer.lr,
        points=points,
        trials=trials,
        factor=factor,
        rates=best_rates((trial.parameters, trial.rate, trial.loss) for trial in trials),
        failed=failed,
    )
    try:
        fits = tuple(_fits(points))
    except UserError as error:
        write_ladder_page(folder, replace(answer, refused=str(error)), command=options.command)
        old = f"; {folder / FILE} is still the answer of before" if (folder / FILE).exists() else ""
        raise UserError(f"{error}; {folder / PAGE} has what was measured{old}") from None
    largest, longest = max(point.parameters for point in points), max(point.tokens for point in points)
    ladder = Ladder(answer.recipe, conditions_of(recipe), fits, parameters=largest, tokens=longest)
    answer = replace(answer, ladder=ladder)
    write_whole(folder / FILE, TypeAdapter(Ladder).dump_json(ladder).decode())
    write_ladder_page(folder, answer, command=options.command)
    return [*lines(answer), "", f"wrote {folder}: {FILE} ladder.md"]


def _fits(points: Sequence[EndedRun]) -> Iterator[tuple[float, Fit]]:
    """The fit after each share; before the end only where losses fall with size and tokens already."""
    for share in SHARES:
        with suppress(UserError) if share < 1 else nullcontext():
            there = [float(numpy.interp(share, *numpy.array(point.curve).T)) for point in points]
            yield share, fit_law([replace(point, loss=loss) for point, loss in zip(points, there, strict=True)])


def _steps(recipe: Recipe) -> int:
    """Of a run, without those of its trunk."""
    return recipe.run.steps - int(recipe.run.continue_from.rpartition("@")[2] or 0)


def _flops(recipe: Recipe) -> float:
    """Of a run, without those of its trunk."""
    length = recipe.batch.sequence_length
    tokens = float(_steps(recipe) * recipe.batch.global_batch_size * length)
    return tokens * recipe.model.flops_per_token(length, "causal")
