"""Fit the model of a step's time to published runs, and show how far off time and memory are.

`python -m tests.published.errors` prints constants and errors; `--write` writes them where they are used and described.
A project's rows are predicted three ways: fitted with all others, left out (the whole project is, as a program would be
that nobody has measured), and left out but for three rows that calibrate. Imports no torch.
"""

import csv
import json
import math
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from recipes.files.markdown import between, markdown_table
from recipes.files.screen import say
from recipes.lab.sweep.grid import read_sweep
from recipes.plan import evidence
from recipes.plan import rates as rates_module
from recipes.plan.rates import RATES, Rates
from recipes.recipe.load import CONFIGS, shown
from tests.published.fit import ROW, SOURCES, fit, residuals_of
from tests.published.gpu import SWEEP, gpu_of_device, step_table
from tests.published.memory import GOAL, memory_table
from tests.published.rows import Published, projects, read_experts, read_published

PAGE = CONFIGS.parent / "docs/plan.md"
ALL_ROWS = CONFIGS.parent / "docs/benchmarks/published_errors.csv"
RECORD = CONFIGS.parent / "docs/benchmarks/gpu-nvidia-h200.json"
BEGIN = "<!-- Written by python -m tests.published.errors --write. -->\n"
END = "<!-- Written by python -m tests.published.errors --write: end. -->\n"
GOALS = {"left out": (0.10, 0.20), "three rows": (0.08, 0.15), "compiled FSDP, fitted": (0.05, 0.12)}
"""Median and 90th percentile of the errors of rows of trust A."""
CALIBRATING = 3
TRIES = 5
"""Draws of calibrating rows."""
MOVES = 0.6
"""How far rows of one program may move a constant from the fit to others, relative to how sure its source is."""
WITHIN = 0.9
"""Share of the rows that the range of a prediction holds."""


@dataclass(frozen=True)
class Errors:
    """The errors of all rows: predicted over measured tokens per second, less 1."""

    rows: Sequence[Published]
    fitted: np.ndarray
    left_out: np.ndarray
    calibrated: Sequence[tuple[Published, float]]
    """Rows of trust A that did not calibrate, and their errors, for each draw."""


def main(arguments: list[str]) -> None:
    """Print constants and errors, or write them."""
    rows = read_published()
    fitted = fit(rows, by_sources())
    errors = errors_of(rows, fitted)
    if arguments != ["--write"]:
        rows_of_all = markdown_table(COLUMNS, cells_of(errors), align="rrlrl")
        tables = [summary(errors), ranges(errors), constants(fitted), rows_of_all, memory_table(rows)]
        say("\n\n".join("\n".join(table) for table in tables))
        return
    write_rates(fitted)
    write_evidence(errors)
    part = "\n".join([*generated(errors, fitted), ""])
    PAGE.write_text(between(PAGE.read_text(encoding="utf-8"), BEGIN, END, part), encoding="utf-8")
    with ALL_ROWS.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *cells_of(errors)])
    say(f"written: recipes/plan/rates.py and evidence.py, {shown(PAGE)}, {shown(ALL_ROWS)}")


def by_sources() -> Rates:
    """The constants before any fit."""
    return replace(RATES, **{name: value for name, (value, _) in SOURCES.items()})  # type: ignore[arg-type]


def errors_of(rows: Sequence[Published], fitted: Rates) -> Errors:
    """The errors of these rows, with all fits that they take."""
    left_out, calibrated = np.empty(len(rows)), list[tuple[Published, float]]()
    for project in projects(rows):
        here = np.array([row.project == project for row in rows])
        mine = [row for row in rows if row.project == project]
        others = fit([row for row in rows if row.project != project], by_sources())
        left_out[here] = np.expm1(residuals_of(mine, others))
        calibrated += _calibrated([row for row in mine if row.trust == "A"], others)
    return Errors(rows, np.expm1(residuals_of(rows, fitted)), left_out, calibrated)


def _calibrated(rows: Sequence[Published], others: Rates) -> Iterator[tuple[Published, float]]:
    """Errors of the rows of one project that did not calibrate; nothing if there are too few of them."""
    if len(rows) <= 2 * CALIBRATING:
        return
    draw = random.Random(0)
    for _ in range(TRIES):
        chosen = draw.sample(rows, CALIBRATING)
        rates = fit(chosen, others, widths=MOVES, row=ROW, equal=True)
        rest = [row for row in rows if row not in chosen]
        yield from zip(rest, map(float, np.expm1(residuals_of(rest, rates))), strict=True)


def by_kind(errors: Errors) -> dict[str, np.ndarray]:
    """Kind of a step -> how far its rows are off: the logarithms of left-out predictions over measurements.

    The rows that are stated as recipes are in no fit.
    """
    apart = read_experts()
    sizes = np.concatenate([np.log1p(errors.left_out), residuals_of(apart, RATES)])
    kinds = np.array([evidence.kind_of(evidence.traits_of(row.work, row.gpu)) for row in (*errors.rows, *apart)])
    return {kind: sizes[kinds == kind] for kind in evidence.KINDS if (kinds == kind).any()}


def spread_of(sizes: np.ndarray, least: float) -> float:
    """The range that holds WITHIN of further rows, as a share, from the logarithms of those that are known.

    least: none is narrower, because the rows of a kind may all be of one project. Where they are too few to tell, the
    largest to the power of FEW.
    """
    ordered, position = np.sort(np.abs(sizes)), math.ceil(WITHIN * (len(sizes) + 1)) - 1
    is_known = position < len(ordered)
    size = max(least, *ordered[position : position + 1]) if is_known else evidence.FEW * max([least, *ordered])
    return round(float(np.expm1(size)), 2)


def least_of(errors: Errors) -> float:
    """The logarithm that WITHIN of all fitted rows are below, where they are left out."""
    return float(np.quantile(np.abs(np.log1p(errors.left_out)), WITHIN))


def ranges(errors: Errors) -> list[str]:
    """A table of the kinds of steps: how far rows are off, the range printed for them, and the share inside of it.

    Each row is compared with the range that the other rows of its kind would give.
    """
    lines, inside, kinds, least = list[Sequence[object]](), 0, by_kind(errors), least_of(errors)
    for kind, sizes in kinds.items():
        held = sum(np.expm1(abs(size)) <= spread_of(np.delete(sizes, place), least) for place, size in enumerate(sizes))
        cells = _two(np.expm1(sizes)), f"{spread_of(sizes, least):.0%}", f"{held} of {len(sizes)}"
        lines.append((kind, len(sizes), *cells))
        inside += held
    both = np.concatenate([*kinds.values()])
    lines.append(("**all**", len(both), _two(np.expm1(both)), "", f"{inside} of {len(both)}, {inside / len(both):.0%}"))
    return markdown_table(("kind", "rows", "left out", "range", "inside, by the other rows"), lines, align="lrrrr")


def compiled_fsdp(row: Published) -> bool:
    """Whether the row is of torch.compile and fully sharded data parallelism alone."""
    work = row.work
    return work.compiled and row.project != "NVIDIA" and work.tensor == work.context == work.pipeline == 1


def summary(errors: Errors) -> list[str]:
    """Median and 90th percentile by project, of rows of trust A."""
    lines: list[Sequence[object]] = []
    trusted = np.array([row.trust == "A" for row in errors.rows])
    for project in (*projects(errors.rows), ""):
        here = np.array([project in ("", row.project) for row in errors.rows]) & trusted
        if here.any():
            three = [error for row, error in errors.calibrated if project in ("", row.project)]
            cells = [_two(errors.fitted[here]), _two(errors.left_out[here]), _two(three) if three else ""]
            lines.append((project or "**all**", here.sum(), *cells))
    goals = [_goal(*GOALS[name]) for name in ("left out", "three rows")]
    lines.append(("goal", "", "", *goals))
    fsdp = np.array([compiled_fsdp(row) for row in errors.rows]) & trusted
    lines += [
        ("compiled FSDP alone", fsdp.sum(), _two(errors.fitted[fsdp]), _two(errors.left_out[fsdp]), ""),
        ("goal", "", _goal(*GOALS["compiled FSDP, fitted"]), "", ""),
    ]
    return markdown_table(("rows of trust A", "rows", "fitted", "left out", "three rows"), lines)


def _two(errors: np.ndarray | Sequence[float]) -> str:
    sizes = np.abs(errors)
    return f"{np.median(sizes):.1%}, {np.quantile(sizes, 0.9):.1%}"


def _goal(median: float, most: float) -> str:
    return f"{median:.0%}, {most:.0%}"


def constants(fitted: Rates) -> list[str]:
    """A table of the fitted constants beside what their sources give."""
    rows = [
        (f"`{name}`", f"{value:.3g}", f"{deviation:.0%}", f"{getattr(fitted, name):.3g}")
        for name, (value, deviation) in SOURCES.items()
    ]
    return markdown_table(("constant", "by its source", "how sure", "fitted"), rows)


COLUMNS = ("left out", "fitted", "trust", "measured tokens/s", "row")


def cells_of(errors: Errors) -> Iterator[tuple[str, ...]]:
    """The cells of all rows, the largest left-out errors first."""
    for index in np.argsort(-np.abs(errors.left_out)):
        row = errors.rows[index]
        cells = f"{errors.left_out[index]:+.1%}", f"{errors.fitted[index]:+.1%}", row.trust, f"{row.measured:.0f}"
        yield (*cells, f"{row.project}: {row.name}")


def measured_here(rates: Rates) -> list[str]:
    """Runs of this program on a GPU, which no fit has seen, and the errors of their plans."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    sweep = read_sweep(SWEEP, output=Path("runs"), processes=1)
    return step_table(record, [sweep], gpu=gpu_of_device(record["environment"]["device"]), rates=rates)


def generated(errors: Errors, fitted: Rates) -> Iterator[str]:
    """The part of the page between its marks."""
    yield from ("", "Our runs on an H200, which are in no fit. Second error: with the length of its documents, which a")
    yield from ("recipe does not know. *: the allocator waited in every step.", "", *measured_here(fitted))
    yield from ("", "Published rows, median and 90th percentile of the sizes of the errors:", "", *summary(errors), "")
    yield from (
        "By kind; [rows of experts](benchmarks/published_experts.csv) and a B200 are in no fit:",
        "",
        *ranges(errors),
        "",
    )
    yield from ("Published memory, of what a recipe can state:", "", *memory_table(errors.rows, least=GOAL), "")


def write_rates(fitted: Rates) -> None:
    """Replace the fitted numbers in the source of Rates."""
    assert rates_module.__file__
    file = Path(rates_module.__file__)
    text = file.read_text(encoding="utf-8")
    for name in SOURCES:
        line = f"    {name}: float = {getattr(fitted, name)}"
        text, count = re.subn(rf"^    {name}: float = .*$", line, text, flags=re.M)
        assert count == 1, name
    file.write_text(text, encoding="utf-8")


def write_evidence(errors: Errors) -> None:
    """Replace the numbers in the source of the ranges."""
    assert evidence.__file__
    file, least, seen = Path(evidence.__file__), least_of(errors), dict[str, set[str]]()
    for row in (*errors.rows, *read_experts()):
        traits = evidence.traits_of(row.work, row.gpu)
        for place, trait in enumerate(traits):
            seen.setdefault(trait, set()).update(traits[place + 1 :])
    known = [f'    "{kind}": {len(sizes), spread_of(sizes, least)},' for kind, sizes in by_kind(errors).items()]
    pairs = [f'    "{trait}": "{" ".join(sorted(seen[trait]))}",' for trait in sorted(seen)]
    known = ["ROWS: dict[str, tuple[int, float]] = {", *known, "}"]
    part = "\n".join([*known, "TOGETHER: dict[str, str] = {", *pairs, "}", ""])
    begin = "# Written by python -m tests.published.errors --write.\n"
    file.write_text(between(file.read_text(encoding="utf-8"), begin, "# End.\n", part), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
