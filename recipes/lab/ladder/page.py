"""The page of a ladder: its answer, its law and its runs, with a picture. Imports no torch."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from recipes.files.atomic import write_whole
from recipes.files.markdown import markdown_table
from recipes.lab.curves.style import DOTS_PER_INCH, INK, VERMILION, plain_text, short, tidy
from recipes.lab.ladder.answer import LadderAnswer, interval, lines
from recipes.metrics.ladder import losses

PAGE, PICTURE = "ladder.md", "ladder.png"
DASHED: dict[str, Any] = {"linewidth": 1, "linestyle": (0, (4, 3)), "zorder": 1.5}


@plain_text
def draw_ladder(answer: LadderAnswer, file: Path) -> None:
    """Loss against FLOPs: the runs of each rung and, if they determine a law, dashed lines of it, and the prediction
    with its interval."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    tidy(axes)
    sizes = sorted({point.parameters for point in answer.points})
    for number, size in enumerate(sizes):
        points = [point for point in answer.points if point.parameters == size]
        lengths, each = sorted({point.tokens for point in points}), points[0].flops / points[0].tokens
        means = [fmean(point.loss for point in points if point.tokens == length) for length in lengths]
        colour = colormaps["viridis"](0.85 - 0.85 * number / max(1, len(sizes) - 1))
        if answer.ladder:
            around = numpy.geomspace(lengths[0] / 1.5, 3 * lengths[-1])
            law = [losses([answer.fit.law], size, length)[0] for length in around]
            axes.plot(each * around, law, color=colour, **DASHED)
        axes.plot([each * length for length in lengths], means, color=colour, linewidth=1.8, label=short(size))
        axes.scatter([run.flops for run in points], [run.loss for run in points], color=colour, s=14, zorder=3)
    if answer.ladder:
        _draw_prediction(axes, answer)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.minorticks_off()
    axes.set_xlabel("FLOPs of a run", color=INK)
    axes.set_ylabel("validation loss (nats per token)", color=INK)
    drawn = "their law (dashed), its prediction" if answer.ladder else "no law"
    title = f"{answer.recipe}: {len(answer.points)} runs by their parameters, {drawn}"
    axes.set_title(title, fontsize=9.5, loc="left", color=INK)
    figure.legend(loc="outside right upper", title="parameters", frameon=False, fontsize=8.5)  # where no curve is
    figure.savefig(file, dpi=DOTS_PER_INCH)


def _draw_prediction(axes: Axes, answer: LadderAnswer) -> None:
    large, around = answer.model.non_embedding_params(), numpy.geomspace(answer.tokens / 8, answer.tokens)
    flops, loss, low, high = (
        answer.flops / answer.tokens * around,
        *zip(*(answer.fit.predict(large, length) for length in around), strict=True),
    )
    axes.fill_between(flops, low, high, color=VERMILION, alpha=0.15, linewidth=0)
    axes.plot(flops, loss, color=VERMILION, **DASHED)
    ends = [[loss[-1] - low[-1]], [high[-1] - loss[-1]]]
    note = f"{short(large)}, {short(answer.tokens)} tokens:\n{loss[-1]:.3f} ({low[-1]:.3f} to {high[-1]:.3f})"
    axes.errorbar(flops[-1:], loss[-1:], ends, color=VERMILION, fmt="D", markersize=5, capsize=4, label=note)
    measured = [point.loss for point in answer.points]
    bottom, top = min(*measured, low[-1]), 1.05 * max(measured)
    axes.set_ylim(bottom - 0.12 * (top - bottom), top)


def write_ladder_page(folder: Path, answer: LadderAnswer, *, command: str) -> None:
    """Write ladder.md and, of runs that ended, ladder.png. command: the one that they come from. Raises OSError."""
    if answer.points:
        draw_ladder(answer, folder / PICTURE)
    write_whole(folder / PAGE, "\n".join(_page(answer, command)) + "\n")


def _page(answer: LadderAnswer, command: str) -> Iterator[str]:
    """The lines of the page."""
    yield from (f"# The ladder of {answer.recipe}", "", f"    {command}", "")
    yield from (f"    {line}".rstrip() for line in lines(answer))
    if answer.points:
        yield from ("", f"![Loss against FLOPs]({PICTURE})")
    if answer.ladder:
        yield from ("", "## Law", "", "L(N, D) = E + A / N^a + B / D^b, nats", "")
        constants = zip("EAaBb", answer.fit.law, zip(*answer.fit.samples, strict=True), strict=True)
        spans = [
            (name, f"{value:.4g}", "{:.4g} to {:.4g}".format(*interval(drawn))) for name, value, drawn in constants
        ]
        yield from markdown_table(("", "", "95% interval"), spans)
    yield from ("", "## Runs", "")
    rows: list[tuple[str, ...]] = []
    columns = ("rung", "parameters", "tokens", "loss by seed", "mean", "law", "difference")
    ordered = sorted(answer.points, key=lambda point: (point.parameters, point.tokens, point.seed))
    for (rung, size, tokens), group in groupby(ordered, lambda point: (point.rung, point.parameters, point.tokens)):
        seen = [point.loss for point in group]
        loss, law, gap = f"{fmean(seen):.4f}", "-", "-"
        if answer.ladder:
            predicted = float(losses([answer.fit.law], size, tokens)[0])
            law, gap = f"{predicted:.4f}", f"{100 * (fmean(seen) / predicted - 1):+.2f}%"
        by_seed = ", ".join(f"{one:.4f}" for one in seen)
        rows.append((rung, f"{size:,}", f"{tokens:,}", by_seed, loss, law, gap))
    yield from markdown_table(columns, rows, align="l" * len(columns))
    if answer.trials:
        yield from ("", "## Learning rates tried", "")
        tried = [(one.rung, f"{one.factor:g}x", short(one.rate), f"{one.loss:.4f}") for one in sorted(answer.trials)]
        yield from markdown_table(("rung", "of its rate", "learning rate", "loss"), tried)
    if answer.failed:
        yield from ("", "## Failed", "", *(f"- {name}: {why}" for name, why in answer.failed.items()))
