"""Compares several runs: their last numbers, and what differs between their recipes. Imports no torch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recipes.lab.curves.panels import hours
from recipes.lab.curves.reading import TASK, VALIDATION, WALL, Numbers, Run, plain
from recipes.lab.curves.style import short
from recipes.recipe.fields import field_types, toml, value_of
from recipes.recipe.schema import Recipe

UNKNOWN = "-"
WIDE = 6
"""Of more runs than this, the table has one line each."""
OF_THE_RUN = ("run.name", "run.output")


def comparison(runs: Sequence[Run]) -> list[list[str]]:
    """The rows of a table, head first: numbers, then each value in which the recipes or the machines differ."""
    rows = [["", *(run.name for run in runs)], *_numbers(runs), *_differences([_about(run) for run in runs])]
    return [list(row) for row in zip(*rows, strict=True)] if len(runs) > WIDE else rows


def aligned(rows: Sequence[Sequence[str]], *, most: int = 60) -> list[str]:
    """The rows as lines of text. most: characters of a cell, which loses its middle."""
    cells = [[shortened(cell, most) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def fitted(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The rows as lines of text with at most so many characters."""
    for most in (60, 40, 25, 15, 10):
        lines = aligned(rows, most=most)
        if max(map(len, lines)) <= width:
            return lines
    return [line[:width] for line in lines]


def shortened(text: str, most: int = 60) -> str:
    """The text without its middle where it is longer."""
    if len(text) <= most:
        return text
    end = max(1, most // 2)
    return f"{text[: max(0, most - end - 1)]}\N{HORIZONTAL ELLIPSIS}{text[-end:]}"


def _numbers(runs: Sequence[Run]) -> list[list[str]]:
    """The rows of numbers that at least one run has."""

    def row(title: str, column: str, value: Callable[[Numbers], Any], form: str) -> list[str]:
        known = [run.columns[column].values for run in runs]
        known = [values[np.isfinite(values)] for values in known]
        return [title, *(_shown(value(values), form) if len(values) else UNKNOWN for values in known)]

    tested = dict.fromkeys(name for run in runs for name in (*run.named(VALIDATION), *run.named(TASK)))
    rows = [
        ["steps", *(f"{run.columns['loss'].last or 0:,}" for run in runs)],
        ["tokens", *(short(float(run.columns["tokens"].last_value)) for run in runs)],
        row("loss, last tenth", "loss", lambda values: values[-max(1, len(values) // 10) :].mean(), ".4f"),
        *(row(name.replace("_", " ", 1), name, lambda values: values[-1], ".4f") for name in tested),
        row("tokens/s", "tokens_per_second", np.median, ",.0f"),
        row("MFU", "mfu", np.median, ".1%"),
        row("peak GiB", "peak_memory_gib", np.max, ".2f"),
        ["hours", *(f"{sum(hours(run)[1][-1:]):.3g}" for run in runs)],
        ["goodput", *map(_goodput, runs)],
    ]
    return [row for row in rows if set(row[1:]) != {UNKNOWN}]


def _shown(value: float, form: str) -> str:
    return f"{value:{form}}" if abs(value) < 1e12 else short(float(value))


def _goodput(run: Run) -> str:
    parts = {part: run.columns[part].last_value for part in run.named(WALL)}
    total = sum(parts.values())
    return f"{parts.get(WALL + 'step', 0.0) / total:.1%}" if total > 0 else UNKNOWN


def _about(run: Run) -> dict[str, str]:
    """What the run's recipe and machine are, by dotted key; empty if nothing is known."""
    found = {key: toml(value) for key, value in _flat(run.recipe) if key not in OF_THE_RUN}
    packages = run.environment.get("packages")
    machine = {
        "device": run.environment.get("device"),
        "processes": run.environment.get("world_size"),
        "commit": str(run.environment.get("git_commit") or "")[:12],
        "torch": packages.get("torch") if isinstance(packages, dict) else None,
    }
    return found | {key: str(value) for key, value in machine.items() if value}


def _flat(value: Any, key: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of everything in a recipe; stages are numbered from 1."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = {str(number): item for number, item in enumerate(value, 1)}
    if not isinstance(value, dict):
        return [(key, value)]
    return [pair for name, item in value.items() for pair in _flat(item, f"{key}.{name}" if key else name)]


def _differences(about: Sequence[dict[str, str]]) -> list[list[str]]:
    """A row for each key whose values differ. What an older version did not write has its default."""
    rows = []
    for key in dict.fromkeys(key for one in about for key in one):
        default = toml(value_of(Recipe(), key)) if key in field_types() else UNKNOWN
        values = [plain(one.get(key, default)) if one else UNKNOWN for one in about]
        if len(set(values) - {UNKNOWN}) > 1:
            rows.append([key, *_from_where_they_differ(values)])
    return rows


def _from_where_they_differ(values: Sequence[str]) -> list[str]:
    """The values without what long ones have in common at their beginning."""
    known = [value for value in values if value != UNKNOWN]
    same = next((n for n, letters in enumerate(zip(*known, strict=False)) if len(set(letters)) > 1), 0)
    return [f"...{value[same - 10 :]}" if same > 20 and value != UNKNOWN else value for value in values]
