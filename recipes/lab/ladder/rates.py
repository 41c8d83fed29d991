"""The learning rates that a ladder tries before its other runs, and the one that these get. Imports no torch.

A rung prefers the largest factor, up to 1, of the rate that its size asks for whose loss is within CLOSE of its best.
All rungs get the lowest that one prefers, so that rates stay a power of N. It only goes down: a rate at the edge of
stability costs far more than one below it (Wortsman et al. 2023, arXiv 2309.14322), and the best rate falls with the
length of a run (Bjorck et al. 2024, arXiv 2409.19913), while the trials are the shortest runs.
"""

from collections.abc import Collection, Sequence
from math import inf
from typing import NamedTuple

from recipes.files.layout import RECIPE
from recipes.lab.ladder.rungs import Budget
from recipes.lab.ladder.runs import point_of
from recipes.recipe.load import load

CLOSE = 0.01
"""Losses of a rung that differ by this share are as good: seeds differ as much."""
HALVINGS = 3
"""Rates below those that were asked for, each half of the one before, tried while a rung is best at the lowest."""


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


def settle_factor(trials: Sequence[Trial]) -> tuple[float, bool]:
    """The factor of all other runs as far as these trials say, and whether a rung is best at the lowest rate alone."""
    factor, low = 1.0, False
    for rung in {trial.rung for trial in trials}:
        losses = {trial.factor: trial.loss for trial in trials if trial.rung == rung}
        good = {each for each, loss in losses.items() if loss <= (1 + CLOSE) * min(losses.values()) < inf}
        factor = min(factor, max((each for each in good if each <= 1), default=1.0 if good else min(losses)))
        low = low or good <= {min(losses)}
    return factor, low


def factor_before(planned: Sequence[Budget], rates: Collection[float]) -> float | None:
    """The factor of the runs that were trained already, if it is one that trials of these rates may suggest, else 1;
    None if there are none."""
    may_be = [rate / 2**halved for rate in rates for halved in range(HALVINGS + 1)]
    for run in (budget.recipes[0] for budget in planned):
        if (trained := run.run.folder / RECIPE).exists():
            ratio = load(trained, rules=False).optimizer.lr / run.optimizer.lr
            return next((factor for factor in may_be if abs(ratio / factor - 1) < 1e-6), 1.0)
    return None
