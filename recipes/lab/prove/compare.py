"""Compares trainings of a twin: with the reference within limits, and with each other to the bit."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from recipes.lab.prove.reference import Record
from recipes.lab.prove.twin import STEPS, Twin

INITIAL, TOKENS, ROUTERS, RATE, SKIPPED, LOSS, Z_LOSS, GRADIENT, NORM, WEIGHTS, VALIDATION, GUARD, LOGITS = KINDS = (
    *("initial weights", "tokens of experts", "losses of routers", "learning rate", "skipped", "loss", "z-loss"),
    *("gradients", "gradient norm", "weights", "validation loss", "what judges losses", "logits"),
)
"""What is compared, in the order in which one follows from the others."""
EQUAL = dict.fromkeys(KINDS, 0.0)
# Relative. Measured on 60 recipes: 2e-7 of a loss, 4e-7 of a norm, 2e-6 of a gradient, 3e-5 of weights' way.
FLOAT32 = EQUAL | {ROUTERS: 2e-6, RATE: 1e-12, LOSS: 2e-6, Z_LOSS: 4e-6, VALIDATION: 2e-6, GUARD: 2e-6}
FLOAT32 |= {GRADIENT: 2e-5, NORM: 4e-6, WEIGHTS: 4e-4, LOGITS: 1e-4}
# Sums in another order are rounded to other numbers. Measured: 6e-4, 9e-3, 9e-3. Some tokens choose other experts.
BFLOAT16 = FLOAT32 | {TOKENS: 0.1, ROUTERS: 2e-2, LOSS: 2e-3, Z_LOSS: 4e-3, VALIDATION: 2e-3, GUARD: 2e-3}
BFLOAT16 |= {GRADIENT: 3e-2, NORM: 2e-2, WEIGHTS: 0.3}
# Numbers between two of float8 are rounded the other way. Measured: 2e-3, 1e-2, 3e-2.
FLOAT8 = BFLOAT16 | {LOSS: 5e-3, VALIDATION: 5e-3, GUARD: 5e-3, GRADIENT: 6e-2, NORM: 4e-2, WEIGHTS: 0.5}
Limits = Mapping[str, float]


def limits_of(twin: Twin) -> Limits:
    """How far a twin on a mesh may be from one process."""
    if twin.recipe.float8.recipe != "none":
        return FLOAT8
    return BFLOAT16 if twin.rounds else FLOAT32


class Key(NamedTuple):
    """A number, or tensor, of a training. They sort as they follow from each other."""

    step: int
    kind: int
    """Index in KINDS."""
    name: str

    def __str__(self) -> str:
        words = f"{KINDS[self.kind]} of {self.name}" if self.name else KINDS[self.kind]
        return words if KINDS[self.kind] == INITIAL else f"{words} in step {self.step}"


class Difference(NamedTuple):
    """Of one number, or tensor, on one process."""

    key: Key
    error: float
    limit: float
    """0.0: equal to the bit."""
    ratio: float
    """What the found one is a multiple of the expected one by, most nearly."""
    square: float
    """Of a gradient, its expected share of the squared norm."""

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.limit

    @property
    def excess(self) -> float:
        return math.inf if math.isnan(self.error) else self.error / self.limit if self.limit else self.error


def numbers_of(record: Record) -> dict[Key, Tensor]:
    """All that a training has found."""

    def of(kind: str, step: int, values: Mapping[object, object]) -> Iterator[tuple[Key, Tensor]]:
        for name, value in values.items():
            yield Key(step, KINDS.index(kind), str(name)), torch.as_tensor(value, dtype=torch.float64)

    found = dict(of(INITIAL, 0, record.initial)) | dict(of(GRADIENT, 1, record.gradients))
    found |= dict(of(TOKENS, 1, record.loads)) | dict(of(ROUTERS, 1, record.router_losses))
    by_step = {
        RATE: record.rates,
        LOSS: record.losses,
        NORM: record.norms,
        VALIDATION: record.validation,
        GUARD: record.guard,
    }
    by_step |= {Z_LOSS: record.z_losses, SKIPPED: {step: step in record.skipped for step in record.rates}}
    for kind, values in by_step.items():
        for step, value in values.items():
            found |= dict(of(kind, step, {"": value}))
    for step, state in record.state.items():
        found |= dict(of(WEIGHTS, step, state))
    return found


def differences(found: Record, expected: Record, limits: Limits, *, since: int = 0) -> list[Difference]:
    """What two trainings differ in, number by number, as far as both know it. since: leave out what comes before."""
    one, other = numbers_of(found), numbers_of(expected)
    total = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.gradients.values()))
    return [
        _difference(key, one[key], other[key], limits[KINDS[key.kind]], expected, total)
        for key in sorted(one.keys() & other.keys())
        if key.step > since or (key.step == since and (since == 0 or KINDS[key.kind] in (WEIGHTS, GUARD)))
    ]


def _difference(key: Key, found: Tensor, expected: Tensor, limit: float, record: Record, total: float) -> Difference:
    kind, square = KINDS[key.kind], float(expected.square().sum())
    if torch.equal(found, expected) or (found.isnan().all() and expected.isnan().all()):
        return Difference(key, 0.0, limit, 1.0, square)
    scale = math.sqrt(square)
    if kind == WEIGHTS and key.name in record.initial:
        moved = expected - record.initial[key.name].double()
        scale = max(float(moved.norm()), 1e-6 * scale)
        found, expected = found - record.initial[key.name].double(), moved
    if kind == GRADIENT:
        scale = max(scale, 1e-4 * total)  # what is no more than rounding
    error = float((found - expected).norm()) / scale if scale else math.inf
    ratio = float((found * expected).sum() / expected.square().sum()) if expected.any() else math.nan
    return Difference(key, error, limit, ratio, square)


def worst(some: Iterable[Difference]) -> dict[str, Difference]:
    """Kind -> the difference that is furthest beyond its limit, or nearest to it."""
    found: dict[str, Difference] = {}
    for one in some:
        kind = KINDS[one.key.kind]
        if kind not in found or one.excess > found[kind].excess:
            found[kind] = one
    return found


def unstepped(record: Record, expected: Record) -> set[str]:
    """The parameters that no step has changed, though the reference has moved them."""
    now, then, moved = record.state[STEPS], expected.initial, expected.state[STEPS]
    return {name for name in now if torch.equal(now[name], then[name]) and not torch.equal(moved[name], then[name])}
