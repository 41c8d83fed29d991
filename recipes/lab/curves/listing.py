"""Lists the runs under a folder: how each ended, its steps, loss and age. Imports no torch."""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from recipes.files.layout import LOG_FILE, METRICS, RECIPE
from recipes.files.lock import LOCK, NoLocks, open_locked
from recipes.files.reading import fault
from recipes.lab.curves.reading import LONGEST, Run, plain, read_about, take

DEEPEST = 5
"""Folders below the given one; runs of sweeps are in runs/sweeps/cpu/NAME/runs."""
TAIL = 2**18
"""Bytes at the end of a file that say how a run is."""
ENDINGS = {
    r"(SIG\w+): interrupted .*not saved": "{} at step {}, not saved",
    r"(SIG\w+): interrupted ": "{} at step {}",
    r"(SIG\w+) ended the run": "{} at step {}, not saved",
    r"CORRUPTED after step": "corrupted",
    r"stopped: .*documents": "too many steps skipped",
    r"last checkpoint is not saved": "last checkpoint not saved",
    r"written to |done: \d|has its \d+ steps already": "done",
}
"""What the last lines of log.txt say -> the state. "done" stands before what only the end of a run says."""
GOING_ON = re.compile(r"step +\d+/|  mesh: ")
"""A line of a run that has not ended."""


def listing(folder: Path) -> list[list[str]]:
    """The rows of a table of the runs, the newest first, below its head; no rows if there are none.

    Raises UserError if the folder cannot be read.
    """
    found = sorted(((_written(run), run) for run in _run_folders(folder)), reverse=True)
    rows = [_row(run, name=plain(os.path.relpath(run, folder)), written=written) for written, run in found]
    return [["run", "state", "steps", "loss", "last written"], *rows] if rows else []


def _run_folders(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        if error.filename == str(folder):
            raise fault(f"{folder} cannot be read", error) from None

    found: list[Path] = []
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        is_known, is_run = os.path.realpath(place) in seen, RECIPE in files or METRICS in files
        seen.add(os.path.realpath(place))
        if is_run and not is_known:
            found.append(Path(place))
        if is_run or is_known or len(Path(place).relative_to(folder).parts) >= DEEPEST:
            folders.clear()
    return found


def _row(folder: Path, *, name: str, written: float) -> list[str]:
    run = Run(name, folder)
    for size in (TAIL, LONGEST):  # the row of a skipped step names its documents
        if not run.columns:
            for line in _tail(folder / METRICS, size):
                take(run, line)
    read_about(run)
    step = max([0, *run.skipped, *(column.last or 0 for column in run.columns.values())])
    steps = run.about("run", "steps")
    losses = [f"{loss:.4f}" for loss in run.columns["loss"].values[-1:]]
    done = f"{step:,} of {steps:,}" if isinstance(steps, int) else f"{step:,}"
    return [name, _state(folder, step), done, *(losses or ["-"]), f"{_age(time.time() - written)} ago"]


def _state(folder: Path, step: int) -> str:
    """Whether the run is going on, or how it ended, as its lock and the end of its log say."""
    with suppress(FileNotFoundError):
        try:
            descriptor = open_locked(folder / LOCK, owner="process", shared=True)
        except (NoLocks, PermissionError):
            return "unknown: its lock cannot be read"
        if descriptor is None:
            return "running"
        os.close(descriptor)
    for line in reversed(_tail(folder / LOG_FILE)):
        text = line.decode(errors="replace")
        for ending, state in ENDINGS.items():
            if match := re.search(ending, text, re.IGNORECASE):
                return state.format(*match.groups(), f"{step:,}")
        if GOING_ON.search(text):
            break
    return "cut off" if step else "did not reach a step"


def _tail(file: Path, size: int = TAIL) -> list[bytes]:
    """The last lines of a regular file; none if it cannot be read."""
    if not os.path.isfile(file):
        return []
    try:
        with file.open("rb") as content:
            content.seek(max(0, os.fstat(content.fileno()).st_size - size))
            return content.read(size).splitlines()
    except OSError:
        return []


def _written(folder: Path) -> float:
    """When the run last wrote a row or a line, or began."""
    times = [0.0]
    for name in (METRICS, LOG_FILE, RECIPE):
        with suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"
