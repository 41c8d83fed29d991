"""RunClock and the parts of a run's wall time, against a time that moves only when a test moves it, and a real run."""

import json
import os
import re
import time as real_time
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.metrics import clock as clock_module
from recipes.metrics.clock import END, FIRST_STEP, LOADING, LOG, SAVE, START, STEP, Goodput, RunClock
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from tests.processes import untimed
from tests.training import DEBUG, SMALL_MODEL, change, training

CPU = torch.device("cpu")


class Time:
    """Replaces the time module; processor time passes half as fast."""

    def __init__(self) -> None:
        self.now = 100.0

    def thread_time(self) -> float:
        return self.now / 2

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 5000.0 + self.now


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


# Goodput


class Attempt:
    """A RunClock whose phases a test sets."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.began = clock_module.time.monotonic() - sum(seconds.values())

    def elapsed(self) -> dict[str, float]:
        return dict(self.seconds)


def test_moved_seconds_change_their_part_and_never_exceed_it(time: Time) -> None:
    found = Goodput(Attempt(start=2.0, step=6.0), before={})
    found.move("step", "skipped", 1.5)
    found.move("step", "data", 100.0)  # more than there is
    assert found.parts() == {"start": 2.0, "skipped": 1.5, "data": 4.5}


def test_line_and_row_give_the_share_of_every_part(time: Time) -> None:
    found = Goodput(Attempt(start=2.0, skipped=1.5, data=4.5), before={})
    assert found.line() == "goodput 0.0% of 8.0 s; data 56.2%, start 25.0%, skipped 18.8%"
    assert found.row() == {"goodput": 0.0, "wall_seconds": {"start": 2.0, "skipped": 1.5, "data": 4.5}}


def test_time_since_the_checkpoint_counts_as_restarts(time: Time) -> None:
    saved = Goodput(Attempt(start=2.0, step=6.0), before={}).state(finished=False)
    time.now += 50.0  # steps, a crash, a queue
    time.now += 3.0  # the next attempt, so far
    found = Goodput(Attempt(start=3.0), before=json.loads(json.dumps(saved)))
    assert found.parts() == {"start": 5.0, "step": 6.0, "restarts": 50.0}


@pytest.mark.parametrize("finished", [False, True])
def test_a_clock_that_was_a_year_ahead_costs_goodput_only_until_it_is_right(finished: bool, time: Time) -> None:
    before, year = Goodput(Attempt(step=6.0), before={}).state(finished=False), 31_536_000.0
    time.now += year
    ahead = Goodput(Attempt(step=1.0), before=before)
    assert ahead.parts()["restarts"] > year - 60
    state = ahead.state(finished=finished)
    time.now -= year
    assert Goodput(Attempt(step=1.0), before=state).parts().get("restarts", 0.0) < 60


def test_time_after_a_finished_run_does_not_count(time: Time) -> None:
    finished = Goodput(Attempt(start=2.0, step=6.0), before={}).state(finished=True)
    time.now += 9999.0
    longer = Goodput(Attempt(start=1.0, step=1.0), before=finished)
    assert longer.parts() == {"start": 3.0, "step": 7.0}
    assert Goodput(Attempt(start=3.0), before=longer.state(finished=True)).parts() == {"start": 6.0, "step": 7.0}


def test_a_checkpoint_from_before_goodput_existed_starts_at_zero(time: Time) -> None:
    assert Goodput(Attempt(start=1.0), before={"tokens": 7}).parts() == {"start": 1.0}


def attempt(recipe: Recipe, *, breaks_at: int | None) -> tuple[float, tuple[float, float], dict[str, float]]:
    """Run one attempt in this process. Returns when it began, the times around its end, and its goodput parts."""
    from parallel.dist import start, stop

    began = os.times().elapsed  # not the clock under test
    phases_began = real_time.monotonic()
    world = start("cpu", seed=0)
    clock = RunClock(world.device, began=phases_began)
    with training(recipe, world, silent=not world.is_main, clock=clock) as trainer:
        take = trainer.loader.batch

        def slow_or_broken(step: int) -> Any:
            real_time.sleep(0.02)
            if step == breaks_at:
                trainer.checkpoints.finish()
                raise ZeroDivisionError
            return take(step)

        trainer.loader.batch = slow_or_broken
        try:
            assert trainer.run() == 0
        except ZeroDivisionError:
            assert breaks_at is not None
        before, parts, after = os.times().elapsed, trainer.recorder.goodput.parts(), os.times().elapsed
    stop()
    return began, (before, after), parts


@pytest.mark.slow
def test_the_parts_add_up_to_the_wall_time_over_two_attempts(corpus: Path, tmp_path: Path) -> None:
    recipe = change(
        load(DEBUG),
        run={"steps": 40, "output": str(tmp_path / "runs"), "name": "run"},
        model=SMALL_MODEL,
        data={"source": str(corpus), "cache": str(tmp_path / "cache"), "validation_fraction": 0.05},
        batch={"sequence_length": 64, "global_batch_size": 4, "micro_batch_size": 2},
        schedule={"warmup_steps": 5, "decay_steps": 5},
        checkpoint={"every": 20},
        metrics={"every": 1},
        validation={"every": 15, "batches": 4, "sample_tokens": 0},
    )
    began, (before, after), parts = attempt(recipe, breaks_at=30)
    assert before - began - 0.02 < sum(parts.values()) < after - began + 0.02  # the clock of os.times() is coarse
    assert parts["data"] > 30 * 0.02
    assert {"start", "first step", "step", "data", "log", "validation", "save"} <= parts.keys()
    real_time.sleep(0.5)
    _, (before, after), parts = attempt(recipe, breaks_at=None)
    assert before - began - 0.02 < sum(parts.values()) < after - began + 0.02
    assert parts["restarts"] > 0.5 + 10 * 0.02  # the pause, and at least ten lost steps
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if "loss" in row]
    for row in logged:
        assert row["goodput"] == pytest.approx(
            row["wall_seconds"].get("step", 0.0) / sum(row["wall_seconds"].values()), abs=0.001
        )
    assert ["restarts" in row["wall_seconds"] for row in logged] == [False] * 20 + [True] * 20
    log = untimed((tmp_path / "runs/run/log.txt").read_text())
    [logged_share] = re.findall(r"\ngoodput .* restarts ([\d.]+)%", log)
    # The line was logged a little before the parts were taken.
    assert float(logged_share) / 100 == pytest.approx(parts["restarts"] / sum(parts.values()), abs=0.1)


def test_parts_of_a_start_have_names_and_leave_the_rest(time: Time) -> None:
    run = RunClock(CPU, began=time.now - 9.0)
    run.name_start("imports", time.now - 2.0)
    run.name_start("joining")
    time.now += 1.0
    assert run.elapsed() == {"start": 1.0, "imports": 7.0, "joining": 2.0}
