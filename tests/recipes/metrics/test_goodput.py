"""The parts of a run's wall time, against a separate clock, and over several attempts."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.metrics import clock as clock_module
from recipes.metrics.clock import Goodput
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from tests.processes import untimed
from tests.training import DEBUG, SMALL_MODEL, change, training


class Attempt:
    """A RunClock whose phases a test sets."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.began = clock_module.time.monotonic() - sum(seconds.values())

    def elapsed(self) -> dict[str, float]:
        return dict(self.seconds)


class Time:
    """Replaces the time module, for wall time and monotonic time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return 5000.0 + self.now

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(clock_module, "time", clock)
    return clock


def test_moved_seconds_change_their_part_and_never_exceed_it(clock: Time) -> None:
    found = Goodput(Attempt(start=2.0, step=6.0), before={})
    found.move("step", "skipped", 1.5)
    found.move("step", "data", 100.0)  # more than there is
    assert found.parts() == {"start": 2.0, "skipped": 1.5, "data": 4.5}


def test_line_and_row_give_the_share_of_every_part(clock: Time) -> None:
    found = Goodput(Attempt(start=2.0, skipped=1.5, data=4.5), before={})
    assert found.line() == "goodput 0.0% of 8.0 s; data 56.2%, start 25.0%, skipped 18.8%"
    assert found.row() == {"goodput": 0.0, "wall_seconds": {"start": 2.0, "skipped": 1.5, "data": 4.5}}


def test_time_since_the_checkpoint_counts_as_restarts(clock: Time) -> None:
    saved = Goodput(Attempt(start=2.0, step=6.0), before={}).state(finished=False)
    clock.now += 50.0  # steps, a crash, a queue
    clock.now += 3.0  # the next attempt, so far
    found = Goodput(Attempt(start=3.0), before=json.loads(json.dumps(saved)))
    assert found.parts() == {"start": 5.0, "step": 6.0, "restarts": 50.0}


def test_time_after_a_finished_run_does_not_count(clock: Time) -> None:
    finished = Goodput(Attempt(start=2.0, step=6.0), before={}).state(finished=True)
    clock.now += 9999.0
    longer = Goodput(Attempt(start=1.0, step=1.0), before=finished)
    assert longer.parts() == {"start": 3.0, "step": 7.0}
    assert Goodput(Attempt(start=3.0), before=longer.state(finished=True)).parts() == {"start": 6.0, "step": 7.0}


def test_a_checkpoint_from_before_goodput_existed_starts_at_zero(clock: Time) -> None:
    assert Goodput(Attempt(start=1.0), before={"tokens": 7}).parts() == {"start": 1.0}


def attempt(recipe: Recipe, *, breaks_at: int | None) -> tuple[float, tuple[float, float], dict[str, float]]:
    """Run one attempt in this process. Returns when it began, the times around its end, and its goodput parts."""
    from parallel.dist import start, stop
    from recipes.metrics.clock import RunClock

    began = os.times().elapsed  # not the clock under test
    phases_began = time.monotonic()
    world = start("cpu", seed=0)
    clock = RunClock(world.device, began=phases_began)
    with training(recipe, world, silent=not world.is_main, clock=clock) as trainer:
        take = trainer.loader.batch

        def slow_or_broken(step: int) -> Any:
            time.sleep(0.02)
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
    time.sleep(0.5)
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


def test_parts_of_a_start_have_names_and_leave_the_rest(clock: Time) -> None:
    run = clock_module.RunClock(torch.device("cpu"), began=clock.now - 9.0)
    run.name_start("imports", clock.now - 2.0)
    run.name_start("joining")
    clock.now += 1.0
    assert run.elapsed() == {"start": 1.0, "imports": 7.0, "joining": 2.0}
