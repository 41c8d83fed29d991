"""The law of a ladder and the best learning rate by size, fitted to runs. Imports no torch."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from parallel.errors import UserError
from recipes.metrics.ladder import Fit, Law, losses

Array = NDArray[numpy.float64]
HUBER = 1e-3  # beyond it a residual counts by its size, not its square (Hoffmann et al. 2022, approach 3)
DISTINCT = 10  # draws of the bootstrap: fewer say nothing of the uncertainty
SAME = 0.05  # lengths that differ by a smaller share are compared as equal ones
SPANS = (4.0, 2.0)  # least ratios of sizes, and of lengths on a rung or of tokens per parameter, for an exponent
HELD_OUT = numpy.linspace(0.3, 0.9, 7)  # shares of the runs, by their compute, whose laws predict the others
EXPONENTS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.8, 1.2)  # a and b of the starts


@dataclass(frozen=True)
class EndedRun:
    """A finished run of a ladder: what a law is fitted to."""

    rung: str
    seed: int
    parameters: int
    """N: ModelConfig.non_embedding_params()."""
    tokens: int
    """D."""
    flops: float
    """Of the whole run, forward and backward."""
    loss: float
    """On the validation text at the end, nats per token."""
    curve: tuple[tuple[float, float], ...] = ()
    """(share of the steps, validation loss), ascending."""
    epochs: float = 0.0
    """How often its most read text was read; 0: unknown."""


class Trial(NamedTuple):
    """What one rung reached with one rate."""

    rung: str
    parameters: int
    factor: float
    rate: float
    loss: float
    """inf if the run failed or diverged."""


class BestRates(NamedTuple):
    """The best learning rate for N parameters is about coefficient * N ** exponent."""

    coefficient: float
    exponent: float
    edges: list[int]
    """N whose best rate was the lowest or highest one tried: a better one may lie beyond."""


def fit_law(points: Sequence[EndedRun], *, samples: int = 200) -> Fit:
    """The law, and those of resampled runs: a run (rung and seed) is drawn with all its budgets, which share its trunk.

    A draw of fewer than half of the sizes is drawn again. Raises UserError if these points do not determine a law.
    """
    for point in points:
        if not 0 < point.loss < numpy.inf:
            raise UserError(
                f"rung {point.rung}, seed {point.seed}: the loss is {point.loss}; train it again, or name other rungs"
            )
    if lack := _lack(points, sizes=3):
        raise UserError(lack)
    sizes, lengths = numpy.array([(point.parameters, point.tokens) for point in points], float).T
    runs = sorted({(point.rung, point.seed) for point in points})
    budgets = numpy.array(
        [[(point.rung, point.seed) == run for point in points] for run in runs], float
    )  # (runs, points)
    half = (len(set(sizes)) + 1) // 2
    generator, weights = numpy.random.default_rng(0), [numpy.ones(len(points))]
    while len(weights) <= samples:
        drawn = generator.multinomial(len(runs), numpy.full(len(runs), 1 / len(runs))) @ budgets
        if not _lack([point for point, times in zip(points, drawn, strict=True) if times], sizes=half):
            weights.append(drawn)
    if len({point.tobytes() for point in weights}) < min(samples, DISTINCT):
        raise UserError(f"{len(runs)} rungs and seeds are too few to draw from, so there is no interval: add seeds")
    compute = sizes * lengths
    cuts = [
        least
        for least in {*numpy.quantile(compute, HELD_OUT)}
        if _lack([one for one in points if float(one.parameters) * one.tokens <= least], sizes=3) is None
    ]
    smaller = [(compute <= least).astype(float) for least in cuts]
    law, *laws = _minimize(numpy.array([*weights, *smaller]), points)
    others, partial = laws[:samples], laws[samples:]
    residuals = [float(numpy.log(point.loss / losses([law], point.parameters, point.tokens)[0])) for point in points]
    small, large = ([point for point in points if point.parameters == edge] for edge in (sizes.min(), sizes.max()))
    pairs = [(low, high) for low in small for high in large if low.tokens <= high.tokens]
    alike = [(low, high) for low, high in pairs if high.tokens < (1 + SAME) * low.tokens]
    rises = [high.loss / low.loss - 1 for low, high in alike or pairs]  # more tokens would hide what size does
    noise = min(point.loss for point in points) * max(1e-4, float(numpy.median(numpy.abs(residuals))))
    remedy = "look at the learning rates and the lengths, or name other rungs"
    if numpy.ptp(law.A * sizes**-law.a) < noise or sum(rises) > 0:
        raise UserError(f"the loss does not fall from rung {small[0].rung} to rung {large[0].rung}: {remedy}")
    if numpy.ptp(law.B * lengths**-law.b) < noise:
        raise UserError(f"the loss does not fall with more tokens: {remedy}")
    absorbed = (1 - len(law) / len(points)) ** 0.5  # five constants hide a part of the noise
    misses = [
        abs(numpy.log(point.loss / losses([of_smaller], point.parameters, point.tokens)[0])) / (1 + reach)
        for of_smaller, seen in zip(partial, smaller, strict=True)
        for point, reach in zip(points, numpy.log(compute / compute[seen > 0].max()), strict=True)
        if reach > 0
    ]
    misfit = float(numpy.quantile(misses, 0.95)) if misses else 0.0
    noises = tuple(point / absorbed for point in residuals)
    return Fit(law, tuple(others), noises, misfit=misfit, compute=float(compute.max()))


def best_rates(trials: Iterable[tuple[int, float, float]]) -> BestRates | None:
    """A power law through the best rate of each size; None without two sizes that have three rates each.

    Trials are (N, learning rate, loss), with NaN where training diverged; the losses of one rate are averaged. The best
    rate is the vertex of a parabola, in the logarithm, through the lowest loss and its two neighbours.
    """
    grids: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for parameters, rate, loss in trials:
        grids[parameters][rate].append(loss if numpy.isfinite(loss) else numpy.inf)
    best, edges = dict[int, float](), list[int]()
    for parameters, grid in sorted(grids.items()):
        rates, means = numpy.array(
            [(rate, numpy.mean(losses_of_rate)) for rate, losses_of_rate in sorted(grid.items())]
        ).T
        lowest = int(means.argmin())
        if len(rates) < 3 or not numpy.isfinite(means[lowest]):
            continue
        near, best[parameters] = slice(max(lowest - 1, 0), lowest + 2), float(rates[lowest])
        if len(rates[near]) < 3 or not numpy.isfinite(means[near]).all():
            edges.append(parameters)
        elif (curve := numpy.polyfit(numpy.log(rates[near] / rates[lowest]), means[near], 2))[0] > 0:
            best[parameters] *= float(numpy.exp(-curve[1] / (2 * curve[0])))
    if len(best) < 2:
        return None
    exponent, coefficient = numpy.polyfit(numpy.log(list(best)), numpy.log(list(best.values())), 1)
    return BestRates(float(numpy.exp(coefficient)), float(exponent), edges)


def compute_optimal(law: Law, tokens: float) -> float:
    """N such that no other N and D with the same N * D have a lower loss: a A / N^a = b B / D^b."""
    return float((law.a * law.A * tokens**law.b / (law.b * law.B)) ** (1 / law.a))


def too_close(pairs: Iterable[tuple[int, float]]) -> str:
    """What these (N, D) say too little of; "" if nothing."""
    sizes, lengths, ratios = (
        numpy.array(column, float) for column in zip(*((n, d, d / n) for n, d in pairs), strict=True)
    )
    size, length = sizes.max() / sizes.min(), min(column.max() / column.min() for column in (lengths, ratios))
    if size < SPANS[0]:
        return f"the sizes span only {size:.2g}x: what size does beyond them is hardly known; write them further apart"
    if length < SPANS[1]:
        return f"the lengths span only {length:.2g}x: what tokens do beyond them is hardly known; write longer ones"
    return ""


def _minimize(weights: Array, points: Sequence[EndedRun]) -> list[Law]:
    """The law for each row of weights (S, P): damped Gauss-Newton, with the Huber loss as reweighted squares."""
    size, length, loss = numpy.log([[point.parameters, point.tokens, point.loss] for point in points]).T
    inputs = numpy.stack([0 * size, size - size.mean(), length - length.mean()])  # of E, A and B, at the middle

    def evaluate(theta: Array) -> tuple[Array, Array, Array]:  # logarithms of E, A, B, (unused), a, b
        slopes = numpy.exp(theta[:, 3:, None]) * inputs
        terms = theta[:, :3, None] - slopes  # (S, 3, P)
        total = numpy.logaddexp.reduce(terms, 1)
        residuals = loss - total
        small = numpy.minimum(abs(residuals), HUBER)
        shares = numpy.exp(terms - total[:, None])
        cost = (weights * small * (abs(residuals) - small / 2)).sum(1)
        return numpy.concatenate([shares, -shares * slopes], 1), residuals, cost

    starts, costs = [], []
    for a, b in ((a, b) for a in EXPONENTS for b in EXPONENTS):  # given a and b, least squares for E, A and B
        terms = numpy.exp(-numpy.array([[0], [a], [b]]) * inputs - loss)
        normal = (terms * weights[:, None]) @ terms.T + 1e-9 * numpy.eye(3)
        three = numpy.maximum(numpy.linalg.solve(normal, (weights @ terms.T)[..., None])[..., 0], 1e-3)
        starts.append(numpy.insert(numpy.log(three), [3, 3, 3], numpy.log([1, a, b]), axis=1))
        costs.append((weights * abs(numpy.log(three @ terms))).sum(1))
    theta = numpy.array(starts)[numpy.argmin(costs, 0), numpy.arange(len(weights))]
    damping = numpy.full(len(theta), 1e-3)
    lower, upper = numpy.log([[1e-3, 1e-4, 1e-4, 1.0, 0.01, 0.01], [1e2, 1e2, 1e2, 1.0, 3.0, 3.0]])
    jacobian, residuals, cost = evaluate(theta)
    for _ in range(200):
        weighted = jacobian * (weights * HUBER / numpy.maximum(abs(residuals), HUBER))[:, None]
        curvature = weighted @ jacobian.swapaxes(1, 2)
        ridge = damping[:, None] * numpy.einsum("sii->si", curvature) + 1e-12
        step = numpy.linalg.solve(curvature + ridge[:, None] * numpy.eye(6), weighted @ residuals[..., None])
        trial = numpy.clip(theta + step[..., 0], lower, upper)
        tried = evaluate(trial)
        better = tried[-1] < cost
        for old, new in zip((theta, jacobian, residuals, cost), (trial, *tried), strict=True):
            old[better] = new[better]
        damping = numpy.clip(damping * numpy.where(better, 0.3, 5.0), 1e-9, 1e9)
    theta[:, 1:3] += numpy.exp(theta[:, 4:]) * [size.mean(), length.mean()]
    return [Law(E, A, a, B, b) for E, A, B, _, a, b in numpy.exp(theta).tolist()]


def _lack(points: Sequence[EndedRun], *, sizes: int) -> str | None:
    """Why these points cannot determine a law."""
    if (few := len({point.parameters for point in points})) < sizes:
        return f"a ladder of {few} sizes, and a law needs {sizes}: add rungs"
    away = numpy.log([(point.parameters, point.tokens) for point in points])
    if numpy.linalg.svd(away - away.mean(0), compute_uv=False)[-1] < SAME * len(points) ** 0.5:  # on one line
        return "every rung has one length, which does not separate size from data: add a token budget"
    return None if len(points) > 5 else f"{len(points)} losses do not determine five constants: add budgets or seeds"
