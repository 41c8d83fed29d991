"""What is drawn of runs: panels of lines, without saying how they are drawn. Imports no torch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from parallel.errors import UserError
from recipes.lab.curves.reading import AVERAGE, RESTARTS, TASK, VALIDATION, WALL, Column, LoggedRun, Numbers

Axis = Literal["steps", "tokens", "hours"]
MOST = 1000
"""Points of a line. Of a longer run, each is the mean of neighbours, and the least and the most are drawn behind it."""
SMOOTHED = 150
EARLY = 30
"""The first 1/EARLY of a long run may be above the top of a panel."""
FROM_ZERO = (0.0, None)
INTERVALS = 60
"""Intervals of a run for which it is drawn what took their time."""
LOAD = "expert_load"
STEP, SKIPPED = "step", "skipped"
"""The parts of the wall time that come first."""
Place = Callable[[Numbers], Numbers]
"""Function from steps to places on the axis."""


@dataclass(frozen=True)
class Line:
    """One curve. Arrays of one length; NaN interrupts it."""

    run: int
    """Number of its run, from 0."""
    name: str
    """What it shows besides its run, such as "allocated"; "" for the only line of a run."""
    x: Numbers
    y: Numbers
    raw: tuple[Numbers, ...] | None = None
    """Mean, least and most, where y is smoothed."""
    kind: int = 0
    """Lines of one name have one kind, and look alike."""
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened to a run at a place on the axis."""

    run: int
    x: float
    what: Literal["stage", "restart", "skipped", "straggler"]
    text: str = ""


@dataclass(frozen=True)
class Joint:
    """Where a fork left its trunk: from a point of the trunk to the first one of the fork."""

    run: int
    x: tuple[float, float]
    y: tuple[float, float]


@dataclass(frozen=True)
class Panel:
    """One picture."""

    title: str
    lines: Sequence[Line] = ()
    unit: Literal["number", "share", "rate"] = "number"
    is_logarithmic: bool = False
    ends: tuple[float | None, float | None] = (None, None)
    """Ends of the axis; None = as far as the values go."""
    joints: Sequence[Joint] = ()
    shares: "Shares | None" = None
    bars: "Sequence[dict[str, float]] | None" = None
    """Instead of lines: for each run, its time by part."""


@dataclass(frozen=True)
class Shares:
    """Instead of lines: what took the time between the places on the axis, stacked."""

    x: Numbers
    parts: dict[str, Numbers]
    """Shares by part, of length len(x) - 1; at each place they add up to 1."""


@dataclass(frozen=True)
class Curves:
    """All that is drawn of some runs."""

    runs: Sequence[LoggedRun]
    unit: str
    """Unit of the axis below all panels."""
    end: float
    """The last place on it."""
    panels: Sequence[Panel]
    marks: Sequence[Mark] = field(default_factory=list)


def curves(runs: Sequence[LoggedRun], axis: Axis) -> Curves:
    """The panels for which there is something to draw. axis: what lies below all of them.

    Raises UserError if there is nothing, or if a run cannot be placed on the axis.
    """
    places = [_place(run, axis, 1.0) for run in runs]
    unit: str = axis
    if axis == "hours" and max(map(_end, runs, places)) < 1:
        places, unit = [_place(run, axis, 60.0) for run in runs], "minutes"

    def lines(columns: dict[str, str], *, smooth: bool = False, dots: bool = False) -> list[Line]:
        """columns: column -> name of its line."""
        kinds = {name: kind for kind, name in enumerate(dict.fromkeys(columns.values()))}
        drawn_lines = []
        for number, run in enumerate(runs):
            for column, name in columns.items():
                if run.has(column):
                    x, *raw = thinned(places[number](run.columns[column].steps), run.columns[column].values)
                    y = smoothed(raw[0]) if smooth else raw[0]
                    drawn_lines.append(Line(number, name, x, y, tuple(raw) if smooth else None, kinds[name], dots))
        return drawn_lines

    def named(beginning: str) -> dict[str, str]:
        columns = dict.fromkeys(column for run in runs for column in run.named(beginning))
        return {column: column.removeprefix(beginning).removeprefix("/") for column in columns}

    validation = named(VALIDATION) | {column: f"{name} average".strip() for column, name in named(AVERAGE).items()}
    loss = lines({"loss": ""}, smooth=True)
    of_sources = [replace(line, raw=None) for line in lines(named("loss/"), smooth=True)]
    norm = lines({"grad_norm": ""}, smooth=True)
    by_group = lines(named("grad_norm/"), smooth=True) if len(runs) == 1 else []
    groups = [replace(line, raw=None) for line in by_group]
    loads = {f"{LOAD}/{name}": name for name in ("largest", "entropy", "smallest")}
    panels = [
        Panel("training loss, nats per token", loss, joints=_joints(runs, axis, loss), ends=_ends(loss)),
        Panel("training loss by source, nats per token", of_sources, ends=_ends(of_sources)),
        Panel("validation loss, nats per token", lines(validation, dots=True)),
        Panel("results of tasks", lines(named(TASK), dots=True)),
        Panel("learning rate", lines({"lr": ""}), ends=FROM_ZERO),
        _norm("gradient norm before clipping", norm),
        _norm("gradient norm by group", groups),
        Panel("loads of experts, 1 = the mean", lines(loads, smooth=True), ends=FROM_ZERO),
        Panel("dead experts", lines({f"{LOAD}/dead": ""}), ends=FROM_ZERO),
        Panel("tokens per second", lines({"tokens_per_second": ""}, smooth=True), unit="rate", ends=FROM_ZERO),
        Panel("MFU", lines({"mfu": ""}, smooth=True), unit="share", ends=FROM_ZERO),
        Panel("peak memory, GiB", lines(_memory(runs)), ends=FROM_ZERO),
        Panel("GPUs: utilization", lines({"gpu_utilization": ""}), unit="share", ends=FROM_ZERO),
        Panel("GPUs: power, W", lines({"gpu_power_watts": ""}), ends=FROM_ZERO),
        *_goodput(runs, places),
    ]
    drawn = [panel for panel in panels if panel.lines or panel.shares or panel.bars]
    if not drawn:
        where = ", ".join(str(run.folder) for run in runs)
        raise UserError(f"{where}: nothing can be drawn over {axis}; no row has a loss or another number")
    end = max(map(_end, runs, places))
    marks = [mark for number, run in enumerate(runs) for mark in _marks(number, run, places) if 0 <= mark.x <= end]
    apart = {(mark.run, mark.what, mark.text, round(500 * mark.x / end)): mark for mark in marks}  # to the eye
    return Curves(runs, unit, end, drawn, list(apart.values()))


def _norm(title: str, lines: Sequence[Line]) -> Panel:
    """Gradient norms: on a logarithmic axis where later ones explode, otherwise without the first ones."""
    late = _finite(_late(lines))
    if len(late) and late.min() > 0 and late.max() > 20 * np.median(late):
        return Panel(title, lines, is_logarithmic=True)
    return Panel(title, lines, ends=(0.0, _ends(lines)[1]))


def _memory(runs: Sequence[LoggedRun]) -> dict[str, str]:
    """The fullest process's memory where it is known, otherwise that of rank 0."""
    several = any(run.has("peak_memory_gib_most") for run in runs)
    end, who = ("_most", " by the fullest process") if several else ("", "")
    reserved = any(run.has("reserved_memory_gib") for run in runs)
    names = {f"peak_memory_gib{end}": f"allocated{who}" if reserved else who.strip()}
    return names | ({f"reserved_memory_gib{end}": f"reserved{who}"} if reserved else {})


def _place(run: LoggedRun, axis: Axis, factor: float) -> Place:
    """factor: what to multiply hours with. Raises UserError if the run has none."""
    if axis == "steps":
        return lambda steps: steps
    if axis == "tokens":
        known, there, factor = run.columns["tokens"].steps, run.columns["tokens"].values, 1.0
    else:
        known, there = hours(run)
    known, there = known[np.isfinite(there)], there[np.isfinite(there)]
    if not len(known):
        raise UserError(f"{run.folder}: no row has {axis}, so it cannot be drawn over them; write --x steps")
    return lambda steps: factor * np.interp(steps, known, there)


def _end(run: LoggedRun, place: Place) -> float:
    """The place of the run's newest row."""
    steps = [column.last for column in run.columns.values() if column.last is not None]
    end = float(place(np.array([max(steps)], dtype=float))[0])
    return end if end > 0 else 1.0


def hours(run: LoggedRun) -> tuple[Numbers, Numbers]:
    """Steps, and the hours since the run began: with all that it lost, as goodput counts it."""
    parts = [run.columns[column] for column in run.named(WALL)]
    if not parts:  # of an old version
        seconds = run.columns["step_seconds"]
        return seconds.steps, np.cumsum(np.nan_to_num(seconds.values) * np.diff(seconds.steps, prepend=0.0)) / 3600
    steps = np.unique(np.concatenate([part.steps for part in parts]))
    return steps, sum((_at(part, steps) for part in parts), np.zeros(len(steps))) / 3600


def _at(part: Column, steps: Numbers) -> Numbers:
    """The seconds of a part of the wall time at these steps; none before its first row."""
    return np.interp(steps, part.steps, np.nan_to_num(part.values), left=0.0)


def thinned(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """x, y, least and most y: those of at most MOST groups of neighbours."""
    if len(x) <= MOST:
        return x, y, y, y
    starts = np.linspace(0, len(x), MOST, endpoint=False).astype(int)
    counts = np.diff(starts, append=len(x))
    known = np.isfinite(y)
    some = np.add.reduceat(known, starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(known, y, 0.0), starts) / some  # NaN where none of a group is known
        low, high = np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)
    return np.add.reduceat(x, starts) / counts, mean, low, high


def smoothed(y: Numbers) -> Numbers:
    """A mean weighted by a bell whose width is 1/SMOOTHED of the points, to both sides; a NaN stays one and counts for
    nothing."""
    width = len(y) / SMOOTHED
    reach = min(int(3 * width), (len(y) - 1) // 2)
    if reach < 1:
        return y
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    known = np.isfinite(y)
    total = np.convolve(np.where(known, y, 0.0), bell, "same")
    weight = np.convolve(known.astype(float), bell, "same")
    return np.where(known, total / np.where(known, weight, 1.0), np.nan)


def _finite(lines: Iterable[Line]) -> Numbers:
    values = np.concatenate([line.y for line in lines] or [np.empty(0)])
    return values[np.isfinite(values)]


def _ends(lines: Sequence[Line]) -> tuple[float | None, float | None]:
    """The ends of the axis: around all but the first steps of long runs, which fall fast."""
    if not lines or max(len(line.x) for line in lines) < 100:
        return None, None
    late, everything = _finite(_late(lines)), _finite(lines)
    if not len(late) or late.max() >= everything.max():
        return None, None
    margin = 0.08 * float(late.max() - late.min() or abs(late.max()))
    return float(late.min()) - margin, float(late.max()) + margin


def _late(lines: Sequence[Line]) -> list[Line]:
    """The lines without their first steps, not smoothed."""
    return [replace(line, y=(line.raw[0] if line.raw else line.y)[len(line.y) // EARLY :]) for line in lines]


def _marks(number: int, run: LoggedRun, places: Sequence[Place]) -> list[Mark]:
    def at(step: int) -> float:
        return float(places[number](np.array([step], dtype=float))[0])

    stages = [Mark(number, at(step), "stage", name) for step, name in run.stages]
    restarts = [Mark(number, at(step), "restart") for step in run.restarts]
    slow = {step for steps in run.stragglers.values() for step in steps}
    points = [Mark(number, at(step), "skipped") for step in run.skipped]
    return [*stages, *restarts, *points, *(Mark(number, at(step), "straggler") for step in sorted(slow))]


def _joints(runs: Sequence[LoggedRun], axis: Axis, loss: Sequence[Line]) -> list[Joint]:
    """Joints of trunks and their forks, where both are drawn. Hours of a fork begin anew, so those are not joined."""
    if axis == "hours":
        return []
    lines = {line.run: line for line in loss}
    joints = []
    for number, run in enumerate(runs):
        trunk = next((other for other in lines if other != number and is_trunk(runs[other], of=run)), None)
        if trunk is None or number not in lines or run.trunk is None:
            continue
        old, new = lines[trunk], lines[number]
        step = run.trunk[1]
        until = old.x <= new.x[0] if step is None or axis != "steps" else old.x <= step
        known = np.flatnonzero(until & np.isfinite(old.y))
        if len(known):
            last = known[-1]
            joints.append(Joint(number, (float(old.x[last]), float(new.x[0])), (float(old.y[last]), float(new.y[0]))))
    return joints


def is_trunk(run: LoggedRun, *, of: LoggedRun) -> bool:
    """Whether `of` says that it continues from `run`."""
    return of.trunk is not None and Path(of.trunk[0]).name in (run.folder.resolve().name, run.about("run", "name"))


def _goodput(runs: Sequence[LoggedRun], places: Sequence[Place]) -> list[Panel]:
    """The panel about the parts of the wall time: over the time of one run, or in all for each of several."""
    if len(runs) == 1:
        shares = _shares(runs[0], places[0])
        return [Panel("where the wall time went, between logged steps", unit="share", shares=shares)] if shares else []
    taken = [{part.removeprefix(WALL): run.columns[part].last_value for part in run.named(WALL)} for run in runs]
    unit, seconds = ("hours", 3600) if max(sum(spent.values()) for spent in taken) >= 3600 else ("minutes", 60)
    bars = [{part: spent[part] / seconds for part in in_order(spent)} for spent in taken]
    return [Panel(f"wall time in {unit}, and the share of it that took steps", bars=bars)] if any(bars) else []


def in_order(parts: Iterable[str]) -> list[str]:
    """Steps first, restarts last."""
    rank = {STEP: 0, SKIPPED: 1, RESTARTS.removeprefix(WALL): 3}
    return sorted(parts, key=lambda part: rank.get(part, 2))


def _shares(run: LoggedRun, place: Place) -> Shares | None:
    """The parts between logged steps; from the first row on, as all before it took no steps."""
    columns = {column.removeprefix(WALL): run.columns[column] for column in run.named(WALL)}
    logged = run.columns["loss"].steps
    if not columns or len(logged) < 2:
        return None
    steps = logged[np.unique(np.linspace(0, len(logged) - 1, INTERVALS + 1).round().astype(int))]
    seconds = {part: np.clip(np.diff(_at(columns[part], steps)), 0.0, None) for part in in_order(columns)}
    total = sum(seconds.values(), np.zeros(len(steps) - 1))
    if not total.any():
        return None
    shares = {part: taken / np.where(total > 0, total, 1.0) for part, taken in seconds.items() if taken.any()}
    return Shares(place(steps), shares)
