"""Writes panels as one HTML page with values below the pointer, which needs nothing else: of one run its report, of
several a comparison. Imports no torch."""

import html
import io
import json
import re
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from recipes.lab.curves.comparison import comparison
from recipes.lab.curves.panels import Curves, Panel
from recipes.lab.curves.picture import colour_of, draw_panel, run_facts
from recipes.lab.curves.reading import Numbers
from recipes.lab.curves.report import Section, sections, state_of
from recipes.lab.curves.style import BLUE, COLOURS, FAINT, GRID, INK, RED, plain_text, shortened

TEMPLATE = Path(__file__).with_name("page.html")
# Colours that page.html gives other values where the page is dark.
VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--grid)", BLUE: "var(--blue)", RED: "var(--red)"}
BREAK = re.compile("(?<=[./_])(?=[a-z])")
"""Where a phone may break a key or a path."""
AGAIN = '<meta http-equiv="refresh" content="60">'
"""Of a run that goes on: the page is rewritten, so it is read again after so many seconds."""
DIGITS = 5
"""Digits of values below the pointer."""


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
