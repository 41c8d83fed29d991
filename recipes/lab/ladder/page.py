"""The page of a ladder: its answer, its law and its runs, with a picture. Imports no torch."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
from matplotlib import colormaps
from matplotlib.figure import Figure

from recipes.files.atomic import write_whole
from recipes.files.markdown import markdown_table
from recipes.lab.curves.style import DOTS_PER_INCH, INK, VERMILION, short, tidy
from recipes.lab.ladder.answer import LadderAnswer, interval, lines
from recipes.metrics.ladder import losses


def draw_ladder(answer: LadderAnswer, file: Path) -> None:
    """Loss against FLOPs: the runs of each rung, dashed lines of the law, and the prediction with its interval."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes, fit, large = figure.subplots(), answer.fit, answer.model.non_embedding_params()
    tidy(axes)
    dashed: dict[str, Any] = {"linewidth": 1, "linestyle": (0, (4, 3)), "zorder": 1.5}
    small: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8.5}
    sizes = sorted({point.parameters for point in answer.points})
    for number, size in enumerate(sizes):
        points = [point for point in answer.points if point.parameters == size]
        lengths, each = sorted({point.tokens for point in points}), points[0].flops / points[0].tokens
        means = [fmean(point.loss for point in points if point.tokens == length) for length in lengths]
        colour = colormaps["viridis"](0.85 - 0.85 * number / max(1, len(sizes) - 1))
        around = numpy.geomspace(lengths[0] / 1.5, 3 * lengths[-1])
        law = [losses([fit.law], size, length)[0] for length in around]
        axes.plot(each * around, law, color=colour, **dashed)
        axes.plot([each * length for length in lengths], means, color=colour, linewidth=1.8)
        axes.scatter([run.flops for run in points], [run.loss for run in points], color=colour, s=14, zorder=3)
        axes.annotate(short(size), (each * around[-1], law[-1]), (4, -3), color=colour, **small)
    around = numpy.geomspace(answer.tokens / 8, answer.tokens)
    flops, loss, low, high = (
        answer.flops / answer.tokens * around,
        *zip(*(fit.predict(large, length) for length in around), strict=True),
    )
    axes.fill_between(flops, low, high, color=VERMILION, alpha=0.15, linewidth=0)
    axes.plot(flops, loss, color=VERMILION, **dashed)
    ends = [[loss[-1] - low[-1]], [high[-1] - loss[-1]]]
    axes.errorbar(flops[-1:], loss[-1:], ends, color=VERMILION, fmt="D", markersize=5, capsize=4)
    note = f"{short(large)} parameters, {short(answer.tokens)} tokens\n{loss[-1]:.3f} ({low[-1]:.3f} to {high[-1]:.3f})"
    axes.annotate(note, (flops[-1], low[-1]), (8, -8), color=VERMILION, ha="right", va="top", **small)
    axes.set_xscale("log")
    top = 1.05 * max(point.loss for point in answer.points)
    axes.set_ylim(low[-1] - 0.12 * (top - low[-1]), top)
    axes.set_xlabel("FLOPs of a run", color=INK)
    axes.set_ylabel("validation loss (nats per token)", color=INK)
    title = f"{answer.ladder.recipe}: {len(answer.points)} runs by their parameters, their law (dashed), its prediction"
    axes.set_title(title, fontsize=9.5, loc="left", color=INK)
    figure.savefig(file, dpi=DOTS_PER_INCH)


def write_ladder_page(folder: Path, answer: LadderAnswer, *, command: str) -> None:
    """Write ladder.md and ladder.png. command: the one that they come from. Raises OSError."""
    draw_ladder(answer, folder / "ladder.png")
    write_whole(folder / "ladder.md", "\n".join(_page(answer, command)) + "\n")


def _page(answer: LadderAnswer, command: str) -> Iterator[str]:
    """The lines of the page."""
    yield from (f"# The ladder of {answer.ladder.recipe}", "", f"    {command}", "")
    yield from (f"    {line}".rstrip() for line in lines(answer))
    yield from ("", "![Loss against FLOPs](ladder.png)", "", "## Law", "", "L(N, D) = E + A / N^a + B / D^b, nats", "")
    constants = zip("EAaBb", answer.fit.law, zip(*answer.fit.samples, strict=True), strict=True)
    spans = [(name, f"{value:.4g}", "{:.4g} to {:.4g}".format(*interval(drawn))) for name, value, drawn in constants]
    yield from markdown_table(("", "", "95% interval"), spans)
    yield from ("", "## Runs", "")
    columns, rows = ("rung", "parameters", "tokens", "seeds", "loss", "law", "difference"), []
    ordered = sorted(answer.points, key=lambda point: (point.parameters, point.tokens))
    for (rung, size, tokens), group in groupby(ordered, lambda point: (point.rung, point.parameters, point.tokens)):
        seen = [point.loss for point in group]
        loss, law = fmean(seen), float(losses([answer.fit.law], size, tokens)[0])
        gap = f"{100 * (loss / law - 1):+.2f}%"
        rows.append((rung, f"{size:,}", f"{tokens:,}", len(seen), f"{loss:.4f}", f"{law:.4f}", gap))
    yield from markdown_table(columns, rows, align="l" * len(columns))
    if answer.failed:
        yield from ("", "## Failed", "", *(f"- {name}: {why}" for name, why in answer.failed.items()))
