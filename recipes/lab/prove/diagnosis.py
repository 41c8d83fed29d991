"""Differences of a twin from what it should be, and what they point to. Imports no torch."""

from collections.abc import Sequence
from itertools import combinations
from math import inf, isfinite, isnan
from typing import NamedTuple

from parallel.axes import NAMES
from parallel.config import MeshDegrees

KINDS = (
    *("initial weights", "tokens of experts", "losses of routers", "learning rate", "skipped", "loss", "z-loss"),
    *("loss of a source", "gradient", "gradient norm", "weights", "validation loss", "guard", "logits"),
)
"""What is compared, in the order in which one follows from the others."""
NEAR = 1e-3


class Difference(NamedTuple):
    """How far one number or tensor of a process is from the expected one. They sort as one follows from another."""

    step: int
    order: int
    """Index in KINDS."""
    name: str
    """Of a parameter or layer, or "" for what there is one of."""
    error: float
    limit: float
    """0.0: equal to the bit."""
    ratio: float
    """The found one is most nearly this multiple of the expected one."""
    square: float
    """The expected sum of squares."""

    @property
    def kind(self) -> str:
        return KINDS[self.order]

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.limit

    @property
    def finite(self) -> float | None:
        """The error, as JSON can have it."""
        return self.error if isfinite(self.error) else None

    @property
    def excess(self) -> float:
        return inf if isnan(self.error) else self.error / (self.limit or 1e-30)

    def __str__(self) -> str:
        return f"{self.kind}{f' of {self.name}' if self.name else ''}{f', step {self.step}' if self.step else ''}"


def diagnosis(first: Difference, gradients: Sequence[Difference], still: Sequence[str], degrees: MeshDegrees) -> str:
    """A sentence, or "" where the numbers say nothing. first: what differs first. gradients: all of the first step, if
    it was compared. still: parameters that no step has changed, though they should have moved."""
    wrong = [one for one in gradients if one.is_wrong]
    if first.kind == "gradient":
        ratios, names = [one.ratio for one in wrong], ", ".join(one.name for one in wrong[:3])
        who = f"{len(wrong)} of {len(gradients)} gradients ({names}{', ...' if len(wrong) > 3 else ''})"
        if max(ratios) - min(ratios) < NEAR and (factor := _factor(ratios[0], degrees)):
            return f"{who} are {factor}"
        if all(abs(ratio - 1) < NEAR for ratio in ratios):
            return f"{who} differ as if they had been rounded, or added up, in fewer bits"
        return f"{who} have another direction, though the loss is right: look at the backward pass"
    if first.kind == "gradient norm" and gradients and first.step == 1:
        return f"though all gradients are right: {_group(first, gradients)}"
    if first.kind == "weights" and still:
        return f"no step changes {', '.join(still[:3])}: does the optimizer have it?"
    if first.kind == "skipped":
        return "all processes must skip a step that is NaN, infinite or a spike on any of them, and no other step"
    if factor := _factor(first.ratio, degrees):
        return f"it is {factor}"
    return ""


def _factor(ratio: float, degrees: MeshDegrees) -> str:
    """What a number that is this multiple of one process's points to."""
    if not isfinite(ratio):
        return ""
    if abs(ratio) < NEAR:
        return "zero"
    for count in range(1, len(NAMES)):
        for axes in combinations(degrees.wide((*NAMES, "expert")), count):
            size = degrees.size(axes)
            for times, words in ((size, "summed once too often"), (1 / size, "averaged, or not summed,")):
                if abs(ratio / times - 1) < NEAR:
                    return f"{times:g} times what one process has: {words} over {' x '.join(axes)}?"
    whole = round(ratio) if ratio > 1 else 1 / round(1 / ratio) if 0 < ratio < 0.9 else 1
    return f"{whole:g} times what one process has" if whole != 1 and abs(ratio / whole - 1) < NEAR else ""


def _group(norm: Difference, gradients: Sequence[Difference]) -> str:
    """Which parameters a norm lacks, or counts twice."""
    total = sum(one.square for one in gradients)
    groups: dict[str, float] = {}
    for one in gradients:
        for group in {one.name, one.name.rpartition(".")[0].rpartition(".")[2], one.name.partition(".")[0]}:
            groups[group] = groups.get(group, 0.0) + one.square
    excess = (norm.ratio**2 - 1) * total
    for group, square in sorted(groups.items(), key=lambda item: -item[1]):
        if square and abs(abs(excess) / square - 1) < 10 * NEAR:
            return f"the norm {'lacks' if excess < 0 else 'counts twice'} {group}"
    return "a sum over processes lacks some, or counts some twice"
