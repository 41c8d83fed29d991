"""What a ladder says of the run that it was made for: on one screen, and as a page. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean

import numpy

from models.config import ModelConfig
from recipes.files.atomic import write_whole
from recipes.lab.curves.style import short
from recipes.lab.ladder.fit import Rates, compute_optimal
from recipes.lab.ladder.points import Point
from recipes.lab.ladder.rungs import scaled
from recipes.metrics.ladder import Fit, Ladder, Prediction, losses


@dataclass(frozen=True)
class Answer:
    """What the runs of a ladder found, and the run that they are asked about."""

    model: ModelConfig
    tokens: int
    sequence_length: int
    learning_rate: float
    ladder: Ladder
    points: Sequence[Point]
    rates: Rates | None
    """The best learning rate by size; None if the runs do not tell."""
    missed: Sequence[tuple[Point, Prediction]]
    """The runs of the largest rung, and what a fit without them predicts."""
    failed: Mapping[str, str]
    """Name of a run -> why it failed."""

    @property
    def fit(self) -> Fit:
        """The fit of the losses at the end."""
        return self.ladder.fits[-1][1]

    @property
    def flops(self) -> float:
        """FLOPs of the whole run, counted as those of a Point."""
        return float(self.tokens) * self.model.flops_per_token(self.sequence_length, "causal")


def at_equal_flops(
    fit: Fit, model: ModelConfig, flops: float, sequence_length: int, factor: float
) -> tuple[int, float, Prediction]:
    """(N, D, loss) of a run of so many FLOPs with `factor` times the parameters of the model."""
    other = model if factor == 1 else scaled(model, round(factor * model.non_embedding_params()))
    parameters, tokens = other.non_embedding_params(), flops / other.flops_per_token(sequence_length, "causal")
    return parameters, tokens, fit.predict(parameters, tokens)


def lines(answer: Answer) -> list[str]:
    """The answer on one screen."""
    points, fit, rungs = answer.points, answer.fit, sorted({point.parameters for point in answer.points})
    span = f"{short(rungs[0])} to {short(rungs[-1])} parameters (embeddings are not counted)"
    found = [f"{len(points)} runs on {len(rungs)} rungs, of {span}", ""]
    found += [f"{'':<16}{'parameters':>10}{'tokens':>10}{'loss':>9}   95% interval"]
    for name, factor in {"this recipe": 1, "half as large": 0.5, "twice as large": 2}.items():
        size, tokens, seen = at_equal_flops(fit, answer.model, answer.flops, answer.sequence_length, factor)
        numbers = f"{short(size):>10}{short(tokens):>10}{seen.loss:>9.3f}   {seen.low:.3f} to {seen.high:.3f}"
        found += [f"{name:<16}{numbers}{'' if factor == 1 else ', at equal FLOPs'}"]
    best = compute_optimal(fit.law, answer.tokens)
    low, high = _interval([compute_optimal(law, answer.tokens) for law in fit.samples])
    sizes = answer.model.non_embedding_params() / answer.ladder.parameters
    lengths, flops = answer.tokens / answer.ladder.tokens, answer.flops / max(point.flops for point in points)
    rest = f" (and {len(answer.failed) - 1} other runs: ladder.md)" if len(answer.failed) > 1 else ""
    return [
        *found,
        "",
        f"best size       {short(best)} parameters ({short(low)} to {short(high)}) for {short(answer.tokens)} tokens,"
        f" {answer.tokens / best:.2g} tokens per parameter",
        f"learning rate   {_rates(answer)}",
        f"reach           {sizes:.2g}x the parameters of the largest rung, {lengths:.2g}x the tokens of the longest"
        f" run, {flops:.2g}x the FLOPs",
        f"check           {_check(answer)}",
        *[f"failed          {name}: {why}{rest}" for name, why in answer.failed.items()][:1],
    ]


def _rates(answer: Answer) -> str:
    """The recipe's learning rate, and the one that the small runs suggest."""
    own = f"{short(answer.learning_rate)} in the recipe"
    if (rates := answer.rates) is None:
        return f"{own}; the small runs do not tell whether another is better"
    best = rates.coefficient * answer.model.non_embedding_params() ** rates.exponent
    doubt = f"; at {', '.join(map(short, rates.edges))} parameters, the best may lie beyond those tried"
    return f"{own}; the small runs suggest {short(best)}{doubt if rates.edges else ''}"


def _check(answer: Answer) -> str:
    """How far a law of the other rungs misses the largest one."""
    if not answer.missed:
        return "none: with so few rungs, none can be left out of the fit"
    gaps = [100 * (point.loss / predicted.loss - 1) for point, predicted in answer.missed]
    inside = sum(predicted.low <= point.loss <= predicted.high for point, predicted in answer.missed)
    rung, span = answer.missed[0][0].rung, f"{min(gaps):+.1f} to {max(gaps):+.1f}%"
    return f"a fit without the rung of {rung} misses it by {span}; {inside} of its {len(gaps)} runs are in the interval"


def _interval(values: Sequence[float]) -> tuple[float, float]:
    low, high = numpy.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def write_page(folder: Path, answer: Answer, *, command: str) -> None:
    """Write ladder.md and ladder.png. command: the one that they come from. Raises OSError."""
    from recipes.lab.ladder.picture import draw  # matplotlib

    draw(answer, folder / "ladder.png")
    write_whole(folder / "ladder.md", "\n".join(_page(answer, command)) + "\n")


def _page(answer: Answer, command: str) -> Iterator[str]:
    """The lines of the page."""
    yield from (f"# The ladder of {answer.ladder.recipe}", "", f"    {command}", "")
    yield from (f"    {line}".rstrip() for line in lines(answer))
    yield from ("", "![Loss against FLOPs](ladder.png)", "", "## Law", "", "L(N, D) = E + A / N^a + B / D^b, nats", "")
    yield from ("| | | 95% interval |", "|---|---:|---:|")
    for name, value, drawn in zip("EAaBb", answer.fit.law, zip(*answer.fit.samples, strict=True), strict=True):
        yield "| {} | {:.4g} | {:.4g} to {:.4g} |".format(name, value, *_interval(drawn))
    yield from ("", "## Runs", "", "| rung | parameters | tokens | seeds | loss | law | difference |", "|---" * 7 + "|")
    ordered = sorted(answer.points, key=lambda point: (point.parameters, point.tokens))
    for (rung, size, tokens), group in groupby(ordered, lambda point: (point.rung, point.parameters, point.tokens)):
        seen = [point.loss for point in group]
        loss, law = fmean(seen), float(losses([answer.fit.law], size, tokens)[0])
        gap = f"{100 * (loss / law - 1):+.2f}%"
        yield f"| {rung} | {size:,} | {tokens:,} | {len(seen)} | {loss:.4f} | {law:.4f} | {gap} |"
    if answer.failed:
        yield from ("", "## Failed", "", *(f"- {name}: {why}" for name, why in answer.failed.items()))
