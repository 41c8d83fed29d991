"""What is read of runs whose files are not as they should be."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel.errors import UserError
from recipes.lab.curves.reading import read_run, read_runs
from tests.recipes.lab.curves.runs import row, run_folder


def test_lines_that_are_not_rows_are_counted_and_left_out(tmp_path: Path) -> None:
    odd = [
        "[1]\n",
        '{"loss": 1}\n',
        '{"step": true}\n',
        '{"step": -1}\n',
        "[" * 100_000 + "\n",
        f'{{"step": {10**400}}}\n',
        "\0\0\n",
        "\n",
    ]
    run = read_run(run_folder(tmp_path / "a", row(1), *odd, row(2), '{"step": 3, "lo'))  # the last one: half-written
    assert run.columns["loss"].steps.tolist() == [1, 2] and run.unreadable == len(odd)


def test_a_repeated_step_has_its_last_value_and_marks_a_restart(tmp_path: Path) -> None:
    lost = [row(3), {"step": 3, "validation_loss": 9.0}, row(4), {"step": 4, "skipped": True}, row(5)]
    run = read_run(run_folder(tmp_path / "a", row(1), row(2), *lost, row(3, loss=1.5), row(6)))
    assert run.columns["loss"].steps.tolist() == [1, 2, 3, 6]
    assert run.columns["loss"].values[2] == 1.5
    assert not run.has("validation_loss") and run.skipped == [] and run.restarts == [2]


def test_time_lost_before_a_restart_marks_it_where_rows_were_cut_off(tmp_path: Path) -> None:
    later = [row(step, wall_seconds={"step": 3.0, "restarts": 40.0}) for step in (3, 4)]
    assert read_run(run_folder(tmp_path / "a", row(1), row(2), *later)).restarts == [2]


def test_null_and_what_is_not_a_number_are_gaps(tmp_path: Path) -> None:
    values = [None, "x", True, [1], 10**400, 1e308, -1e308]
    run = read_run(
        run_folder(tmp_path / "a", row(1), *(row(step + 2, loss=value) for step, value in enumerate(values)))
    )
    assert np.isnan(run.columns["loss"].values).tolist() == [False, *[True] * len(values)]


def test_stages_begin_after_the_last_row_of_the_stage_before(tmp_path: Path) -> None:
    rows = [row(1, stage="short"), row(10, stage="short"), row(20, stage="long"), row(30, stage="long")]
    assert read_run(run_folder(tmp_path / "a", *rows)).stages == [(0, "short"), (10, "long")]


def test_of_a_very_long_run_some_rows_are_read_and_what_is_rare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rare: list[dict[str, Any]] = [{"step": 7, "skipped": True}, {"step": 9, "validation_loss": 2.0}]
    folder = run_folder(tmp_path / "a", *map(row, range(1, 9)), *rare, *map(row, range(9, 1001)))
    monkeypatch.setattr("recipes.lab.curves.reading.LARGE", (folder / "metrics.jsonl").stat().st_size // 9)
    run = read_run(folder)
    assert 100 <= len(run.columns["loss"].steps) <= 102 and run.columns["loss"].last == 1000 and run.restarts == []
    assert run.skipped == [7] and run.columns["validation_loss"].steps.tolist() == [9]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / place / "a", row(1)) for place in ("here", "there")]
    twice = [*folders, folders[0], folders[0] / "metrics.jsonl", folders[1] / "../a"]
    assert [os.path.realpath(run.name) for run in read_runs(twice)] == [str(folder) for folder in folders]


def test_a_damaged_recipe_is_an_unknown_one(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", row(1))
    (folder / "recipe.toml").write_bytes(b"\xff\xfe = ")
    (folder / "environment.json").write_text("[1]")
    run = read_run(folder)
    assert run.recipe == {} and run.environment == {} and run.trunk is None


def test_names_become_what_every_screen_can_show(tmp_path: Path) -> None:
    odd = {"validation_loss/\ud800\x1b[2J": 2.0, "stage": "a\nb\ud800"}
    run = read_run(run_folder(tmp_path / os.fsdecode(b"\xff"), row(1, **odd)))
    assert (run.name, run.named("validation_loss"), run.stages) == (
        "\ufffd",
        ["validation_loss/\ufffd\ufffd[2J"],
        [(0, "a\ufffdb\ufffd")],
    )


def pipe(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "metrics.jsonl")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder.mkdir(), "has no metrics.jsonl: it has not logged a step yet"),
        (lambda folder: folder.write_text(""), "is not the folder of a run"),
        (lambda folder: run_folder(folder, '{"step": 1'), "has no rows"),
        (lambda folder: (folder / "metrics.jsonl").mkdir(parents=True), "cannot be read: it is not a regular file"),
        (pipe, "it is not a regular file"),
        (lambda folder: folder.symlink_to(folder), "cannot be read: Too many"),
    ],
)
def test_a_folder_without_rows_is_refused(tmp_path: Path, make: object, message: str) -> None:
    assert callable(make)
    make(tmp_path / "a")
    with pytest.raises(UserError, match=message):
        read_run(tmp_path / "a")
