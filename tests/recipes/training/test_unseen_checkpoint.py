"""The small files of the checkpoint that a stage or a resumed run begins from: damaged, or seen late by one process."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel.dist import World
from parallel.errors import TemporaryError
from recipes.checkpoint import folder as folders
from recipes.files.exit_codes import FINISHED
from recipes.files.layout import CHECKPOINTS, DATA, MODEL, step_folder
from recipes.training import build_run, run
from tests.processes import run_processes
from tests.recipes.training.test_stages import BORDER, Runs, run_recipe, runs  # noqa: F401

pytestmark = pytest.mark.slow


def hide(place: str, seconds: float) -> None:
    """Let this process not see the files at a place, as behind a network file system's cache of names, until so many
    seconds after it first looked."""
    seen: list[float] = []

    def hidden(call: Callable[..., Any]) -> Callable[..., Any]:
        def looked(path: Any, *arguments: Any, **options: Any) -> Any:
            if place in str(path) and ".partial" not in str(path):
                seen.append(time.monotonic())
                if seen[-1] - seen[0] < seconds:
                    raise FileNotFoundError(2, "No such file or directory", str(path))
            return call(path, *arguments, **options)

        return looked

    for name in ("stat", "lstat", "listdir", "open"):
        setattr(os, name, hidden(getattr(os, name)))
    Path.read_text = hidden(Path.read_text)  # type: ignore[method-assign]


def run_half_blind(file: Path, step: int, seconds: float, patience: float) -> int | str:
    """Run as train.py does; process 1 does not see the folder of a step for some seconds."""
    folders.PATIENCE = patience
    begin = run.train_stages

    def train_stages(*arguments: Any) -> int:
        if arguments[1].world.rank == 1:
            hide(f"step-{step:08d}", seconds)
        return begin(*arguments)

    run.train_stages = train_stages
    try:
        return run_recipe(file, ())
    except TemporaryError as error:
        return str(error)


def test_a_process_that_sees_a_border_late_waits_for_it(runs: Runs) -> None:  # noqa: F811
    codes = run_processes(2, run_half_blind, runs.recipe("late"), BORDER, 3.0, 60.0)
    assert codes == [FINISHED, FINISHED]


def test_a_process_that_sees_the_checkpoint_of_a_resumed_run_late_waits_for_it(runs: Runs) -> None:  # noqa: F811
    runs.kill_after(7, "late_again")
    codes = run_processes(2, run_half_blind, runs.recipe("late_again"), 6, 3.0, 60.0)
    assert codes == [FINISHED, FINISHED]


def test_a_process_that_never_sees_it_ends_the_run_as_temporary(runs: Runs) -> None:  # noqa: F811
    codes = run_processes(2, run_half_blind, runs.recipe("never"), BORDER, 1e9, 2.0)
    assert "is missing for process 1, while another one sees it whole" in str(codes[0])
    runs.finish("never", processes=2)


@pytest.mark.parametrize("lost", [MODEL, DATA, "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_border_that_has_lost_a_file_is_damaged(
    lost: str,
    cut: bool,
    runs: Runs,  # noqa: F811
    alone: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"lost_{lost}_{cut}"
    border = step_folder(runs.folder / "runs" / name / CHECKPOINTS, BORDER)
    build = build_run._build_stage

    def build_stage(*arguments: Any, **options: Any) -> Any:
        if arguments[1].metrics is not None:  # the second stage
            if cut:
                os.truncate(border / lost, 7)
            else:
                (border / lost).unlink()
        return build(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(build_run, "_build_stage", build_stage)
        with pytest.raises(TemporaryError, match=rf"{lost}.*; the same command resumes from an older checkpoint"):
            runs.train(name, alone)
    assert runs.train(name, alone) == FINISHED
    assert list(runs.curve(name).values()) == pytest.approx(list(runs.curve("whole").values()), rel=1e-6)
