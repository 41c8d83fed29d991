"""The learning rates that a ladder tries before its other runs, and the one that these get.

All rungs get one factor of the rate that their size asks for, so that rates stay a power of N: the largest one up to 1
whose loss, in the mean over the rungs that tried, is within CLOSE of the best. It only goes down: a rate at the edge of
stability costs far more than one below it (Wortsman et al. 2023, arXiv 2309.14322), and the best rate falls with the
length of a run (Bjorck et al. 2024, arXiv 2409.19913), while the trials are the shortest runs. Imports no torch.
"""

from collections.abc import Collection, Sequence
from math import inf, log
from statistics import fmean
from typing import NamedTuple

from recipes.files.layout import RECIPE
from recipes.lab.ladder.rungs import Budget
from recipes.lab.ladder.runs import point_of
from recipes.recipe.load import load

CLOSE = 0.01
"""Losses that differ by this share are as good: seeds differ as much."""
HALVINGS = 3
"""Rates below those that were asked for, each half of the one before, tried while the lowest is the best."""


class Trial(NamedTuple):
    """What one rung reached with one rate."""

    rung: str
    parameters: int
    factor: float
    rate: float
    loss: float
    """inf if the run failed or diverged."""


def trials_of(planned: Sequence[Budget]) -> list[Trial]:
    """The trials among these runs."""
    return [
        Trial(one.rung.name, one.rung.parameters, one.tries, one.recipes[0].optimizer.lr, point.loss if point else inf)
        for one in planned
        if one.tries
        for point in [point_of(one)]
    ]


def settle_factor(trials: Sequence[Trial]) -> float:
    """The factor of all other runs, as far as these trials say."""
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
