"""Lists the runs under a folder: how each ended, its steps, losses, rate and age. Imports no torch."""

import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from recipes.files.end import read_end
from recipes.files.layout import CHECKPOINTS, LOG_FILE, METRICS, RECIPE
from recipes.files.lock import LOCK, open_locked
from recipes.lab.curves.reading import VALIDATION, LoggedRun, plain, read_about, take

HEAD = ["run", "state", "steps", "loss", "validation", "tokens/s", "eta", "last written"]
DEEPEST = 5
"""Folders below the given one; runs of sweeps are in runs/sweeps/cpu/NAME/runs."""
TAIL = 2**20
"""Bytes at the end of a file that say how a run is."""
START = "  mesh: "
"""Every start of a run logs a line with this."""
ENDINGS = {
    "a process was lost; SIG": "a process was lost",
    "NOT SAVED": "interrupted, not saved",
    "not saved, as checkpoint.every": "interrupted, not saved",
    ": interrupted ": "interrupted",
    "ended the run after its last step": "interrupted",
    "CORRUPTED after step": "corrupted",
    "metrics.jsonl names their documents": "too many steps skipped",
    "last checkpoint is not saved": "last checkpoint not saved",
    "done: ": "done",
    "steps already; ": "done",
}
"""What the log says after the last start -> how the run ended."""


def listing(folder: Path) -> list[list[str]]:
    """The rows of a table of the runs, the newest first, below its head; no rows if there are none."""
    runs = {os.path.realpath(run): run for run in reversed(_run_folders(folder, DEEPEST))}.values()
    rows = [_row(run, name=plain(os.path.relpath(run, folder))) for run in sorted(runs, key=_written, reverse=True)]
    return [HEAD, *rows] if rows else []


def _run_folders(folder: Path, depth: int) -> list[Path]:
    if any(os.path.isfile(folder / name) for name in (RECIPE, METRICS)):
        return [folder]
    if not depth or not os.path.isdir(folder) or not os.access(folder, os.R_OK | os.X_OK):
        return []
    return [run for place in sorted(folder.iterdir()) for run in _run_folders(place, depth - 1)]


def _row(folder: Path, *, name: str) -> list[str]:
    run = LoggedRun(name, folder)
    for line in tail(folder / METRICS).splitlines():
        take(run, line)
    read_about(run)
    step, steps = run.step, run.about("run", "steps")
    how = state(folder, step)
    done = f"{step:,} of {steps:,}" if isinstance(steps, int) else f"{step:,}"
    loss, rate = (
        "".join(f"{value:{form}}" for value in run.columns[column].values[-1:]) or "-"
        for column, form in (("loss", ".4f"), ("tokens_per_second", ",.0f"))
    )
    tested = [run.columns[column].last_value for column in run.named(VALIDATION)]
    age = max(0, round(time.time() - _written(folder)))
    left = (steps - step) * run.columns["step_seconds"].last_value - age if isinstance(steps, int) else 0.0
    eta = str(timedelta(seconds=round(min(left, 1e9)))) if how == "running" and left > 0 else "-"
    validation = f"{fmean(tested):.4f}" if tested else "-"
    return [name, how, done, loss, validation, rate, eta, f"{timedelta(seconds=age)} ago"]


def state(folder: Path, step: int) -> str:
    """Whether the run is going on, or how it ended, as its lock and the end of its log say."""
    try:
        descriptor = open_locked(folder / LOCK, owner="process", shared=True)
        if descriptor is None:
            return "running"
        os.close(descriptor)
    except FileNotFoundError:
        pass
    except OSError:
        return "unknown: its lock cannot be read"
    if end := read_end(folder):
        return plain(str(end))[:100]
    if not step and os.path.isdir(folder / CHECKPOINTS) and not os.path.isfile(folder / LOG_FILE):
        return "checkpoints alone"  # such as an average
    return ended(folder) or ("cut off" if step else "did not reach a step")


def ended(folder: Path) -> str:
    """How the last start ended, as the log says even before its process is gone; "" if it does not say so."""
    log = tail(folder / LOG_FILE).decode(errors="replace").rpartition(START)[2]
    return next((state for words, state in ENDINGS.items() if words in log), "")


def tail(file: Path) -> bytes:
    """The end of a regular file; nothing if it cannot be read."""
    with suppress(OSError):
        if os.path.isfile(file):
            with file.open("rb") as content:
                content.seek(max(0, os.fstat(content.fileno()).st_size - TAIL))
                return content.read(TAIL)
    return b""


def _written(folder: Path) -> float:
    """When the run last wrote a row or a line, or began."""
    files = (folder / name for name in (METRICS, LOG_FILE, RECIPE))
    return max(os.path.getmtime(file) for file in files if os.path.isfile(file))
