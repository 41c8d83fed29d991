"""A ladder's law and learning rates: known ones are recovered, and runs that determine none are refused."""

from collections.abc import Callable
from dataclasses import replace
from math import nan
from typing import Any

import numpy
import pytest

from parallel.errors import UserError
from recipes.lab.ladder.fit import EndedRun, best_rates, compute_optimal, fit_law
from recipes.metrics.ladder import Law, losses

LAW = Law(E=1.7, A=60.0, a=0.28, B=400.0, b=0.36)
SIZES = (100_000, 210_000, 450_000, 950_000, 2_000_000)
TARGET = (8_000_000, 160_000_000)


def ladder(*, noise: float = 0.0, seeds: int = 2, chance: int = 0, sizes: Any = SIZES) -> list[EndedRun]:
    """Runs of 10, 20 and 40 tokens per parameter; a trunk and each of its budgets have noise of their own."""
    generator = numpy.random.default_rng(chance)
    points = []
    for size in sizes:
        for seed in range(seeds):
            trunk = generator.normal()
            for ratio in (10, 20, 40):
                error = numpy.exp(noise * (trunk + generator.normal() / 2))
                loss = float(losses([LAW], size, size * ratio)[0] * error)
                points.append(EndedRun(f"{size}", seed, size, size * ratio, 6.0 * size**2 * ratio, loss))
    return points


def test_law_without_noise_is_recovered() -> None:
    fit = fit_law(ladder(), samples=5)

    assert fit.law == pytest.approx(LAW, rel=1e-3)
    assert fit.predict(*TARGET).loss == pytest.approx(losses([LAW], *TARGET)[0], rel=1e-5)


def test_one_ruined_run_does_not_move_the_law() -> None:
    points = ladder(noise=0.001)
    ruined = [replace(points[0], loss=1.3 * points[0].loss), *points[1:]]

    before, after = (fit_law(runs, samples=1).predict(*TARGET).loss for runs in (points, ruined))

    assert after == pytest.approx(before, rel=0.005)


def test_bootstrap_is_deterministic() -> None:
    assert fit_law(ladder(noise=0.003), samples=20) == fit_law(ladder(noise=0.003), samples=20)


def test_budgets_that_err_together_widen_the_interval() -> None:
    points = [replace(one, loss=one.loss * (1.01 if one.seed else 1.0)) for one in ladder()]
    shuffled = [replace(one, seed=number) for number, one in enumerate(points)]

    together, apart = (numpy.std([law.E for law in fit_law(runs).samples]) for runs in (points, shuffled))

    assert together > 1.2 * apart


def test_more_noise_means_a_wider_interval() -> None:
    quiet, noisy = (fit_law(ladder(noise=noise)).predict(*TARGET) for noise in (0.001, 0.004))

    assert noisy.high - noisy.low > 2 * (quiet.high - quiet.low)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "seeds"), [(SIZES, 2), (SIZES, 1), (SIZES[::2], 2)])
def test_interval_covers_a_larger_run_in_about_95_percent_of_repeats(sizes: tuple[int, ...], seeds: int) -> None:
    covered = []
    for chance in range(60):
        found = fit_law(ladder(noise=0.003, chance=chance, seeds=seeds, sizes=sizes), samples=100).predict(*TARGET)
        truth = losses([LAW], *TARGET)[0] * numpy.exp(numpy.random.default_rng(1000 + chance).normal(0, 0.003))
        covered.append(found.low < truth < found.high)

    assert numpy.mean(covered) > 0.85  # of 150 repeats: 95% with two seeds, 91% with one, 100% with two of three sizes


def test_largest_rung_is_predicted_by_the_others() -> None:
    points = ladder(noise=0.001)
    fit = fit_law([point for point in points if point.parameters < SIZES[-1]])

    for point in points[-2:]:
        assert fit.predict(point.parameters, point.tokens).loss == pytest.approx(point.loss, rel=0.01)


def test_two_sizes_have_no_law() -> None:
    with pytest.raises(UserError, match="a ladder of 2 sizes, and a law needs 3: add rungs"):
        fit_law(ladder(sizes=SIZES[:2]))


def test_compute_optimal_size_is_best_at_equal_compute() -> None:
    size = compute_optimal(LAW, 1e10)

    nearby = [losses([LAW], size * factor, 1e10 / factor)[0] for factor in (0.5, 0.99, 1.0, 1.01, 2.0)]

    assert numpy.argmin(nearby) == 2


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (ladder(sizes=SIZES[:1]), "a ladder of 1 sizes, and a law needs 3: add rungs"),
        (ladder()[1::3], "does not separate size from data: add a token budget"),
        (ladder(seeds=1, sizes=SIZES[:3])[::2], "5 losses do not determine five constants"),
        (ladder(noise=0.003, seeds=1, sizes=SIZES[::2]), "3 rungs and seeds are too few to draw from, so there is no"),
    ],
)
def test_runs_that_determine_no_law_are_refused(points: list[EndedRun], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit_law(points)


@pytest.mark.parametrize("loss", [nan, -1.0, 0.0, float("inf")])
def test_loss_that_is_no_positive_number_is_refused_by_rung(loss: float) -> None:
    points = ladder()
    points[8] = replace(points[8], loss=loss)

    with pytest.raises(UserError, match=rf"rung 210000, seed 0: the loss is {loss}; train it again"):
        fit_law(points)


@pytest.mark.parametrize(
    ("rising", "message"),
    [
        (lambda one: one.loss * (one.parameters / SIZES[0]) ** 0.2, "from rung 100000 to rung 2000000: look at the"),
        (lambda one: float(losses([LAW], one.parameters, 1e7)[0]) * (one.tokens / one.parameters) ** 0.02, "with more"),
    ],
    ids=["with size", "with tokens"],
)
def test_losses_that_rise_with_size_are_refused_by_rung(rising: Callable[[EndedRun], float], message: str) -> None:
    with pytest.raises(UserError, match=f"does not fall {message}"):
        fit_law([replace(one, loss=rising(one)) for one in ladder(noise=0.001)])


def test_more_tokens_do_not_hide_that_losses_rise_with_size() -> None:
    # Mean losses of three rungs at two equal lengths: the largest is worse than the smallest at both.
    means = {8_000: (5.20, 5.35, 5.32), 24_000: (4.77, 5.09, 4.80)}
    points = [
        EndedRun(str(size), seed, size, tokens, 6.0 * size * tokens, found[rung] + 0.01 * seed)
        for tokens, found in means.items()
        for rung, size in enumerate((6_984, 19_320, 55_536))
        for seed in range(2)
    ]
    with pytest.raises(UserError, match="does not fall from rung 6984 to rung 55536"):
        fit_law(points)


def test_neighbours_within_the_noise_are_no_rise() -> None:
    points = [replace(one, loss=one.loss * (1.15 if one.rung == "210000" else 1.0)) for one in ladder(noise=0.001)]

    fit_law(points, samples=1)


def test_best_rate_is_the_vertex_of_a_parabola_and_falls_with_size() -> None:
    def trials(size: int, best: float) -> list[tuple[int, float, float]]:
        return [(size, rate, 3 + numpy.log(rate / best) ** 2) for rate in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)]

    found = best_rates([*trials(10**5, 2e-3), *trials(10**6, 1e-3), *trials(10**7, 5e-4)])

    assert found is not None
    assert found.coefficient * 1e6**found.exponent == pytest.approx(1e-3)
    assert found.exponent == pytest.approx(numpy.log10(0.5))
    assert not found.edges


def test_best_rate_at_the_edge_is_named() -> None:
    rates, inside, falling = (0.1, 0.2, 0.4), (3.0, 2.0, 2.5), (3.0, 2.0, 1.5)
    trials = [
        (size, *trial) for size, curve in ((10, inside), (20, falling)) for trial in zip(rates, curve, strict=True)
    ]

    found = best_rates(trials)

    assert found is not None and found.edges == [20]


def test_rate_next_to_a_diverged_one_is_an_edge() -> None:
    trials = [(size, rate, loss) for size in (10, 20) for rate, loss in ((0.1, 3.0), (0.2, 2.0), (0.4, nan))]

    found = best_rates(trials)

    assert found is not None and found.edges == [10, 20]
    assert best_rates(trials[:3]) is None  # of one size
