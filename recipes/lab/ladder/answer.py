"""What a ladder says of the run that it was made for: on one screen, and its page. Imports no torch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean

import numpy

from models.config import ModelConfig
from recipes.files.atomic import write_whole
from recipes.files.markdown import markdown_table
from recipes.lab.curves.style import short
from recipes.lab.ladder.fit import BestRates, EndedRun, Trial, compute_optimal, too_close
from recipes.lab.ladder.rungs import scaled
from recipes.metrics.ladder import Fit, Ladder, Prediction, losses

PAGE = "ladder.md"
CAUTION = "caution         {:.0%} of the resampled laws have no floor, or an exponent at its bound: few runs to tell"
HELD = "laws of smaller runs miss larger ones by {:.1%} (95% by less), and more further away; intervals have that"
UNHELD = "none: too few runs to hold some out, so the intervals do not have what the law itself misses"
OFTEN = 0.05
"""Share of the resampled laws that may have no floor."""
REPEATS = 4.0
"""Epochs up to which repeated text is worth nearly as much as new text (Muennighoff et al. 2023, arXiv 2305.16264)."""


@dataclass(frozen=True)
class LadderAnswer:
    """What the runs of a ladder found, and the run that they are asked about."""

    recipe: str
    """The file of the run that they are asked about."""
    model: ModelConfig
    tokens: int
    sequence_length: int
    learning_rate: float
    points: Sequence[EndedRun]
    trials: Sequence[Trial]
    factor: float
    """Of the learning rates of these runs."""
    rates: BestRates | None
    """The best learning rate by size; None if the runs do not tell."""
    failed: Mapping[str, str]
    """Name of a run -> why it failed."""
    ladder: Ladder | None = None
    """None if the runs determine no law: `refused` says why."""
    refused: str = ""

    @property
    def fit(self) -> Fit:
        """The fit of the losses at the end."""
        assert self.ladder is not None
        return self.ladder.fits[-1][1]

    @property
    def flops(self) -> float:
        """FLOPs of the whole run, counted as those of a EndedRun."""
        return float(self.tokens) * self.model.flops_per_token(self.sequence_length, "causal")


def at_equal_flops(
    fit: Fit, model: ModelConfig, flops: float, sequence_length: int, factor: float
) -> tuple[int, float, Prediction]:
    """(N, D, loss) of a run of so many FLOPs with `factor` times the parameters of the model."""
    other = model if factor == 1 else scaled(model, round(factor * model.non_embedding_params()))
    parameters, tokens = other.non_embedding_params(), flops / other.flops_per_token(sequence_length, "causal")
    return parameters, tokens, fit.predict(parameters, tokens)


def lines(answer: LadderAnswer) -> list[str]:
    """The answer on one screen."""
    points, rungs = answer.points, sorted({point.parameters for point in answer.points})
    span = f", of {short(rungs[0])} to {short(rungs[-1])} parameters (embeddings are not counted)" if rungs else ""
    seeds = len({point.seed for point in points})
    text = [f"{len(points)} losses on {len(rungs)} rungs (seeds: {seeds}){span}", ""]
    below = [f"learning rate   {_rates(answer)}", *_epochs(answer)]
    rest = f" (and {len(answer.failed) - 1} more: ladder.md)" if len(answer.failed) > 1 else ""
    failed = [f"failed          {name}: {why}{rest}" for name, why in answer.failed.items()][:1]
    if answer.ladder is None:
        return [*text, f"no prediction   {answer.refused}", *below, *failed]
    fit = answer.fit
    text += [f"{'':<16}{'parameters':>10}{'tokens':>10}{'loss':>9}   95% interval"]
    for name, factor in {"this recipe": 1, "half as large": 0.5, "twice as large": 2}.items():
        size_here, tokens, seen = at_equal_flops(fit, answer.model, answer.flops, answer.sequence_length, factor)
        numbers = f"{short(size_here):>10}{short(tokens):>10}{seen.loss:>9.3f}   {seen.low:.3f} to {seen.high:.3f}"
        text += [f"{name:<16}{numbers}{'' if factor == 1 else ', at equal FLOPs'}"]
    best = compute_optimal(fit.law, answer.tokens)
    low, high = interval([compute_optimal(law, answer.tokens) for law in fit.samples])
    each = f"for {short(answer.tokens)} tokens, {answer.tokens / best:.2g} tokens per parameter"
    size = f"{short(best)} parameters ({short(low)} to {short(high)}) {each}"
    near = [rungs[0] / 10 < number < 1000 * rungs[-1] for number in (low, best, high)]
    if not near[1]:
        size = f"far {'below' if best < rungs[0] else 'above'} all rungs, where the law says little"
    elif not all(near):
        size = "not determined: some of the resampled laws put it far below all rungs, or far above them"
    sizes = answer.model.non_embedding_params() / answer.ladder.parameters
    lengths, flops = answer.tokens / answer.ladder.tokens, answer.flops / max(point.flops for point in points)
    return [
        *text,
        "",
        f"best size       {size}",
        *below[:1],
        f"reach           {_times(sizes)} the parameters of the largest rung, {_times(lengths)} the tokens of the"
        f" longest run, {_times(flops)} the FLOPs",
        f"check           {HELD.format(math.expm1(fit.misfit)) if fit.misfit else UNHELD}",
        *below[1:],
        *_cautions(answer),
        *failed,
    ]


def _cautions(answer: LadderAnswer) -> list[str]:
    """What keeps these runs from determining the law."""
    laws = [answer.fit.law, *answer.fit.samples]
    open_ended = [law for law in laws if law.E < 0.01 or min(law.a, law.b) < 0.011 or max(law.a, law.b) > 2.9]
    share = len(open_ended) / len(laws)
    close = too_close([(point.parameters, point.tokens) for point in answer.points])
    said = [CAUTION.format(share)] if share > OFTEN or answer.fit.law in open_ended else []
    return [*said, *([f"caution         {close}"] if close else [])]


def _epochs(answer: LadderAnswer) -> list[str]:
    """How often the longest run and the recipe read their text, as far as the runs say."""
    most = max(answer.points, key=lambda point: point.epochs, default=None)
    if most is None or not most.epochs:
        return []
    times = most.epochs, answer.tokens * most.epochs / most.tokens
    doubt = (
        ": the law knows no epochs; write lengths that the text has, or give more text" if max(times) > REPEATS else ""
    )
    return [f"epochs          of the text: {times[0]:.2g} in the longest run, {times[1]:.2g} in this recipe{doubt}"]


def _rates(answer: LadderAnswer) -> str:
    """The recipe's learning rate, and the one that the small runs suggest."""
    in_recipe = f"{short(answer.learning_rate)} in the recipe"
    if answer.factor != 1:
        in_recipe += f", {short(answer.factor * answer.learning_rate)} as these runs were trained"
    if (rates := answer.rates) is None:
        return f"{in_recipe}; the small runs do not tell whether another is better"
    best = rates.coefficient * answer.model.non_embedding_params() ** rates.exponent
    doubt = f"; at {', '.join(map(short, rates.edges))} parameters, the best may lie beyond those tried"
    return f"{in_recipe}; the small runs suggest {short(best)}{doubt if rates.edges else ''}"


def _times(factor: float) -> str:
    return f"{factor:,.0f}x" if factor >= 10 else f"{factor:.2g}x"


def interval(values: Sequence[float]) -> tuple[float, float]:
    low, high = numpy.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def write_ladder_page(folder: Path, answer: LadderAnswer, *, command: str) -> None:
    """Write ladder.md. command: the one that the runs come from. Raises OSError."""
    write_whole(folder / PAGE, "\n".join(_page(answer, command)) + "\n")


def _page(answer: LadderAnswer, command: str) -> Iterator[str]:
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
