"""The report of a run: while it trains, and at its end."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.dist import start, stop
from recipes.files.layout import LOG_FILE, REPORT
from recipes.recipe.load import to_toml
from recipes.recipe.schema import Recipe
from tests.processes import PATIENCE, ROOT, run_processes, wait_for
from tests.training import change, run_all, train

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(small: Recipe) -> Recipe:
    shutil.rmtree(small.run.output, ignore_errors=True)
    return change(small, run={"steps": 2}, checkpoint={"every": 0}, metrics={"picture": True})


def run_with_a_log(recipe: Recipe) -> int:
    world = start("cpu", seed=0)
    code = train(recipe, world, silent=False)
    stop()
    return code


def test_a_run_ends_with_a_report(recipe: Recipe) -> None:
    assert run_processes(1, run_all, [recipe]) == [[0]]
    assert (recipe.run.folder / REPORT).read_text().startswith("<!DOCTYPE html>")


def test_a_report_that_cannot_be_written_changes_no_exit_code(recipe: Recipe) -> None:
    first = change(recipe, metrics={"picture": False}, checkpoint={"every": 2})
    blocked = change(recipe, run={"steps": 4}, checkpoint={"every": 2})
    assert run_processes(1, run_all, [first]) == [[0]]
    Path(recipe.run.folder / REPORT).mkdir()
    assert run_processes(1, run_with_a_log, blocked) == [0]
    log = (recipe.run.folder / LOG_FILE).read_text()
    assert f"{REPORT} was not written: --out {recipe.run.folder / REPORT} cannot be written" in log


def test_a_report_is_written_after_the_first_validation_while_the_run_goes_on(recipe: Recipe, tmp_path: Path) -> None:
    long = change(recipe, run={"steps": 100_000}, validation={"every": 2, "batches": 1}, metrics={"every": 100})
    (tmp_path / "long.toml").write_text(to_toml(long))
    page, card = (long.run.folder / f"report.{kind}" for kind in ("html", "md"))
    command = [sys.executable, ROOT / "train.py", tmp_path / "long.toml"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        try:
            wait_for("the report", card.exists)
            text = page.read_text()
            run.send_signal(signal.SIGINT)
            assert run.wait(PATIENCE) == 130
        finally:
            run.kill()
    assert "<p>running: smollm3_debug, 1 x " in text and "validation loss" in text
    assert "validation loss" in card.read_text()
