"""The parts of a run's wall time, against a clock of its own, and over attempts."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from recipes.load import load
from recipes.metrics import goodput as room
from recipes.metrics.goodput import Goodput
from recipes.schema import Recipe
from tests.processes import run_processes
from tests.training import DEBUG, change, training


class Attempt:
    """A clock of phases that a test sets."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.began = room.time.monotonic() - sum(seconds.values())

    def elapsed(self) -> dict[str, float]:
        return dict(self.seconds)


class Time:
    """Stands in for both clocks."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return 5000.0 + self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(room, "time", clock)
    return clock


def test_what_is_moved_is_not_lost(clock: Time) -> None:
    found = Goodput(Attempt(start=2.0, step=6.0), before={})
    found.move("step", "skipped", 1.5)
    found.move("step", "data", 100.0)  # there is not so much
    assert found.parts() == {"start": 2.0, "skipped": 1.5, "data": 4.5}
    assert found.line() == "goodput 0.0% of 8.0 s; data 56.2%, start 25.0%, skipped 18.8%"
    assert found.row() == {"goodput": 0.0, "wall_seconds": {"start": 2.0, "skipped": 1.5, "data": 4.5}}


def test_what_a_checkpoint_does_not_know_of_is_restarts(clock: Time) -> None:
    saved = Goodput(Attempt(start=2.0, step=6.0), before={}).state(finished=False)
    clock.now += 50.0  # steps, a crash, a queue
    clock.now += 3.0  # the next attempt, so far
    found = Goodput(Attempt(start=3.0), before=json.loads(json.dumps(saved)))
    assert found.parts() == {"start": 5.0, "step": 6.0, "restarts": 50.0}
    again = Goodput(Attempt(start=3.0), before=found.state(finished=True))
    clock.now += 9999.0  # a finished run rests
    longer = Goodput(Attempt(start=1.0, step=1.0), before=again.state(finished=True))
    assert longer.parts() == {"start": 9.0, "step": 7.0, "restarts": 50.0}


def test_checkpoints_of_before_lack_it(clock: Time) -> None:
    assert Goodput(Attempt(start=1.0), before={"tokens": 7}).parts() == {"start": 1.0}


def attempt(recipe: Recipe, *, breaks_at: int | None) -> tuple[float, float, dict[str, float]]:
    """One attempt in this process; the moments of its beginning and end, and what it says of where its time went."""
    from parallel.dist import start, stop
    from recipes.metrics.clock import RunClock

    began = os.times().elapsed  # not the clock that is tested
    phases_began = time.monotonic()
    world = start("cpu", seed=0)
    clock = RunClock(world.device, began=phases_began)
    with training(recipe, world, silent=not world.is_main, clock=clock) as trainer:
        take = trainer.loader.take

        def slow_or_broken(step: int) -> Any:
            time.sleep(0.02)
            if step == breaks_at:
                trainer.checkpoints.finish()
                raise ZeroDivisionError
            return take(step)

        trainer.loader.take = slow_or_broken
        try:
            assert trainer.run() == 0
        except ZeroDivisionError:
            assert breaks_at is not None
        parts, ended = trainer.goodput.parts(), os.times().elapsed
    stop()
    return began, ended, parts


def test_the_parts_add_up_over_attempts(corpus: Path, tmp_path: Path) -> None:
    recipe = change(
        load(DEBUG),
        run={"steps": 40, "output": str(tmp_path / "runs"), "name": "run"},
        data={"source": str(corpus), "cache": str(tmp_path / "cache"), "validation_fraction": 0.05},
        batch={"sequence_length": 64, "global_batch_size": 4, "micro_batch_size": 2},
        schedule={"warmup_steps": 5, "decay_steps": 5},
        checkpoint={"every": 20},
        metrics={"every": 1},
        validation={"every": 15, "batches": 4, "sample_tokens": 0},
    )
    [(began, ended, parts)] = run_processes(1, one, recipe, 30)
    assert sum(parts.values()) == pytest.approx(ended - began, rel=0.01)
    assert 30 * 0.02 < parts["data"] < 0.5 * (ended - began)
    assert {"start", "first step", "step", "data", "log", "validation", "save"} <= parts.keys()
    time.sleep(2.0)
    [(_, ended, parts)] = run_processes(1, one, recipe, None)
    assert sum(parts.values()) == pytest.approx(ended - began, rel=0.01)
    assert parts["restarts"] > 2.0 + 10 * 0.02  # the pause, and ten lost steps at least
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if "loss" in row]
    for row in logged:
        assert row["goodput"] == pytest.approx(
            row["wall_seconds"].get("step", 0.0) / sum(row["wall_seconds"].values()), abs=0.001
        )
    assert ["restarts" in row["wall_seconds"] for row in logged] == [False] * 20 + [True] * 20
    log = (tmp_path / "runs/run/log.txt").read_text()
    [told] = re.findall(r"\ngoodput .* restarts ([\d.]+)%", log)
    assert float(told) / 100 == pytest.approx(parts["restarts"] / sum(parts.values()), abs=0.1)  # some time ago


def one(recipe: Recipe, breaks_at: int | None) -> tuple[float, float, dict[str, float]]:
    return attempt(recipe, breaks_at=breaks_at)
