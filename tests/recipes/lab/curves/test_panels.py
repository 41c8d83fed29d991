"""What is drawn of runs: which panels, which points."""

from pathlib import Path

import numpy as np
import pytest

from parallel.errors import UserError
from recipes.lab.curves.panels import MOST, Curves, Panel, curves, smoothed, thinned
from recipes.lab.curves.reading import read_runs
from recipes.lab.curves.style import short
from tests.recipes.lab.curves.runs import row, run_folder


def panel(drawn: Curves, beginning: str) -> Panel:
    [found] = [panel for panel in drawn.panels if panel.title.startswith(beginning)]
    return found


def test_only_panels_with_values_are_drawn(tmp_path: Path) -> None:
    drawn = curves(read_runs([run_folder(tmp_path / "a", row(1), row(2))]), "steps")
    titles = " ".join(panel.title for panel in drawn.panels)
    assert "training loss" in titles and "peak memory" in titles
    assert "validation" not in titles and "MFU" not in titles and "GPU" not in titles


def test_a_row_of_an_old_version_is_enough(tmp_path: Path) -> None:
    old = [{"step": step, "loss": 2.0, "step_seconds": 30.0} for step in (10, 20)]
    for axis in ("steps", "hours"):
        drawn = curves(read_runs([run_folder(tmp_path / axis / "a", *old)]), axis)
        assert [panel.title for panel in drawn.panels] == ["training loss, nats per token"]
    assert (drawn.unit, drawn.panels[0].lines[0].x.tolist()) == ("minutes", [5.0, 10.0])


def test_validation_losses_keep_their_names_and_steps_between_logged_ones(tmp_path: Path) -> None:
    rows = [row(10), {"step": 15, "tokens": 15000, "validation_loss/a": 3.0, "validation_loss/b": 4.0}, row(20)]
    [a, b] = panel(curves(read_runs([run_folder(tmp_path / "a", *rows)]), "hours"), "validation").lines
    assert (a.name, a.y.tolist(), b.name, b.y.tolist()) == ("a", [3.0], "b", [4.0])
    assert a.x == pytest.approx([15 * 2 / 60])  # minutes; half-way between the rows


def test_losses_of_averages_are_lines_of_their_own_beside_those_of_the_weights(tmp_path: Path) -> None:
    losses = {"validation_loss/a": 3.0}, {"validation_average_loss/a": 2.5}
    run = run_folder(tmp_path / "a", row(10), *({"step": 10, **loss} for loss in losses))
    [own, average] = panel(curves(read_runs([run]), "steps"), "validation").lines
    assert (own.name, average.name, average.y.tolist()) == ("a", "a average", [2.5])
    single = run_folder(tmp_path / "b", row(10), {"step": 10, "validation_average_loss": 2.5})
    assert [line.name for line in panel(curves(read_runs([single]), "steps"), "validation").lines] == ["average"]


def test_the_thinned_points_of_a_long_run_keep_their_extremes(tmp_path: Path) -> None:
    values = np.sin(np.arange(25_000.0))
    values[777] = 50.0
    values[100:140] = np.nan
    x, mean, low, high = thinned(np.arange(25_000.0), values)
    assert len(x) == len(mean) == MOST
    assert np.nanmax(high) == 50.0 and np.nanmin(low) == np.nanmin(values)
    assert np.isnan(mean).sum() in (1, 2)  # groups of 25 without a value
    assert x[0] == pytest.approx(12.0)


def test_smoothing_shifts_nothing_and_leaves_gaps() -> None:
    line = np.arange(1000.0)
    line[300] = np.nan
    found = smoothed(line)
    assert np.isnan(found[300]) and np.isfinite(np.delete(found, 300)).all()
    assert np.allclose(found[400:900], line[400:900])
    noise = np.random.default_rng(0).normal(size=1000)
    assert smoothed(noise).std() < 0.3 * noise.std()


@pytest.mark.parametrize("length", [0, 1, 2, 10])
def test_short_curves_are_not_smoothed(length: int) -> None:
    assert smoothed(np.arange(float(length))).tolist() == list(range(length))


def test_norms_by_group_are_drawn_of_a_single_run(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / name, row(1, **{"grad_norm/head": 0.5})) for name in "ab"]
    assert panel(curves(read_runs(folders[:1]), "steps"), "gradient norm by group").lines[0].name == "head"
    assert not [found for found in curves(read_runs(folders), "steps").panels if "by group" in found.title]


def test_losses_of_sources_are_drawn_also_of_several_runs(tmp_path: Path) -> None:
    losses = {"loss/data/web": 2.5, "loss/data/code": 1.5, "tokens/data/web": 7, "tokens/data/code": 3}
    later = losses | {"loss/data/code": None}  # no target of it in this step
    folders = [run_folder(tmp_path / name, row(1, **losses), row(2, **later)) for name in "ab"]
    drawn = panel(curves(read_runs(folders), "steps"), "training loss by source")
    assert [(line.run, line.name) for line in drawn.lines] == [
        (n, f"data/{x}") for n in (0, 1) for x in ("web", "code")
    ]


def test_loads_of_experts_are_drawn(tmp_path: Path) -> None:
    loads = {"expert_load/largest": 2.5, "expert_load/smallest": 0.5, "expert_load/entropy": 0.9, "expert_load/dead": 1}
    drawn = curves(read_runs([run_folder(tmp_path / "a", row(1, **loads))]), "steps")
    assert [line.name for line in panel(drawn, "loads of experts").lines] == ["largest", "entropy", "smallest"]
    assert panel(drawn, "dead experts").lines[0].y.tolist() == [1]


def test_the_high_start_of_a_long_run_does_not_flatten_the_rest(tmp_path: Path) -> None:
    rows = [row(step, loss=12.0 if step < 3 else 2.0 + 1 / step) for step in range(1, 201)]
    bottom, top = panel(curves(read_runs([run_folder(tmp_path / "a", *rows)]), "steps"), "training").ends
    assert bottom is not None and top is not None and 1.9 < bottom < 2.01 < top < 8


def test_shares_of_the_wall_time_add_up_to_one(tmp_path: Path) -> None:
    shares = panel(curves(read_runs([run_folder(tmp_path / "a", *map(row, range(1, 200)))]), "steps"), "where").shares
    assert shares is not None
    assert list(shares.parts) == ["step", "save", "start"]
    assert np.allclose(sum(shares.parts.values()), 1) and np.allclose(shares.parts["step"], 0.5)


def test_several_runs_get_one_bar_each(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / name, row(1), row(7200)) for name in "ab"]
    bars = panel(curves(read_runs(folders), "steps"), "wall time in hours").bars
    assert bars == [{"step": 2.0, "save": 1.0, "start": 1.0}] * 2


@pytest.mark.parametrize("source", ["runs/trunk@50", "runs/trunk"])
def test_a_fork_is_joined_to_its_trunk_at_its_step(tmp_path: Path, source: str) -> None:
    trunk = run_folder(tmp_path / "runs" / "trunk", *(row(step) for step in range(10, 101, 10)))
    fork = run_folder(
        tmp_path / "runs" / "fork", *(row(step) for step in (55, 60)), recipe={"run": {"continue_from": source}}
    )
    [joint] = panel(curves(read_runs([trunk, fork]), "tokens"), "training").joints
    assert (joint.run, joint.x) == (1, (50_000.0, 55_000.0))
    assert panel(curves(read_runs([fork]), "tokens"), "training").joints == []


def test_what_a_fork_has_noted_of_its_origin_counts_more_than_its_recipe(tmp_path: Path) -> None:
    fork = run_folder(tmp_path / "fork", row(55), recipe={"run": {"continue_from": "elsewhere"}})
    (fork / "origin.json").write_text('{"run_folder": "/runs/trunk", "step": 50}')
    assert read_runs([fork])[0].trunk == ("/runs/trunk", 50)


def test_scores_on_tasks_get_a_panel(tmp_path: Path) -> None:
    score = {"step": 1, "tokens": 1000, "validation_task/hellaswag/acc": 0.25}
    [line] = panel(curves(read_runs([run_folder(tmp_path / "a", row(1), score)]), "steps"), "results of tasks").lines
    assert (line.name, line.y.tolist()) == ("hellaswag/acc", [0.25])


def test_runs_without_a_number_are_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", {"step": 1, "loss": None}, {"step": 2, "grad_norm": "x"})
    with pytest.raises(UserError, match="nothing can be drawn over steps"):
        curves(read_runs([folder]), "steps")


@pytest.mark.parametrize(("value", "text"), [(20_000, "20k"), (1.1e13, "11T"), (1e18, "1e18"), (2e-4, "2e-4")])
def test_numbers_at_axes_are_short(value: float, text: str) -> None:
    assert short(value) == text
