"""The factor of a ladder's learning rates, from trials."""

from math import inf

import pytest

from recipes.lab.ladder.fit import Trial
from recipes.lab.ladder.ladder import settle_factor


def trials(*rungs: dict[float, float]) -> list[Trial]:
    """One dictionary for each rung: factor -> loss."""
    return [
        Trial(f"{number}", 10**number, factor, factor, loss)
        for number, rung in enumerate(rungs, 4)
        for factor, loss in rung.items()
    ]


@pytest.mark.parametrize(
    ("rungs", "factor"),
    [
        ([{0.5: 3.70, 1: 3.72, 2: 3.69}, {0.5: 3.44, 1: 4.11, 2: 4.13}], 0.5),  # one rung is at the edge of stability
        ([{0.5: 3.70, 1: 3.72, 2: 3.50}, {0.5: 3.60, 1: 3.61, 2: 3.30}], 1.0),  # higher ones are better, and not taken
        ([{0.5: 3.70, 1: 3.72, 2: 3.71}, {0.5: 3.70, 1: 3.69, 2: inf}], 1.0),  # within the noise
        ([{0.5: 3.70, 1: inf, 2: inf}, {0.5: 3.60, 1: 3.50, 2: 3.40}], 0.5),
        ([{0.25: inf, 0.5: inf, 1: inf}, {0.25: 3.5, 0.5: 3.4, 1: 3.3}], 0.25),  # nothing trains it: the lowest
    ],
)
def test_the_largest_rate_up_to_the_asked_one_whose_loss_is_near_the_best_is_taken(
    rungs: list[dict[float, float]], factor: float
) -> None:
    assert settle_factor(trials(*rungs)) == factor
