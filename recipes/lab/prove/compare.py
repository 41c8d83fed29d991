"""Compares trainings of a twin: with the reference within limits, and with each other to the bit."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.config import MeshDegrees
from parallel.dist import World
from recipes.lab.prove.diagnosis import KINDS, Difference, diagnosis
from recipes.lab.prove.reference import Record
from recipes.lab.prove.twin import Twin

Limits = Mapping[str, float]
Key = tuple[int, int, str]
EQUAL: Limits = dict.fromkeys(KINDS, 0.0)
LOSSES = "loss", "z-loss", "loss of a source", "losses of routers", "validation loss", "guard"
# Relative. Measured: 2e-7 of a loss, 4e-7 of a norm, 2e-6 of a gradient, 3e-5 of the way of weights.
FLOAT32: Limits = {**EQUAL, "learning rate": 1e-12, **dict.fromkeys(LOSSES, 2e-6), "gradient norm": 4e-6}
FLOAT32 = {**FLOAT32, "gradient": 2e-5, "weights": 4e-4, "logits": 1e-4}
LATER: Limits = {**dict.fromkeys(LOSSES, 5e-6), "gradient norm": 5e-5}
# Moments between two numbers of bfloat16 are rounded the other way. Measured: 9e-6, 9e-5, 2e-3.
MOMENTS16: Limits = {**dict.fromkeys(LOSSES, 5e-5), "gradient norm": 5e-4, "weights": 1e-2}
# Sums in another order are rounded to other numbers. Some tokens choose other experts.
BFLOAT16: Limits = {**FLOAT32, **dict.fromkeys(LOSSES, 2e-3), "gradient norm": 2e-2, "gradient": 3e-2, "weights": 0.3}
BFLOAT16 = {**BFLOAT16, "losses of routers": 2e-2, "tokens of experts": 0.1}
# Numbers between two of float8 are rounded the other way.
FLOAT8: Limits = {**BFLOAT16, **dict.fromkeys(LOSSES, 5e-3), "gradient norm": 4e-2, "gradient": 6e-2, "weights": 0.5}

CAPS = {**EQUAL, **dict.fromkeys((*LOSSES, "tokens of experts"), 1.0)}
CAPS |= {"gradient": 0.45, "gradient norm": 0.2, "weights": 0.9}
"""What is never allowed: twice a gradient is 1.0 off."""


def limits_of(twin: Twin, away: Mapping[str, Difference], *, on_cpu: bool) -> Limits:
    """How far a twin on a mesh may be from one process in the same precision.

    In float32, differences grow a little after the first step. Rounding enlarges them as it does those of one process
    from float32, of which twice as much is allowed; but what rounds alike does so until the first update. away: kind ->
    the worst difference of one process, in the twin's precision, from float32; empty in float32.
    """
    recipe, first = twin.recipe, FLOAT32
    later = LATER if recipe.optimizer.state_dtype == "float32" else MOMENTS16
    if away:
        twice = {kind: 2 * one.error for kind, one in away.items()}
        twice |= dict.fromkeys(LOSSES, max(twice[kind] for kind in LOSSES if kind in twice))
        fixed = BFLOAT16 if recipe.float8.recipe == "none" else FLOAT8
        later = {kind: max(limit, min(twice.get(kind, 0.0), CAPS[kind])) for kind, limit in fixed.items()}
        first = FLOAT32 if on_cpu and twin.rounds_alike else later
    return {**first, **{f"later {kind}": limit for kind, limit in later.items()}}


@dataclass(frozen=True)
class Comparison:
    """One comparison of a twin, over all processes."""

    what: str
    worst: dict[str, Difference]
    """Of each kind."""
    first: Difference | None = None
    """What differs first; None if all is within its limits."""
    why: str = ""
    """What the numbers point to, or what ended a run."""

    @property
    def is_wrong(self) -> bool:
        return self.first is not None or bool(self.why)


def compared(
    what: str, found: Record, expected: Record, limits: Limits, world: World, degrees: MeshDegrees, *, since: int = 0
) -> Comparison:
    """Compare what each process found with what it expects, from step `since` on. All processes call it together."""
    here = differences(found, expected, limits, since=since)
    moved = expected.state[last := max(expected.state)]
    now, before = found.state.get(last, {}), expected.initial
    still = {name for name in now if since == 0 and torch.equal(now[name], before[name])}
    still = {name for name in still if not torch.equal(moved[name], before[name])}
    lacking = moved.keys() - now.keys() if not found.ended else set[str]()
    gradients = [one for one in here if one.kind == "gradient"]
    ended = f"rank {world.rank}: {found.ended}" if found.ended else ""
    by_itself = str(expected.losses) if expected.repeats else ""
    wrong = min((one for one in here if one.is_wrong), default=None)
    mine = worst_of(here), wrong, gradients, still, lacking, ended, by_itself
    worst, firsts, gradients_of, stills, lackings, ends, references = zip(*world.messages.from_all(mine), strict=True)
    first = min(filter(None, firsts), default=None)
    why = next(filter(None, ends), "")
    if len({*references}) > 1:
        why = why or "processes compute different numbers, each by itself: is a device faulty?"
    if nowhere := sorted(set.intersection(*lackings)):
        why = why or f"no process has {', '.join(nowhere[:3])}"
    if first is not None and not why:
        of_all = {one.name: one for some in gradients_of for one in sorted(some, key=lambda one: one.excess)}
        why = diagnosis(first, [*of_all.values()], sorted(set.union(*stills)), degrees)
    return Comparison(what, worst_of(one for of_one in worst for one in of_one.values()), first, why)


def differences(found: Record, expected: Record, limits: Limits, *, since: int = 0) -> list[Difference]:
    """What two trainings differ in, number by number, as far as both know it, from step `since` on."""
    one, other = _numbers(found), _numbers(expected)
    known = [key for key in one if key in other and (not since or key[0] > since - (key[1] in ALSO))]
    total = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.gradients.values()))
    return [_difference(key, one[key], other[key], _limit(limits, *key), expected, total) for key in known]


def _limit(limits: Limits, step: int, kind: int, _: str) -> float:
    limit = limits[KINDS[kind]]
    return limits.get(f"later {KINDS[kind]}", limit) if step > 1 else limit


ALSO = KINDS.index("weights"), KINDS.index("guard")
"""What is compared of the step that a run resumes from."""


def _numbers(record: Record) -> dict[Key, Tensor]:
    """(step, index in KINDS, name) -> what a training has found."""
    by_step: dict[str, dict[int, Any]] = {
        "initial weights": {0: record.initial},
        "tokens of experts": {1: record.loads},
        "losses of routers": {1: record.router_losses},
        "learning rate": record.rates,
        "skipped": {step: step in record.skipped for step in record.rates},
        "loss": record.losses,
        "z-loss": record.z_losses,
        "loss of a source": record.source_losses,
        "gradient": {1: record.gradients},
        "gradient norm": record.norms,
        "weights": record.state,
        "validation loss": record.validation,
        "guard": record.guard,
    }
    return {
        (step, KINDS.index(kind), str(name)): torch.as_tensor(value, dtype=torch.float64)
        for kind, steps in by_step.items()
        for step, values in steps.items()
        for name, value in (values.items() if isinstance(values, dict) else [("", values)])
    }


def _difference(key: Key, found: Tensor, expected: Tensor, limit: float, record: Record, total: float) -> Difference:
    square = float(expected.square().sum())
    if torch.equal(found, expected) or (found.isnan().all() and expected.isnan().all()):
        return Difference(*key, 0.0, limit, 1.0, square)
    if found.shape != expected.shape:
        return Difference(*key, math.inf, limit, math.nan, square)
    scale, kind = math.sqrt(square), KINDS[key[1]]
    if kind == "weights":  # relative to the way that they have gone
        before = record.initial[key[2]].double()
        found, expected = found - before, expected - before
        scale = max(float(expected.norm()), 1e-6 * scale)
    if kind == "gradient":
        scale = max(scale, 1e-4 * total)  # not to what is no more than rounding
    ratio = float((found * expected).sum() / expected.square().sum()) if expected.any() else math.nan
    return Difference(*key, float((found - expected).norm()) / (scale or 1e-30), limit, ratio, square)


def worst_of(some: Iterable[Difference]) -> dict[str, Difference]:
    """Kind -> the difference that is furthest beyond its limit, or nearest to it."""
    return {one.kind: one for one in sorted(some, key=lambda one: one.excess)}
