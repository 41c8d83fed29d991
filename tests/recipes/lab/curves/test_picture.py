"""How panels are drawn: what their legends say."""

from pathlib import Path

from matplotlib.figure import Figure

from recipes.lab.curves.page import draw_panel
from recipes.lab.curves.panels import curves
from recipes.lab.curves.reading import read_runs
from tests.recipes.lab.curves.runs import row, run_folder


def legend(*folders: Path) -> list[str]:
    """The names in the legend of the last panel."""
    drawn = curves(read_runs(list(folders)), "steps")
    axes = Figure().subplots()
    draw_panel(axes, drawn.panels[-1], drawn)
    found = axes.get_legend()
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def test_parts_of_the_wall_time_have_their_whole_names(tmp_path: Path) -> None:
    parts = ["step", "skipped", "start", "first step", "data", "save", "validation", "log", "end", "restarts"]
    rows = [row(step, wall_seconds=dict.fromkeys(parts, float(step))) for step in (1, 2)]
    folders = [run_folder(tmp_path / name, *rows) for name in "ab"]
    assert legend(folders[0]) == legend(*folders) == parts


def test_a_legend_of_very_many_names_says_how_many_more_there_are(tmp_path: Path) -> None:
    scores = {f"validation_task/{'x' * 50}{number}": 0.5 for number in range(30)}
    found = legend(run_folder(tmp_path / "a", {"step": 1, "loss": 2.0, **scores}))
    assert found[0] == f"{'x' * 12}\N{HORIZONTAL ELLIPSIS}{'x' * 11}0" and found[-1] == "and 13 more"
