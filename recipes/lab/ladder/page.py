"""The page of a ladder: its answer, its law and its runs. Imports no torch."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import fmean

from recipes.files.atomic import write_whole
from recipes.files.markdown import markdown_table
from recipes.lab.curves.style import short
from recipes.lab.ladder.answer import LadderAnswer, interval, lines
from recipes.metrics.ladder import losses

PAGE = "ladder.md"


def write_ladder_page(folder: Path, answer: LadderAnswer, *, command: str) -> None:
    """Write ladder.md. command: the one that the runs come from. Raises OSError."""
    write_whole(folder / PAGE, "\n".join(_page(answer, command)) + "\n")


def _page(answer: LadderAnswer, command: str) -> Iterator[str]:
    """The lines of the page."""
    yield from (f"# The ladder of {answer.recipe}", "", f"    {command}", "")
    yield from (f"    {line}".rstrip() for line in lines(answer))
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
