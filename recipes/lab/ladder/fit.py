"""The law of a ladder, fitted to its runs, with its uncertainty. Imports no torch.

Hoffmann et al. 2022 (arXiv 2203.15556), approach 3: the Huber loss of log(loss / law) is minimized from many starts,
over the logarithms of the constants; the law of a run is a logsumexp of its three terms.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from statistics import fmean
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from parallel.errors import UserError
from recipes.lab.ladder.points import Point
from recipes.metrics.ladder import Fit, Law, Prediction, losses

Array = NDArray[numpy.float64]

HUBER = 1e-3  # as Hoffmann et al.: beyond a thousandth, a residual counts by its size and not by its square
EXPONENTS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.8, 1.2)  # a and b of the starts
STARTS = 3  # the best of them, from which the constants are refined
ROUNDS = 300


class Rates(NamedTuple):
    """The best learning rate by size, coefficient * N ** exponent."""

    coefficient: float
    exponent: float
    best: dict[int, float]
    """N -> the best rate among those tried."""
    edges: tuple[int, ...]
    """Sizes whose lowest loss was at the first or last rate tried: the best one may lie beyond."""


def fit_law(points: Sequence[Point], *, samples: int = 200) -> Fit:
    """The law of these runs and its interval, by a bootstrap over whole runs (rung and seed): budgets share a trunk.

    Raises UserError if these runs do not determine a law.
    """
    _check(points)
    runs = sorted({(point.rung, point.seed) for point in points})
    members = numpy.array([[(point.rung, point.seed) == run for point in points] for run in runs], float)
    generator = numpy.random.default_rng(0)
    weights = [numpy.ones(len(points))]
    while len(weights) <= samples:
        drawn = generator.multinomial(len(runs), numpy.full(len(runs), 1 / len(runs))) @ members
        if not _gap([point for point, times in zip(points, drawn, strict=True) if times]):
            weights.append(drawn)
    law, *drawn_laws = _minimize(numpy.array(weights), points)
    _check_falls(law, points)
    spread = (len(points) / (len(points) - len(law))) ** 0.5  # five constants were fitted to these residuals
    residuals = [float(numpy.log(one.loss / losses([law], one.parameters, one.tokens)[0]) * spread) for one in points]
    return Fit(law, tuple(drawn_laws) or (law,), tuple(residuals))


def miss_of_top(points: Sequence[Point]) -> list[tuple[Point, Prediction]]:
    """The runs of the largest rung, and what a fit without them predicts.

    Raises UserError if the others do not determine a law: a ladder of three sizes has none to spare.
    """
    top = max((point.parameters for point in points), default=0)
    fit = fit_law([point for point in points if point.parameters < top])
    return [(one, fit.predict(one.parameters, one.tokens)) for one in points if one.parameters == top]


def best_rates(trials: Iterable[tuple[int, float, float]]) -> Rates | None:
    """The power law through the best rate of each size, None below two sizes with three rates each.

    The best rate of a size: the vertex of a parabola in log(rate) through the lowest loss and its two neighbours.

    Args:
        trials: (N, learning rate, loss); diverged ones may be NaN, and those of one rate are averaged.
    """
    grids: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for parameters, rate, loss in trials:
        grids[parameters][rate].append(loss if numpy.isfinite(loss) else numpy.inf)
    best, edges = {}, []
    for parameters, grid in sorted(grids.items()):
        rates = sorted(grid)
        means = [fmean(grid[rate]) for rate in rates]
        lowest = int(numpy.argmin(means))
        if len(rates) < 3 or not numpy.isfinite(means[lowest]):
            continue
        best[parameters] = rates[lowest]
        if not 0 < lowest < len(rates) - 1:
            edges.append(parameters)
        elif numpy.isfinite(near := means[lowest - 1 : lowest + 2]).all():
            bend, slope, _ = numpy.polyfit(
                numpy.log(rates[lowest - 1 : lowest + 2]) - numpy.log(rates[lowest]), near, 2
            )
            best[parameters] *= float(numpy.exp(-slope / (2 * bend))) if bend > 0 else 1.0
    if len(best) < 2:
        return None
    exponent, intercept = numpy.polyfit(numpy.log(list(best)), numpy.log(list(best.values())), 1)
    return Rates(float(numpy.exp(intercept)), float(exponent), best, tuple(edges))


def compute_optimal(law: Law, tokens: float) -> float:
    """N for which no other N and D of equal N * D have a lower loss, given D: a A / N^a = b B / D^b."""
    return float((law.a * law.A * tokens**law.b / (law.b * law.B)) ** (1 / law.a))


def _minimize(weights: Array, points: Sequence[Point]) -> list[Law]:
    """The law for each row of weights (S, P): damped Gauss-Newton steps on reweighted squares, all rows at once."""
    size, length, loss = numpy.log([(point.parameters, point.tokens, point.loss) for point in points]).T
    middle = size.mean(), length.mean()
    size, length = size - middle[0], length - middle[1]  # the terms at the middle are far less correlated

    def parts(theta: Array) -> tuple[Array, Array]:  # (S, 5) -> log of the three terms (S, 3, P), residuals (S, P)
        E, A, a, B, b = theta.T[..., None]
        terms = numpy.stack([E + 0 * size, A - numpy.exp(a) * size, B - numpy.exp(b) * length], 1)
        return terms, loss - numpy.logaddexp.reduce(terms, 1)

    def cost(residuals: Array) -> Array:
        small = numpy.minimum(abs(residuals), HUBER)
        return (repeated * small * (abs(residuals) - small / 2)).sum(1)

    lower, upper = numpy.log([(1e-3, 1e-4, 0.01, 1e-4, 0.01), (1e2, 1e2, 3.0, 1e2, 3.0)])
    theta = numpy.clip(_starts(weights, size, length, loss), lower, upper)  # (S * STARTS, 5)
    repeated = numpy.repeat(weights, STARTS, 0)
    damping = numpy.full(len(theta), 1e-3)
    terms, residuals = parts(theta)
    for _ in range(ROUNDS):
        shares = numpy.exp(terms - (loss - residuals)[:, None])
        slopes = numpy.exp(theta[:, [2, 4], None]) * numpy.stack([size, length])
        jacobian = numpy.stack([shares[:, 0], shares[:, 1], -shares[:, 1] * slopes[:, 0]], 1)
        jacobian = numpy.concatenate([jacobian, shares[:, 2:], -shares[:, 2:] * slopes[:, 1:]], 1)
        weighted = jacobian * (repeated * HUBER / numpy.maximum(abs(residuals), HUBER))[:, None]
        curvature = weighted @ jacobian.swapaxes(1, 2)
        ridge = damping[:, None] * numpy.einsum("sii->si", curvature) + 1e-12
        step = numpy.linalg.solve(curvature + ridge[..., None] * numpy.eye(5), weighted @ residuals[..., None])[..., 0]
        trial = numpy.clip(theta + step, lower, upper)
        trial_terms, trial_residuals = parts(trial)
        better = cost(trial_residuals) < cost(residuals)
        theta[better], terms[better], residuals[better] = trial[better], trial_terms[better], trial_residuals[better]
        damping = numpy.clip(damping * numpy.where(better, 0.3, 5.0), 1e-9, 1e9)
    chosen = cost(residuals).reshape(-1, STARTS).argmin(1)
    E, A, a, B, b = numpy.exp(theta.reshape(-1, STARTS, 5)[numpy.arange(len(weights)), chosen]).T
    return [Law(*map(float, row)) for row in zip(E, A * numpy.exp(a * middle[0]), a, B * numpy.exp(b * middle[1]), b)]


def _starts(weights: Array, size: Array, length: Array, loss: Array) -> Array:
    """The most promising constants (S * STARTS, 5): given a and b, least squares for the other three."""
    found, costs = [], []
    for a, b in product(EXPONENTS, EXPONENTS):
        terms = numpy.stack([numpy.ones_like(loss), numpy.exp(-a * size), numpy.exp(-b * length)]) / numpy.exp(loss)
        normal = (terms * weights[:, None]) @ terms.T + 1e-9 * numpy.eye(3)
        three = numpy.maximum(numpy.linalg.solve(normal, (weights @ terms.T)[..., None])[..., 0], 1e-3)
        costs.append((weights * abs(numpy.log(three @ terms))).sum(1))
        found.append(numpy.insert(numpy.log(three), [2, 3], numpy.log([a, b]), axis=1))
    best = numpy.argsort(costs, 0)[:STARTS].T  # (S, STARTS)
    return numpy.array(found)[best, numpy.arange(len(weights))[:, None]].reshape(-1, 5)


def _gap(points: Sequence[Point]) -> str | None:
    """What these runs lack to determine five constants."""
    lengths = defaultdict(set)
    for point in points:
        lengths[point.parameters].add(point.tokens)
    if len(lengths) < 3:
        return f"a ladder of {len(lengths)} size(s): three are the least, so add rungs"
    if max(map(len, lengths.values())) < 2:
        return "every rung has one length, which size and data cannot be told apart by: add a token budget"
    return None


def _check(points: Sequence[Point]) -> None:
    """Raises UserError."""
    for point in points:
        if not 0 < point.loss < numpy.inf:
            where = f"{point.rung}, seed {point.seed}, {point.tokens} tokens"
            raise UserError(f"{where}: the loss is {point.loss}; run this rung again, or leave it out")
    if gap := _gap(points):
        raise UserError(gap)
    if len(points) < 6:
        raise UserError(f"{len(points)} runs cannot determine five constants: add rungs, token budgets or seeds")


def _check_falls(law: Law, points: Sequence[Point]) -> None:
    """Raises UserError."""
