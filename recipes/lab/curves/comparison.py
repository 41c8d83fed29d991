"""Compares several runs: their last numbers, and what differs between their recipes. Imports no torch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from recipes.lab.curves.reading import AVERAGE, TASK, VALIDATION, LoggedRun, Numbers, plain
from recipes.lab.curves.style import shortened
from recipes.recipe.fields import BEFORE, field_types, toml, value_of
from recipes.recipe.schema import Recipe

UNKNOWN = "-"
OF_THE_RUN = ("run.name", "run.output")


def comparison(runs: Sequence[LoggedRun]) -> list[list[str]]:
    """The rows of a table, head first: numbers that a run has, then each value in which the recipes differ.
    Of more runs than that, a row for each."""
    rows = [["", *(run.name for run in runs)], *numbers(runs), *differences(runs)]
    return [list(row) for row in zip(*rows, strict=True)] if len(runs) > len(rows) else rows


def aligned(rows: Sequence[Sequence[str]], *, most: int = 60) -> str:
    """The rows as lines of text. most: characters of a cell."""
    cells = [[shortened(cell, most) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def numbers(runs: Sequence[LoggedRun]) -> list[list[str]]:
    """A row for each of the last numbers that a run has."""

    def row(title: str, column: str, value: Callable[[Numbers], Any], form: str) -> list[str]:
        known = [run.columns[column].values for run in runs]
        known = [values[np.isfinite(values)] for values in known]
        return [title, *(f"{value(values):{form}}" if len(values) else UNKNOWN for values in known)]

    tested = dict.fromkeys(name for run in runs for kind in (VALIDATION, AVERAGE, TASK) for name in run.named(kind))
    rows = [
        ["steps", *(f"{run.columns['loss'].last or 0:,}" for run in runs)],
        row("tokens", "tokens", np.max, ",.0f"),
        row("loss, last tenth", "loss", lambda values: values[-max(1, len(values) // 10) :].mean(), ".4f"),
        *(row(name.replace("_", " ", 1), name, lambda values: values[-1], ".4f") for name in tested),
        row("tokens/s", "tokens_per_second", np.median, ",.0f"),
        row("MFU", "mfu", np.median, ".1%"),
        row("peak GiB", "peak_memory_gib", np.max, ".2f"),
        row("goodput", "goodput", lambda values: values[-1], ".1%"),
    ]
    return [row for row in rows if set(row[1:]) != {UNKNOWN}]


def differences(runs: Sequence[LoggedRun]) -> list[list[str]]:
    """A row for each key whose values differ. What an older version did not write is as it was then."""
    recipes = [dict(_flat(run.recipe)) for run in runs]
    rows = []
    for key in dict.fromkeys(key for recipe in recipes for key in recipe if key not in OF_THE_RUN):
        default = toml(BEFORE.get(key, value_of(Recipe(), key))) if key in field_types() else UNKNOWN
        values = [recipe.get(key, default) if recipe else None for recipe in recipes]
        if len(set(values) - {None}) > 1:
            rows.append([key, *(UNKNOWN if value is None else value for value in values)])
    return rows


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value) of everything in a recipe; stages are numbered from 1."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(number): item for number, item in enumerate(value, 1)}
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}" if key else name)
    else:
        yield key, plain(toml(value))
