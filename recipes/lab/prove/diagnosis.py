"""What the numbers of a wrong twin point to. Imports no torch."""

from collections.abc import Collection, Sequence
from itertools import combinations

from parallel.axes import NAMES
from parallel.config import MeshDegrees
from recipes.lab.prove.compare import GRADIENT, KINDS, LOSS, NORM, Difference

NEAR = 1e-3


def diagnosis(
    first: Difference, wrong: Sequence[Difference], right: Collection[Difference], degrees: MeshDegrees
) -> str:
    """One sentence, or "" where the numbers say nothing.

    Args:
        first: what differs first.
        wrong, right: all gradients of the first step that differ, and those that do not.
        degrees: of the mesh.
    """
    kind = KINDS[first.key.kind]
    if kind == GRADIENT:
        return _of_gradients(wrong, right, degrees)
    if kind == NORM and first.key.step == 1:
        return _of_norm(first, right)
    if factor := _factor(first.ratio, degrees):
        return factor
    if kind == LOSS and first.key.step > 1:
        return "the step before has other weights, or this one other data"
    return ""


def _of_gradients(wrong: Sequence[Difference], right: Collection[Difference], degrees: MeshDegrees) -> str:
    names = _named([one.key.name for one in wrong])
    who = "every gradient" if not right else f"{len(wrong)} of {len(wrong) + len(right)} gradients ({names})"
    ratios = sorted(one.ratio for one in wrong)
    middle = ratios[len(ratios) // 2]
    alike = (
        all(abs(one.ratio / middle - 1) < NEAR and one.error < abs(middle - 1) * 1.01 for one in wrong)
        if middle
        else False
    )
    if all(abs(ratio) < NEAR for ratio in ratios):
        return f"{who}: zero"
    if alike and (factor := _factor(middle, degrees)):
        return f"{who}: {factor}"
    return f"{who}: in another direction, though the loss is right: look at the backward pass"


def _factor(ratio: float, degrees: MeshDegrees) -> str:
    """What a number that is this multiple of one process's points to."""
    for count in (1, 2, 3):
        for axes in combinations(degrees.wide(NAMES), count):
            size = degrees.size(axes)
            for power, words in ((1, "summed"), (-1, "averaged, or not summed,")):
                if abs(ratio / size**power - 1) < NEAR:
                    shown = f"{size}" if power == 1 else f"1/{size}"
                    return f"{shown} times that of one process: {words} once too often over {' x '.join(axes)}?"
    if abs(ratio - 1) > 10 * NEAR and abs(ratio - round(ratio)) < NEAR and round(ratio) > 1:
        return f"{round(ratio)} times that of one process"
    return ""


def _of_norm(first: Difference, gradients: Collection[Difference]) -> str:
    """Which group of parameters a norm lacks, or counts twice, though all gradients are right."""
    total = sum(one.square for one in gradients)
    excess = (first.ratio**2 - 1) * total
    groups: dict[str, float] = {}
    for one in gradients:
        for group in {one.key.name, one.key.name.rpartition(".")[0].rpartition(".")[2], _stack(one.key.name)}:
            groups[group] = groups.get(group, 0.0) + one.square
    for group, square in sorted(groups.items(), key=lambda item: -item[1]):
        if square > 1e-6 * total and abs(abs(excess) / square - 1) < 0.02:
            return f"though all gradients are right: it {'lacks' if excess < 0 else 'counts twice'} {group}"
    return "though all gradients are right: a sum over processes lacks a group, or has one twice"


def _stack(name: str) -> str:
    return "the blocks" if name.startswith("blocks.") else name.partition(".")[0]


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
