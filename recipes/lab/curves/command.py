"""What scripts/plot.py does: a list of runs, or a page of some, rewritten while they go on. Imports no torch."""

import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from parallel.errors import UserError
from recipes.files.atomic import replace, write_whole
from recipes.files.layout import REPORT
from recipes.files.reading import fault
from recipes.files.screen import tell
from recipes.lab.curves.listing import listing, state
from recipes.lab.curves.panels import Axis, Curves, curves
from recipes.lab.curves.reading import folder_of, read_runs
from recipes.lab.curves.report import aligned, comparison

WATCHED = 5.0
"""Seconds between two pages."""


def plot(runs: Sequence[Path], *, out: Path | None, axis: Axis, watch: bool) -> None:
    """Write the page of these runs, or list those in a folder; watch: again while one goes on. Raises UserError."""
    places = [folder_of(run) for run in runs or [Path("runs")]]
    alone = places[0] if len(places) == 1 else Path()
    if len(places) == 1 and not out and (rows := listing(alone)) and rows[1][0] != ".":
        tell(aligned(rows), to=1)
        return
    if not runs:
        raise UserError("no run is in runs/; write the folders of runs, or one with runs in it")
    out = out or alone / REPORT
    if out.suffix != ".html":
        raise UserError(f"--out {out}: write a name that ends with .html")
    os.nice(10)  # a run may train on these cores
    found = curves(read_runs(places), axis)
    for run in found.runs:
        if run.unreadable:
            tell(f"{run.folder}: {run.unreadable} lines are not rows and were left out")
    if len(found.runs) > 1:
        tell(aligned(comparison(found.runs)), to=1)
    _write(found, out)
    tell(str(out), to=1)
    if watch:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    while watch and any(state(run.folder, run.step) == "running" for run in found.runs):
        time.sleep(WATCHED)
        found = curves(read_runs(places), axis)
        _write(found, out)


def _write(found: Curves, out: Path) -> None:
    """Write the page and, beside the report of one run, its Markdown."""
    from recipes.lab.curves.page import write_html  # matplotlib, which a list does without
    from recipes.lab.curves.report import model_card

    try:
        replace(out, partial(write_html, found), sync=False)
        if len(found.runs) == 1 and out.name == REPORT:
            write_whole(out.with_suffix(".md"), model_card(found.runs[0]))
    except OSError as error:
        raise fault(f"--out {out} cannot be written", error, "; write another file") from None
