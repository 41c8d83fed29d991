"""Draws panels with matplotlib: all in one PNG, or one by one. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.typing import LineStyleType

from recipes.lab.curves.comparison import comparison, fitted, shortened
from recipes.lab.curves.panels import EARLY, SKIPPED, STEP, Curves, Line, Panel
from recipes.lab.curves.reading import Run, plain
from recipes.lab.curves.style import BLUE, COLOURS, FAINT, INK, short, tidy

COLUMNS = 2
MOST_NAMES = 18
"""Names in the legend of a panel."""
TABLE_CHARACTERS, MOST_LINES = 190, 60
"""Characters of a line of the table below the panels, and its lines. Also the most names of runs."""
DASHES: tuple[LineStyleType, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 2, 1, 2)))
PARTS = {
    **{STEP: BLUE, SKIPPED: "#D55E00", "restarts": FAINT, "start": "#E69F00", "first step": "#F0E442"},
    **{"data": "#CC79A7", "save": "#009E73", "validation": "#56B4E9", "log": "#8C564B", "end": "#BFBFBF"},
}
"""Colours of the parts of the wall time."""
MARKS: dict[str, LineStyleType] = {"stage": (0, (6, 3)), "restart": (0, (1, 2))}
RED = "#B00020"
SMALL = 8


@matplotlib.rc_context({"text.parse_math": False})  # names may have dollars
def write_png(curves: Curves, file: Path) -> None:
    """All panels in one picture, and a table of several runs. Raises OSError."""
    rows = -(-len(curves.panels) // COLUMNS)
    labels = [shortened(described(run, among=curves.runs), 150) for run in curves.runs if len(curves.runs) > 1]
    columns = max(1, min(4, 180 // (6 + max(map(len, labels), default=0))))
    table = _first(fitted(comparison(curves.runs), TABLE_CHARACTERS), MOST_LINES) if labels else []
    labels = _first(labels, MOST_LINES)
    heights = [*[2.0] * rows, *([0.1 + 0.12 * len(table)] if table else [])]  # inches, without what is around panels
    height = 0.9 + 0.18 * -(-len(labels) // columns) + 0.7 * rows + sum(heights)
    figure = Figure(figsize=(12, height), layout="constrained")
    grid = figure.add_gridspec(len(heights), COLUMNS, height_ratios=heights)
    for number, panel in enumerate(curves.panels):
        row, column = divmod(number, COLUMNS)
        fills = number == len(curves.panels) - 1 and column == 0  # no empty cell beside the last one
        draw(figure.add_subplot(grid[row, :] if fills else grid[row, column]), panel, curves)
    if table:
        axes = figure.add_subplot(grid[rows, :])
        axes.set_axis_off()
        axes.text(0, 1, "\n".join(table), family="monospace", fontsize=SMALL - 1, va="top", color=INK, in_layout=False)
    colours = [colour_of_run(number, curves) for number in range(len(labels))]
    handles = [
        Line2D([], [], color=colour, linewidth=2, label=label) for colour, label in zip(colours, labels, strict=True)
    ]
    if handles:
        place: dict[str, Any] = {"loc": "outside upper center", "ncols": columns, "frameon": False}
        figure.legend(handles=handles, title=heading(curves), title_fontsize=11, fontsize=SMALL, **place)
    else:
        figure.suptitle(heading(curves), fontsize=11, color=INK)
    figure.savefig(file, dpi=110, format="png")


def _first(names: list[str], most: int) -> list[str]:
    return names if len(names) <= most else [*names[: most - 1], f"and {len(names) - most + 1} more"]


def heading(curves: Curves) -> str:
    """The title above all panels."""
    if len(curves.runs) == 1:
        return described(curves.runs[0])
    shared = _place(curves.runs[0]) if _share_a_place(curves.runs) else ""
    return f"{len(curves.runs)} runs" + (f": {shared}" if shared else "")


def described(run: Run, *, among: Sequence[Run] = ()) -> str:
    """A run on one line, such as "base: llama3_8b on 8 x NVIDIA H100, 900 of 1,000 steps". among: runs that may have
    the model in common, which is then left out."""
    steps, last = run.about("run", "steps"), run.columns["loss"].last or 0
    done = f"{last:,} of {steps:,} steps" if isinstance(steps, int) and steps != last else f"{last:,} steps"
    facts = [
        "" if _share_a_place(among) else _place(run),
        done,
        f"from {shortened(str(run.about('run', 'continue_from')))}" if run.trunk else "",
        f"{len(run.restarts)} x restarted" if run.restarts else "",
        f"{len(run.skipped)} skipped" if run.skipped else "",
    ]
    return plain(f"{shortened(run.name)}: {', '.join(filter(None, facts))}")


def _share_a_place(runs: Sequence[Run]) -> bool:
    return len({_place(run) for run in runs}) == 1


def _place(run: Run) -> str:
    """The model of a run, and what it runs on, as far as they are known."""
    model, device, processes = (
        run.about("model", "name"),
        run.environment.get("device"),
        run.environment.get("world_size"),
    )
    where = f"{processes} x {device}" if device and processes else ""
    return shortened(plain(" on ".join(filter(None, (model if isinstance(model, str) else "", where)))))


def draw(axes: Axes, panel: Panel, curves: Curves) -> None:
    """Draw one panel."""
    tidy(axes)
    axes.set_title(panel.title, fontsize=9.5, loc="left", color=INK)
    axes.tick_params(labelsize=SMALL, colors=INK)
    axes.spines[["left", "bottom"]].set_color(INK)
    if panel.bars is not None:
        _draw_bars(axes, panel, curves)
    else:
        _draw_over_axis(axes, panel, curves)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "columnspacing": 1.0}
        columns = min(3, -(-len(labels) // 6)) if panel.lines else min(8, len(labels))
        beside: dict[str, Any] = {} if len(panel.lines) < 50 else {"loc": "upper right"}  # "best" takes long
        place = beside if panel.lines else below | {"handlelength": 1.0}
        named = [shortened(label, 48 // columns) for label in _first(labels, MOST_NAMES)]
        style: dict[str, Any] = {"fontsize": SMALL - 1, "frameon": False, "labelcolor": INK}
        axes.legend(handles[: len(named)], named, ncols=columns, **style, **place)


def _draw_over_axis(axes: Axes, panel: Panel, curves: Curves) -> None:
    axes.set_xlabel(curves.unit, fontsize=SMALL, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=curves.unit == "steps"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    if panel.unit == "share":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    if panel.shares:
        names, x = list(panel.shares.parts), panel.shares.x
        stacks = [np.append(share, share[-1]) for share in panel.shares.parts.values()]
        colours = [PARTS.get(name, INK) for name in names]
        axes.stackplot(x, stacks, labels=names, colors=colours, step="post", alpha=0.85, linewidth=0)
        axes.set_ylim(0, 1)
        axes.set_xlim(0, curves.end)
        return
    seen: set[str] = set()
    for line in panel.lines:
        _draw_line(axes, line, colour_of(line, curves), is_alone=len(curves.runs) == 1, seen=seen)
    for joint in panel.joints:
        colour = colour_of_run(joint.run, curves)
        axes.plot(joint.x, joint.y, color=colour, linewidth=1, linestyle=":", marker="o", markersize=3)
    if panel.is_logarithmic:
        axes.set_yscale("log")
    bottom, top = panel.ends
    if bottom is not None:
        axes.set_ylim(bottom, bottom + (1.08 * (axes.dataLim.y1 - bottom) or 1.0) if top is None else top)
    axes.set_xlim(0, 1.01 * curves.end)
    if top is not None:
        _draw_spikes(axes, panel, curves, top)
    _draw_marks(axes, curves, named=panel is curves.panels[0])


def _draw_spikes(axes: Axes, panel: Panel, curves: Curves, top: float) -> None:
    """Point up where single steps are above the panel and their neighbours' mean is not."""
    for line in panel.lines:
        if line.raw is None:
            continue
        above = (line.raw[0] <= top) & (line.raw[2] > top)
        above[: len(above) // EARLY] = False
        if above.any():
            style: dict[str, Any] = {"marker": "^", "markersize": 4, "linestyle": "", "color": colour_of(line, curves)}
            name = f"up to {short(float(np.nanmax(line.raw[2][above])))}"
            axes.plot(
                line.x[above], np.full(above.sum(), top), label=name, clip_on=False, gid=f"run-{line.run}", **style
            )


def colour_of(line: Line, curves: Curves) -> str:
    """The colour of the line's run or, if there is only one run, of its name."""
    return COLOURS[line.kind % len(COLOURS)] if len(curves.runs) == 1 else colour_of_run(line.run, curves)


def colour_of_run(run: int, curves: Curves) -> str:
    """The colour of a run of several; of many, along a range of hues."""
    if len(curves.runs) <= len(COLOURS):
        return COLOURS[run]
    return to_hex(matplotlib.colormaps["turbo"](0.05 + 0.9 * run / (len(curves.runs) - 1)))


def _draw_line(axes: Axes, line: Line, colour: str, *, is_alone: bool, seen: set[str]) -> None:
    group = f"run-{line.run}"
    if line.raw:
        mean, low, high = line.raw
        axes.plot(line.x, mean, color=colour, linewidth=0.8, alpha=0.35, gid=group)
        if not np.array_equal(low, high, equal_nan=True):
            axes.fill_between(line.x, low, high, color=colour, alpha=0.15, linewidth=0, gid=group)
    dash = "-" if is_alone else DASHES[line.kind % len(DASHES)]
    known = int(np.isfinite(line.y).sum())
    marker = "o" if known < 2 or (line.dots and known < 60) else ""
    axes.plot(line.x, line.y, color=colour, linewidth=1.5, linestyle=dash, marker=marker, markersize=3.5, gid=group)
    if line.name and line.name not in seen:  # one entry for a name, of whatever runs
        seen.add(line.name)
        style: dict[str, Any] = {"color": colour if is_alone else FAINT, "linewidth": 1.5, "linestyle": dash}
        axes.plot([], [], label=line.name, **style)


def _draw_marks(axes: Axes, curves: Curves, *, named: bool) -> None:
    """Borders of stages, restarts and skipped steps; named: with the names of the stages, and a legend."""
    in_height = axes.get_xaxis_transform()  # x on the axis, y as a share of the panel's height
    is_alone = len(curves.runs) == 1
    explained: set[str] = set()
    for run, what in dict.fromkeys((mark.run, mark.what) for mark in curves.marks):
        places = np.array([mark.x for mark in curves.marks if (mark.run, mark.what) == (run, what)])
        apart = curves.end / 500  # those nearer to each other are one to the eye
        places = np.unique(np.round(places / apart)) * apart
        colour = FAINT if is_alone else colour_of_run(run, curves)
        style: dict[str, Any] = {"color": colour, "linewidth": 0.8, "linestyle": MARKS.get(what, "")}
        if what == "skipped":
            style |= {"color": RED if is_alone else colour, "marker": "x", "markersize": 4}
            axes.plot(places, [0.02] * len(places), transform=in_height, clip_on=False, gid=f"run-{run}", **style)
        else:
            axes.vlines(places, 0, 1, transform=in_height, zorder=0.9, gid=f"run-{run}", **style)
        if named and what != "stage" and what not in explained:
            explained.add(what)
            axes.plot([], [], label=what, **(style | {"color": style["color"] if is_alone else FAINT}))
    if named:
        _name_stages(axes, curves)


def _name_stages(axes: Axes, curves: Curves) -> None:
    """Write the names of stages at their borders, near ones below each other as long as they fit."""
    texts: list[tuple[str, float]] = []
    for mark in curves.marks:
        near = [text for text, x in texts if abs(x - mark.x) < curves.end / 8]
        if mark.what != "stage" or mark.text in near or len(near) > 3:  # in near: of another run
            continue
        texts.append((mark.text, mark.x))
        place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "va": "top"}
        place |= {"xytext": (3, -2 - 9 * len(near)), "fontsize": SMALL - 1, "color": INK, "gid": f"run-{mark.run}"}
        axes.annotate(shortened(mark.text, 30), (mark.x, 1.0), **place)


def _draw_bars(axes: Axes, panel: Panel, curves: Curves) -> None:
    """Draw one bar per run, of its time by part."""
    assert panel.bars is not None
    seen: set[str] = set()
    for number, parts in enumerate(panel.bars):
        end = 0.0
        for part, time in parts.items():
            name = "" if part in seen else part
            seen.add(part)
            axes.barh(number, time, left=end, height=0.62, color=PARTS.get(part, INK), alpha=0.85, label=name or None)
            end += time
        if end:
            text = f" {parts.get(STEP, 0.0) / end:.1%}"
            axes.text(end, number, text, va="center", fontsize=SMALL, color=INK)
    axes.set_yticks(range(len(curves.runs)), [shortened(run.name, 30) for run in curves.runs], fontsize=SMALL)
    axes.set_ylim(len(curves.runs) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * max((sum(parts.values()) for parts in panel.bars), default=1.0) or 1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
