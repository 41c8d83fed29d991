"""Draws panels, as one HTML page with values below the pointer, which needs nothing else: of one run its report, of
several a comparison. Imports no torch."""

import html
import io
import json
import re
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.typing import LineStyleType

from recipes.lab.curves.panels import SKIPPED, STEP, Curves, Line, Panel
from recipes.lab.curves.reading import LoggedRun, Numbers, plain
from recipes.lab.curves.report import Section, comparison, sections, state_of
from recipes.lab.curves.style import BLUE, COLOURS, FAINT, GRID, INK, ORANGE, RED, plain_text, short, shortened, tidy

TEMPLATE = Path(__file__).with_name("page.html")
# Colours that page.html gives other values where the page is dark.
VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--grid)", BLUE: "var(--blue)", RED: "var(--red)"}
BREAK = re.compile("(?<=[./_])(?=[a-z])")
"""Where a phone may break a key or a path."""
AGAIN = '<meta http-equiv="refresh" content="60">'
"""Of a run that goes on: the page is rewritten, so it is read again after so many seconds."""
DIGITS = 5
"""Digits of values below the pointer."""
MOST_NAMES = 18
"""Names in the legend of a panel."""
LONGEST_NAME = 25
"""Characters of a name in a panel."""
DASHES: tuple[LineStyleType, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 2, 1, 2)))
PARTS = {
    **{STEP: BLUE, SKIPPED: "#D55E00", "restarts": FAINT, "start": "#E69F00", "first step": "#F0E442"},
    **dict.fromkeys(("imports", "joining", "model"), "#E69F00"),
    **{"data": "#CC79A7", "save": "#009E73", "validation": "#56B4E9", "log": "#8C564B", "end": "#BFBFBF"},
}
"""Colours of the parts of the wall time."""
MARKS: dict[str, LineStyleType] = {"stage": (0, (6, 3)), "restart": (0, (1, 2))}
POINTS = {"skipped": ("x", RED), "straggler": ("^", ORANGE)}
SMALL = 9


def write_html(curves: Curves, file: BinaryIO) -> None:
    """Write the page. Raises OSError."""
    runs = "\n".join(
        f'<label style="--run: {_themed(COLOURS[number % len(COLOURS)])}">'
        f'<input type="checkbox" checked data-run="{number}">{html.escape(line)}</label>'
        for number, line in enumerate(shortened(f"{run.name}: {run_facts(run)}", 150) for run in curves.runs)
    )
    states = [state_of(run) for run in curves.runs]
    if len(curves.runs) == 1:
        facts, below = f"{states[0]}: {run_facts(curves.runs[0])}", sections(curves.runs[0])
    else:
        facts, below = "", [Section("What differs", comparison(curves.runs))]
    pieces = {
        "TITLE": html.escape(curves.runs[0].name if len(curves.runs) == 1 else f"{len(curves.runs)} runs"),
        "AGAIN": AGAIN if "running" in states else "",
        "FACTS": html.escape(facts),
        "RUNS": runs if len(curves.runs) > 1 else "",
        "PANELS": "\n".join(_figure(panel, curves) for panel in curves.panels),
        "SECTIONS": "\n".join(map(_section, below)),
    }
    page = TEMPLATE.read_text(encoding="utf-8")
    file.write(re.sub(r"\{\{(\w+)\}\}", lambda match: pieces[match[1]], page).encode())


def _section(section: Section) -> str:
    lines = ("".join(f"<td>{BREAK.sub('<wbr>', html.escape(cell))}</td>" for cell in row) for row in section.rows)
    table = "<table>" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table>" if section.rows else ""
    text = f"<pre>{html.escape(section.text)}</pre>" if section.text else ""
    return f"<section><h2>{html.escape(section.title)}</h2>{table}{text}</section>"


@plain_text
@matplotlib.rc_context({"svg.fonttype": "none"})  # text stays text, in the page's font
def _figure(panel: Panel, curves: Curves) -> str:
    """One panel: its SVG, and its values for the script of the page."""
    figure = Figure(figsize=(5.0, 3.0), layout="constrained")
    axes = figure.subplots()
    draw_panel(axes, panel, curves)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": panel.title}):  # the same runs give the same page
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    picture = out.getvalue()
    picture = picture[picture.index("<svg") :].replace('id="run-', 'class="run-')
    box = axes.get_position()
    about = {
        "unit": curves.unit,
        "box": [round(float(side), 5) for side in (box.x0, box.x1, 1 - box.y1, 1 - box.y0)],  # as shares of the SVG
        "x": [float(end) for end in axes.get_xlim()],
        "y": [float(end) for end in axes.get_ylim()],
        "logarithmic": panel.is_logarithmic,
        "share": panel.unit == "share",
        "lines": _lines(panel, curves),
    }
    values = json.dumps(about, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<figure>{_themed(picture)}<script type="application/json">{values}</script></figure>'


def _lines(panel: Panel, curves: Curves) -> list[dict[str, Any]]:
    """Names, colours and points of what the pointer can ask for."""
    if panel.shares:
        x = panel.shares.x[1:]
        return [{"run": 0, "name": part, "x": _short(x), "y": _short(y)} for part, y in panel.shares.parts.items()]
    several = len(curves.runs) > 1
    return [
        {
            "run": line.run,
            "name": " ".join(filter(None, (curves.runs[line.run].name if several else "", line.name))),
            "colour": _themed(colour_of(line, curves)),
            "x": _short(line.x),
            "y": _short(line.y),
        }
        for line in panel.lines
    ]


def _short(values: Numbers) -> list[float | None]:
    """The values with few digits; None for NaN."""
    return [float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in values]


def _themed(text: str) -> str:
    """The text with variables of the page in the place of colours."""
    for colour, variable in VARIABLES.items():
        text = re.sub(colour, variable, text, flags=re.IGNORECASE)
    return text


def run_facts(run: LoggedRun) -> str:
    """A run on one line, such as "llama3_8b, 8 x NVIDIA H100, 900 of 1,000 steps"."""
    steps, last = run.about("run", "steps"), run.columns["loss"].last or 0
    device, processes = run.environment.get("device"), run.environment.get("world_size")
    facts = [
        str(run.about("model", "name") or ""),
        f"{processes} x {device}" if device and processes else "",
        f"{last:,} of {steps:,} steps" if isinstance(steps, int) and steps != last else f"{last:,} steps",
        f"from {run.about('run', 'continue_from')}" if run.trunk else "",
        f"{len(run.restarts)} x restarted" if run.restarts else "",
        f"{len(run.skipped)} skipped" if run.skipped else "",
    ]
    return plain(", ".join(filter(None, facts)))


def draw_panel(axes: Axes, panel: Panel, curves: Curves) -> None:
    tidy(axes)
    axes.set_title(panel.title, fontsize=10, loc="left", color=INK)
    axes.tick_params(labelsize=SMALL, colors=INK)
    axes.spines[["left", "bottom"]].set_color(INK)
    if panel.bars is not None:
        _draw_bars(axes, panel, curves)
    else:
        _draw_over_axis(axes, panel, curves)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        if len(labels) > MOST_NAMES:
            labels = [*labels[: MOST_NAMES - 1], f"and {len(labels) - MOST_NAMES + 1} more"]
        below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "columnspacing": 1.0}
        columns = -(-len(labels) // 6) if panel.lines else min(4, len(labels))
        where = {} if panel.lines else below | {"handlelength": 1.0}
        style: dict[str, Any] = {"fontsize": SMALL - 1, "frameon": False, "labelcolor": INK, "ncols": columns}
        axes.legend(handles[: len(labels)], [shortened(label, LONGEST_NAME) for label in labels], **style, **where)


def _draw_over_axis(axes: Axes, panel: Panel, curves: Curves) -> None:
    axes.set_xlabel(curves.unit, fontsize=SMALL, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=curves.unit == "steps"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    is_share = panel.unit == "share"
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%" if is_share else short(value)))
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
        colour = COLOURS[joint.run % len(COLOURS)]
        axes.plot(joint.x, joint.y, color=colour, linewidth=1, linestyle=":", marker="o", markersize=3)
    if panel.is_logarithmic:
        axes.set_yscale("log")
    bottom, top = panel.ends
    if bottom is not None:
        axes.set_ylim(bottom, bottom + (1.08 * (axes.dataLim.y1 - bottom) or 1.0) if top is None else top)
    axes.set_xlim(0, 1.01 * curves.end)
    _draw_marks(axes, curves, named=panel is curves.panels[0])


def colour_of(line: Line, curves: Curves) -> str:
    """The colour of the line's run or, if there is only one run, of its name."""
    return COLOURS[(line.kind if len(curves.runs) == 1 else line.run) % len(COLOURS)]


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
        axes.plot([], [], color=colour if is_alone else FAINT, linewidth=1.5, linestyle=dash, label=line.name)


def _draw_marks(axes: Axes, curves: Curves, *, named: bool) -> None:
    """Borders of stages, restarts and skipped steps; named: with the names of the stages, and a legend."""
    in_height = axes.get_xaxis_transform()  # x on the axis, y as a share of the panel's height
    is_alone, explained = len(curves.runs) == 1, set[str]()
    texts: list[tuple[str, float]] = []
    for mark in curves.marks:
        colour = FAINT if is_alone else COLOURS[mark.run % len(COLOURS)]
        style: dict[str, Any] = {"color": colour, "linewidth": 0.8, "linestyle": MARKS.get(mark.what, "")}
        if mark.what in POINTS:
            marker, red = POINTS[mark.what]
            style |= {"color": red if is_alone else colour, "marker": marker, "markersize": 4}
            axes.plot([mark.x], [0.02], transform=in_height, clip_on=False, gid=f"run-{mark.run}", **style)
        else:
            axes.axvline(mark.x, zorder=0.9, gid=f"run-{mark.run}", **style)
        if not named:
            continue
        if mark.what == "stage":
            near = [text for text, x in texts if abs(x - mark.x) < curves.end / 8]
            if mark.text in near:  # of another run
                continue
            texts.append((mark.text, mark.x))
            below = (3, -2 - 9 * len(near))
            where: dict[str, Any] = {"xycoords": in_height, "xytext": below, "textcoords": "offset points", "va": "top"}
            where |= {"fontsize": SMALL - 1, "color": INK, "gid": f"run-{mark.run}"}
            axes.annotate(shortened(mark.text, LONGEST_NAME), (mark.x, 1.0), **where)
        elif mark.what not in explained:
            explained.add(mark.what)
            axes.plot([], [], label=mark.what, **(style | ({} if is_alone else {"color": FAINT})))


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
            axes.text(end, number, f" {parts.get(STEP, 0.0) / end:.1%}", va="center", fontsize=SMALL, color=INK)
    axes.set_yticks(range(len(curves.runs)), [shortened(run.name, LONGEST_NAME) for run in curves.runs], fontsize=SMALL)
    axes.set_ylim(len(curves.runs) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * max((sum(parts.values()) for parts in panel.bars), default=1.0) or 1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
