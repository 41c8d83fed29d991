"""Reads what a run has logged, also of a run that is running, of an older version, or whose files end in the middle of
a line. Imports no torch."""

import json
import os
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np

from parallel.errors import UserError
from recipes.files.layout import ENVIRONMENT, METRICS, ORIGIN, RECIPE
from recipes.files.reading import fault, json_object, read_whole, similar, toml_table

VALIDATION, AVERAGE, TASK = "validation_loss", "validation_average_loss", "validation_task/"
WALL, TOKENS, EPOCHS = "wall_seconds/", "tokens/", "epochs/"
RESTARTS = WALL + "restarts"
PLAIN = {
    *("tokens", "loss", "lr", "grad_norm", "step_seconds", "tokens_per_second", "mfu", "goodput", "gpu_utilization"),
    *("peak_memory_gib", "peak_memory_gib_most", "reserved_memory_gib", "reserved_memory_gib_most", "gpu_power_watts"),
}
"""The columns that are drawn, and those that begin as follows."""
BEGINNINGS = (VALIDATION, AVERAGE, TASK, WALL, TOKENS, EPOCHS, "loss/", "grad_norm/", "expert_load/")

LARGE = 2**26
"""Bytes of metrics.jsonl, about 90,000 logged steps, of which every row is read. Of a file N times as large every Nth
row is, and the last: no picture takes much longer, or much more memory."""
LARGEST = 1e100
"""Larger values are gaps, like NaN: no run measures them, and sums of them overflow."""
RARE = (b'"skipped"', b'"validation_')
"""What rows contain that are read in any case."""
LATEST = 2**53
"""Steps are counted exactly up to here."""

Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]


class Column:
    """The values of one column, by increasing step. A step that was repeated has its last value."""

    def __init__(self) -> None:
        self._steps, self._values = array("d"), array("d")

    def add(self, step: int, value: float) -> None:
        place = bisect_left(self._steps, step)  # not always the end: evaluations beside the run come later
        if self._steps[place : place + 1] == array("d", [step]):
            self._values[place] = value
            return
        self._steps.insert(place, step)
        self._values.insert(place, value)

    def forget_from(self, step: int) -> None:
        """Drop the values of this step and of later ones."""
        while self._steps and self._steps[-1] >= step:
            self._steps.pop()
            self._values.pop()

    @property
    def last(self) -> int | None:
        """The last step that has a value."""
        return int(self._steps[-1]) if self._steps else None

    @property
    def last_value(self) -> float:
        """The last value that is not a gap; 0 if there is none."""
        return next((value for value in reversed(self._values) if isfinite(value)), 0.0)

    @property
    def steps(self) -> Numbers:
        return np.array(self._steps)

    @property
    def values(self) -> Numbers:
        """The values; NaN where the run had none."""
        return np.array(self._values)


@dataclass
class LoggedRun:
    """What a run folder says."""

    name: str
    folder: Path
    columns: dict[str, Column] = field(default_factory=lambda: defaultdict(Column))
    restarts: list[int] = field(default_factory=list)
    """The steps after which the run was started again."""
    stages: list[tuple[int, str]] = field(default_factory=list)
    """(the step after which it began, its name), in order."""
    skipped: list[int] = field(default_factory=list)
    stragglers: dict[str, list[int]] = field(default_factory=dict)
    """Which process was slow in what -> at which steps."""
    unreadable: int = 0
    """How many lines are not rows."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """recipe.toml as it is; empty if it cannot be read."""
    environment: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)
    """Where a fork began; empty for other runs."""

    @property
    def step(self) -> int:
        """The newest step of any row."""
        return max([0, *self.skipped, *(column.last or 0 for column in self.columns.values())])

    def has(self, column: str) -> bool:
        """Whether any step has a value of it."""
        return column in self.columns and bool(np.isfinite(self.columns[column].values).any())

    def named(self, beginning: str) -> list[str]:
        """The columns that begin so and have a value, in the order in which they appeared."""
        return [column for column in self.columns if column.startswith(beginning) and self.has(column)]

    def about(self, *keys: str) -> Any:
        """A value of the recipe, such as about("run", "steps"); None if it has none."""
        value: Any = self.recipe
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def trunk(self) -> tuple[str, int | None] | None:
        """The run that this one continues from and the step, where it is said; None for a run of its own."""
        place, at_step = self.origin.get("run_folder"), self.origin.get("step")
        if isinstance(place, str) and isinstance(at_step, int):
            return place, at_step
        source = self.about("run", "continue_from")
        if not isinstance(source, str) or not source:
            return None
        folder, at, step = source.rpartition("@")
        return (folder, int(step)) if at and step.isdigit() else (source, None)


def plain(text: str) -> str:
    """The text as every screen, picture and page can show it, on one line: bytes of names that are not UTF-8, control
    characters and the like are replaced."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def read_runs(places: list[Path]) -> list[LoggedRun]:
    """All of these runs once, with names of their own. Raises UserError for one that has no rows."""
    once = {os.path.realpath(folder): folder for folder in map(folder_of, places)}
    runs = [read_run(folder) for folder in once.values()]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = plain(str(run.folder))
    return runs


def folder_of(place: Path) -> Path:
    """The run's folder that this place, its folder or its metrics.jsonl, means."""
    return place.parent if place.name == METRICS and not os.path.isdir(place) else place


def read_run(folder: Path) -> LoggedRun:
    """Raises UserError if there is nothing to draw."""
    run = LoggedRun(plain(os.path.basename(os.path.realpath(folder))), folder)
    file = folder / METRICS
    if os.path.exists(file) and not os.path.isfile(file):
        raise UserError(f"{file} cannot be read: it is not a regular file")
    try:
        with file.open("rb") as lines:
            apart, line, taken = 1 + os.fstat(lines.fileno()).st_size // LARGE, b"", True
            for number, line in enumerate(lines):
                if taken := number % apart == 0 or any(word in line for word in RARE):
                    take(run, line)
            if not taken:
                take(run, line)
    except (FileNotFoundError, NotADirectoryError):
        what = f"has no {METRICS}: it has not logged a step yet" if folder.is_dir() else "is not the folder of a run"
        remedy = similar(folder) if not os.path.exists(folder) else ""
        raise UserError(f"{folder} {what}{remedy or '; write the folders of runs, such as runs/NAME'}") from None
    except OSError as error:
        raise fault(f"{file} cannot be read", error) from None
    if not any(column.last is not None for column in run.columns.values()):
        raise UserError(f"{file} has no rows: the run has not logged a step yet; draw it later")
    read_about(run)
    return run


def read_about(run: LoggedRun) -> None:
    """Fill in what the other files of the run's folder say."""
    run.recipe = _read(run.folder / RECIPE, toml_table)
    run.environment = _read(run.folder / ENVIRONMENT, json_object)
    run.origin = _read(run.folder / ORIGIN, json_object)


def take(run: LoggedRun, line: bytes) -> None:
    """Take in one line of metrics.jsonl; one that is not a row is only counted."""
    try:
        row = json.loads(line)
        step = row["step"]
        if type(step) is not int or not 0 <= step < LATEST:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        run.unreadable += bool(line.strip())
        return
    if row.get("skipped") is True:
        run.skipped.append(step)
        return
    numbers = dict(_numbers(row))
    if "loss" in row:
        _take_logged(run, step, row.get("stage"), restarts=numbers.get(RESTARTS, 0.0))
        slow = row.get("stragglers")
        for one in slow if isinstance(slow, list) else ():
            if isinstance(one, dict):
                who = plain(f"rank {one.get('rank')} on {one.get('node')} is slow in {one.get('phase')}")
                run.stragglers.setdefault(who, []).append(step)
    for column, value in numbers.items():
        run.columns[column].add(step, value)


def _take_logged(run: LoggedRun, step: int, stage: object, *, restarts: float) -> None:
    """What the row of a logged step says of restarts and stages."""
    last, lost = run.columns["loss"].last, run.columns[RESTARTS].last_value
    if last is not None and step <= last:  # an older version, or a run that could not cut off its lost rows
        run.stages = [(at, name) for at, name in run.stages if at < step]
        run.restarts = [at for at in run.restarts if at < step - 1]
        run.skipped = [at for at in run.skipped if at < step]
        slow = {who: [at for at in steps if at < step] for who, steps in run.stragglers.items()}
        run.stragglers = {who: steps for who, steps in slow.items() if steps}
        for column in run.columns.values():
            column.forget_from(step)
        run.restarts.append(step - 1)
    elif last is not None and restarts > lost:
        run.restarts.append(last)
    if isinstance(stage, str) and stage and (not run.stages or run.stages[-1][1] != plain(stage)):
        before = run.columns["loss"].last
        run.stages.append((step - 1 if before is None else before, plain(stage)))


def _numbers(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The columns of a row that are drawn; parts as in "wall_seconds/save"."""
    for column, value in row.items():
        parts = {f"{column}/{part}": n for part, n in value.items()} if isinstance(value, dict) else {column: value}
        for name, number in parts.items():
            if name in PLAIN or name.startswith(BEGINNINGS):
                yield plain(name), _number(number)


def _number(value: object) -> float:
    """NaN for null, which stands for NaN and infinity in metrics.jsonl, and for whatever else is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return nan
    return float(value) if -LARGEST < value < LARGEST else nan


def _read(file: Path, parse: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """What a file says; nothing if it cannot be read."""
    try:
        return parse(read_whole(file).decode())
    except (OSError, ValueError, RecursionError):
        return {}
