"""Learning rates at the steps where the schedule changes."""

import math

import pytest

from recipes.optimization.config import ScheduleConfig


def rates(schedule: ScheduleConfig, steps: int = 100, peak: float = 2.0) -> list[float]:
    return [schedule.learning_rate(step, peak=peak, steps=steps) for step in range(steps)]


@pytest.mark.parametrize("kind", ["wsd", "cosine", "linear", "constant"])
def test_warm_up_is_linear_and_the_rate_is_never_zero(kind: str) -> None:
    decay = 20 if kind == "wsd" else 0
    found = rates(ScheduleConfig(kind=kind, warmup_steps=10, decay_steps=decay))
    assert found[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert min(found) > 0
    assert max(found) == 2.0


def test_wsd_holds_the_peak_and_then_falls_linearly_to_the_last_step() -> None:
    found = rates(ScheduleConfig(kind="wsd", warmup_steps=10, decay_steps=20))
    assert set(found[9:81]) == {2.0}
    assert found[80:] == pytest.approx([2.0 * (20 - step) / 20 for step in range(20)])


def test_wsd_ends_at_the_minimum_ratio() -> None:
    found = rates(ScheduleConfig(kind="wsd", decay_steps=1000, min_lr_ratio=0.1), steps=1000)
    assert found[-1] == pytest.approx(2.0 * (0.1 + 0.9 / 1000))


def test_cosine_is_halfway_between_peak_and_minimum_in_the_middle() -> None:
    found = rates(ScheduleConfig(kind="cosine", warmup_steps=20, min_lr_ratio=0.5))
    assert found[60] == pytest.approx(2.0 * 0.75)
    assert found[40] == pytest.approx(2.0 * (0.5 + 0.5 * (1 + math.cos(math.pi / 4)) / 2))


def test_linear_falls_in_proportion_to_the_steps() -> None:
    assert rates(ScheduleConfig(kind="linear"))[25] == pytest.approx(1.5)


def test_constant_stays_at_the_peak() -> None:
    assert set(rates(ScheduleConfig(kind="constant", warmup_steps=1))) == {2.0}


@pytest.mark.parametrize(
    ("warmup", "decay", "steps", "expected"),
    [
        (0.1, 0.2, 150, (15, 30)),
        (0.1, 0.2, 40, (4, 8)),
        (0.1, 0.2, 2, (1, 1)),
        (0.1, 0.2, 1, (1, 0)),  # at least one step each, as far as there are any
        (0.1, 0.9, 3, (1, 2)),
        (15, 0.2, 150, (15, 30)),
        (0.7, 0.5, 10, (7, 5)),  # too much, which a rule refuses
    ],
)
def test_a_number_below_1_is_a_share_of_the_run(
    warmup: float, decay: float, steps: int, expected: tuple[int, int]
) -> None:
    assert ScheduleConfig(warmup_steps=warmup, decay_steps=decay).phases(steps) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("1-sqrt", [1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)]),
        ("cosine", [1.0, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4]),
    ],
)
def test_the_decay_after_the_plateau_has_the_shape_that_is_asked_for(shape: str, expected: list[float]) -> None:
    found = rates(ScheduleConfig(kind="wsd", decay_steps=4, decay=shape), steps=8, peak=1.0)
    assert found == pytest.approx([1.0] * 4 + expected)
    floor = rates(ScheduleConfig(kind="wsd", decay_steps=4, decay=shape, min_lr_ratio=0.5), steps=8, peak=1.0)
    assert floor[4:] == pytest.approx([0.5 + share / 2 for share in expected])


def test_the_shape_of_a_final_decay_means_nothing_to_other_kinds() -> None:
    for kind in ("cosine", "linear"):
        assert rates(ScheduleConfig(kind=kind, decay="1-sqrt")) == rates(ScheduleConfig(kind=kind))
