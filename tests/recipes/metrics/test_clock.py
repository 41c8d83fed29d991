"""RunClock, against a fake time source that moves only when a test moves it."""

import pytest
import torch

from recipes.metrics import clock as clock_module
from recipes.metrics.clock import END, FIRST_STEP, LOADING, LOG, SAVE, START, STEP, RunClock

CPU = torch.device("cpu")


class Time:
    """Replaces the time module; processor time passes half as fast."""

    def __init__(self) -> None:
        self.now = 100.0

    def thread_time(self) -> float:
        return self.now / 2

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(clock_module, "time", time)
    return time


def test_every_second_belongs_to_the_innermost_phase(time: Time) -> None:
    clock = RunClock(CPU, began=90.0)
    time.now += 3.0
    clock.begin(END)
    with clock(FIRST_STEP):
        time.now += 1.0
        with clock(LOADING):
            time.now += 0.5
            with pytest.raises(ZeroDivisionError), clock(SAVE):
                time.now += 7.0
                raise ZeroDivisionError
            time.now += 0.25
        clock.count_step()
        assert clock.now == STEP
        time.now += 2.0
        with clock(LOG):
            time.now += 0.125
        assert clock.now == STEP
    time.now += 4.0
    found = clock.elapsed()
    expected = {START: 13.0, FIRST_STEP: 1.0, LOADING: 0.75, SAVE: 7.0, STEP: 2.0, LOG: 0.125, END: 4.0}
    assert {phase: seconds for phase, seconds in found.items() if seconds} == expected
    assert sum(found.values()) == time.now - 90.0


def test_step_time_includes_loading_but_not_synchronized_phases(time: Time) -> None:
    clock = RunClock(CPU)
    clock.begin(FIRST_STEP)
    for seconds_of_data in (1.0, 0.5):
        with clock(LOADING):
            time.now += seconds_of_data
        time.now += 2.0
        clock.count_step()
    with clock.synchronized(SAVE):
        time.now += 1000.0
    assert clock.seconds_per_step() == ((1.0 + 2.0 + 0.5 + 2.0) / 2, 1.5 / 2)
    with clock.synchronized(SAVE):
        time.now += 50.0
    time.now += 0.5
    assert clock.seconds_per_step() == (6.0 / 2, 1.5 / 2)


def test_restart_begins_a_new_mean(time: Time) -> None:
    clock = RunClock(CPU)
    clock.begin(STEP)
    time.now += 7.0
    clock.count_step()
    clock.restart()
    for _ in range(4):
        time.now += 3.0
        clock.count_step()
    assert clock.seconds_per_step() == (3.0, 0.0)
    assert clock.step == 5


def test_entering_and_leaving_a_phase_is_progress(time: Time) -> None:
    clock = RunClock(CPU)
    time.now += 1.0
    with clock(LOADING):
        assert clock.moved_at == time.now
        time.now += 1.0
    assert clock.moved_at == time.now


def test_each_item_taken_with_progress_is_progress(time: Time) -> None:
    clock = RunClock(CPU)
    time.now += 1.0
    for _ in clock.with_progress("ab"):
        assert clock.moved_at == time.now
        time.now += 1.0
    assert clock.moved_at == time.now - 1.0
