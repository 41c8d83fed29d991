"""What a ladder of small runs says of the loss of another run: scripts/ladder.py writes it, runs and plans read it.

L(N, D) = E + A / N^a + B / D^b (Hoffmann et al. 2022, arXiv 2203.15556, approach 3). L: the mean loss over tokens of
the validation text, nats; N: ModelConfig.non_embedding_params(); D: tokens. Imports no torch.
"""

from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy
from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from numpy.typing import NDArray
from pydantic import FiniteFloat, TypeAdapter, ValidationError

from parallel.errors import UserError
from recipes.files.reading import read_text

Positive = Annotated[FiniteFloat, Gt(0)]
Count = Annotated[int, Gt(0), Le(10**18)]
LARGEST = 50_000_000
"""Bytes of a ladder.json; one of 1,000 losses has 200,000."""


class Law(NamedTuple):
    """The constants of a law."""

    E: Positive
    A: Positive
    a: Positive
    B: Positive
    b: Positive


class Prediction(NamedTuple):
    """A loss with its 95% interval."""

    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """A law, and how uncertain it is."""

    law: Law
    samples: Annotated[tuple[Law, ...], MinLen(1), MaxLen(1000)]
    """Laws of resampled runs (bootstrap)."""
    residuals: Annotated[tuple[FiniteFloat, ...], MinLen(1), MaxLen(10_000)]
    """log(loss / law) of every run: the noise of one, by its seed for example."""
    misfit: Annotated[FiniteFloat, Ge(0)] = 0.0
    """What the law lacks: 95% of the errors, in the logarithm, of laws fitted to the smaller runs, at those they did
    not see, per (1 + reach). 0: too few runs to hold some out, or written before it was measured."""
    compute: Annotated[FiniteFloat, Gt(0)] = 1.0
    """The largest N * D: the reach of a run is log(N * D / compute)."""

    def predict(self, parameters: float, tokens: float) -> Prediction:
        """The loss that one run of this size and length will have."""
        loss, *drawn = losses([self.law, *self.samples], parameters, tokens)
        noisy = numpy.add.outer(numpy.log(drawn), self.residuals)
        beyond = self.misfit * (1 + max(0.0, numpy.log(parameters) + numpy.log(tokens) - numpy.log(self.compute)))
        below, above = numpy.hypot(numpy.quantile(noisy, [0.025, 0.975]) - numpy.log(loss), beyond)
        return Prediction(float(loss), float(loss * numpy.exp(-below)), float(loss * numpy.exp(above)))


@dataclass(frozen=True)
class Ladder:
    """The contents of ladder.json."""

    recipe: str
    """The file that the small runs were scaled from."""
    conditions: dict[str, Any]
    """Dotted key -> value, as in TOML, of what losses depend on besides N and D: text, tokenizer, vocabulary."""
    fits: Annotated[tuple[tuple[float, Fit], ...], MinLen(1)]
    """(share of the steps of a run, the fit of the losses there), ascending; the last one is the end, 1.0."""
    parameters: Count
    """N of the largest rung."""
    tokens: Count
    """D of the longest run."""

    def predict(self, parameters: float, tokens: float, *, share: float = 1.0) -> Prediction | None:
        """The loss after this share of the steps of a run of D tokens in all; None before the first fit."""
        shares = [one for one, _ in self.fits]
        if share < shares[0]:
            return None
        predicted = numpy.array([fit.predict(parameters, tokens) for _, fit in self.fits])
        return Prediction(*(float(numpy.interp(share, shares, column)) for column in predicted.T))


def losses(laws: list[Law], parameters: Any, tokens: Any) -> NDArray[numpy.float64]:
    """L of each law at N and D, nats."""
    E, A, a, B, b = numpy.array(laws).T
    return cast(NDArray[numpy.float64], E + A * float(parameters) ** -a + B * float(tokens) ** -b)


def read_ladder(path: Path) -> Ladder:
    """Raises UserError if this is not a file of scripts/ladder.py."""
    try:
        ladder: Ladder = TypeAdapter(Ladder).validate_json(read_text(path, most=LARGEST))
        if [*map(itemgetter(0), ladder.fits)] != sorted({share for share, _ in ladder.fits} | {1.0}):
            raise UserError(f"{path} has no fits of ascending shares up to 1; write it anew with scripts/ladder.py")
        return ladder
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"])) or "all of it"
        why = f"{place}: {error.errors()[0]['msg']}"
        raise UserError(f"{path} is not a ladder.json of scripts/ladder.py ({why})") from None
