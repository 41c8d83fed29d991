"""What a ladder says of the run that it was made for, on one screen. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from models.config import ModelConfig
from recipes.lab.curves.style import short
from recipes.lab.ladder.fit import BestRates, EndedRun, compute_optimal
from recipes.lab.ladder.rungs import scaled
from recipes.metrics.ladder import Fit, Ladder, Prediction

CAUTION = "caution         the law has no floor, or an exponent at its bound: these runs do not determine it"
LAST_ONLY = "while training  validation.ladder compares the last loss only: before the end, these losses have no law"


@dataclass(frozen=True)
class LadderAnswer:
    """What the runs of a ladder found, and the run that they are asked about."""

    model: ModelConfig
    tokens: int
    sequence_length: int
    learning_rate: float
    ladder: Ladder
    points: Sequence[EndedRun]
    rates: BestRates | None
    """The best learning rate by size; None if the runs do not tell."""
    missed: Sequence[tuple[EndedRun, Prediction]]
    """The runs of the largest rung, and what a fit without them predicts."""
    failed: Mapping[str, str]
    """Name of a run -> why it failed."""
    unchecked: str = ""
    """Why `missed` is empty, if it is."""

    @property
    def fit(self) -> Fit:
        """The fit of the losses at the end."""
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
    points, fit, rungs = answer.points, answer.fit, sorted({point.parameters for point in answer.points})
    span = f"{short(rungs[0])} to {short(rungs[-1])} parameters (embeddings are not counted)"
    seeds = len({point.seed for point in points})
    text = [f"{len(points)} losses on {len(rungs)} rungs (seeds: {seeds}), of {span}", ""]
    text += [f"{'':<16}{'parameters':>10}{'tokens':>10}{'loss':>9}   95% interval"]
    for name, factor in {"this recipe": 1, "half as large": 0.5, "twice as large": 2}.items():
        size_here, tokens, seen = at_equal_flops(fit, answer.model, answer.flops, answer.sequence_length, factor)
        numbers = f"{short(size_here):>10}{short(tokens):>10}{seen.loss:>9.3f}   {seen.low:.3f} to {seen.high:.3f}"
        text += [f"{name:<16}{numbers}{'' if factor == 1 else ', at equal FLOPs'}"]
    best = compute_optimal(fit.law, answer.tokens)
    low, high = interval([compute_optimal(law, answer.tokens) for law in fit.samples])
    each = f"for {short(answer.tokens)} tokens, {answer.tokens / best:.2g} tokens per parameter"
    size = f"{short(best)} parameters ({short(low)} to {short(high)}) {each}"
    if not rungs[0] / 10 < best < 1000 * rungs[-1]:
        size = f"far {'below' if best < rungs[0] else 'above'} all rungs, where the law says little"
    sizes = answer.model.non_embedding_params() / answer.ladder.parameters
    lengths, flops = answer.tokens / answer.ladder.tokens, answer.flops / max(point.flops for point in points)
    rest = f" (and {len(answer.failed) - 1} more: ladder.md)" if len(answer.failed) > 1 else ""
    return [
        *text,
        "",
        f"best size       {size}",
        f"learning rate   {_rates(answer)}",
        f"reach           {_times(sizes)} the parameters of the largest rung, {_times(lengths)} the tokens of the"
        f" longest run, {_times(flops)} the FLOPs",
        f"check           {_check(answer)}",
        *([] if (law := fit.law).E > 0.01 and 0.011 < min(law.a, law.b) < max(law.a, law.b) < 2.9 else [CAUTION]),
        *([LAST_ONLY] if len(answer.ladder.fits) == 1 else []),
        *[f"failed          {name}: {why}{rest}" for name, why in answer.failed.items()][:1],
    ]


def _rates(answer: LadderAnswer) -> str:
    """The recipe's learning rate, and the one that the small runs suggest."""
    in_recipe = f"{short(answer.learning_rate)} in the recipe"
    if (rates := answer.rates) is None:
        return f"{in_recipe}; the small runs do not tell whether another is better"
    best = rates.coefficient * answer.model.non_embedding_params() ** rates.exponent
    doubt = f"; at {', '.join(map(short, rates.edges))} parameters, the best may lie beyond those tried"
    return f"{in_recipe}; the small runs suggest {short(best)}{doubt if rates.edges else ''}"


def _check(answer: LadderAnswer) -> str:
    """How far a law of the other rungs misses the largest one."""
    if not answer.missed:
        return f"none: {answer.unchecked}"
    gaps = [100 * (point.loss / predicted.loss - 1) for point, predicted in answer.missed]
    inside = sum(predicted.low <= point.loss <= predicted.high for point, predicted in answer.missed)
    rung, span = answer.missed[0][0].rung, f"{min(gaps):+.1f} to {max(gaps):+.1f}%"
    return f"a fit without the rung of {rung} misses it by {span}; {inside} of its {len(gaps)} runs are in the interval"


def _times(factor: float) -> str:
    return f"{factor:,.0f}x" if factor >= 10 else f"{factor:.2g}x"


def interval(values: Sequence[float]) -> tuple[float, float]:
    low, high = numpy.quantile(values, [0.025, 0.975])
    return float(low), float(high)
