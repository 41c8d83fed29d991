"""The verdict of a proof: what was compared over all processes, how far it was off, and what that points to."""

import json
from dataclasses import dataclass
from typing import Any

from parallel.config import MeshDegrees
from parallel.dist import World
from recipes.lab.prove.compare import (
    FLOAT32,
    GRADIENT,
    KINDS,
    LOGITS,
    WEIGHTS,
    Difference,
    Key,
    Limits,
    differences,
    unstepped,
    worst,
)
from recipes.lab.prove.diagnosis import diagnosis
from recipes.lab.prove.reference import Record
from recipes.lab.prove.runs import Watched
from recipes.lab.prove.twin import STEPS, Twin
from recipes.recipe.schema import Recipe

NOT_COMPARED = (
    "kernels of full size",
    "links between nodes under load",
    "your text and tokenizer",
    "what is wrong alike on every mesh (docs/parallelism.md)",
)


@dataclass(frozen=True)
class Comparison:
    """One comparison of a twin, over all processes."""

    what: str
    worst: dict[str, Difference]
    """Of each kind of number."""
    first: Difference | None = None
    """What differs first; None if all is within its limits."""
    why: str = ""
    """What the numbers point to, or what ended the run."""

    @property
    def is_wrong(self) -> bool:
        return self.first is not None or bool(self.why)


def compared(
    what: str,
    run: Watched,
    expected: Record,
    limits: Limits,
    world: World,
    degrees: MeshDegrees,
    *,
    since: int = 0,
    is_reference: bool = False,
) -> Comparison:
    """Compare what each process found with what it expects. The same on all processes, which call it together.

    is_reference: whether each process has computed by itself what is expected.
    """
    here = differences(run.record, expected, limits, since=since)
    gradients = [one for one in here if KINDS[one.key.kind] == GRADIENT]
    wrong = [one for one in here if one.is_wrong]
    left = sorted(unstepped(run.record, expected)) if since == 0 and not run.ended else []
    ended = f"rank {world.rank}: {run.ended}" if run.ended else ""
    lacking = expected.initial.keys() - run.record.initial.keys() if since == 0 else set[str]()
    every = world.messages.from_all(
        (worst(here), wrong[:1], gradients, left, ended, lacking, str(expected.losses) if is_reference else "")
    )
    merged = worst(one for found, *_ in every for one in found.values())
    first = min((one for _, some, *_ in every for one in some), default=None)
    of_all = list(
        {one.key: one for _, _, some, *_ in every for one in sorted(some, key=lambda one: one.excess)}.values()
    )
    why = next((text for *_, text, _, _ in every if text), "")
    nowhere = set.intersection(*({*names} for *_, names, _ in every))
    if nowhere:
        why = why or f"no process has {', '.join(sorted(nowhere)[:3])}"
    if len({losses for *_, losses in every}) > 1:
        why = why or "the same numbers, computed by each process for itself, differ between processes: a faulty device?"
    if first is not None and not why:
        names = sorted({name for _, _, _, names, *_ in every for name in names})
        if KINDS[first.key.kind] == WEIGHTS and names:
            why = f"no step changes {', '.join(names[:3])}: does the optimizer have it?"
        else:
            bad = [one for one in of_all if one.is_wrong]
            why = diagnosis(first, bad, [one for one in of_all if not one.is_wrong], degrees)
    return Comparison(what, merged, first, why)


def alike(what: str, error: float) -> Comparison:
    """A comparison of logits that one process has made."""
    logits = Difference(Key(STEPS, KINDS.index(LOGITS), ""), error, FLOAT32[LOGITS], 1.0, 1.0)
    return Comparison(what, {LOGITS: logits}, logits if logits.is_wrong else None)


@dataclass(frozen=True)
class Verdict:
    """What a proof has found."""

    recipe: Recipe
    processes: int
    twins: tuple[Twin, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def is_proved(self) -> bool:
        return not any(comparison.is_wrong for comparison in self.comparisons)

    @property
    def not_compared(self) -> list[str]:
        """What the proof says nothing about."""
        changed = [line for twin in self.twins for line in twin.changed]
        return list(dict.fromkeys([*changed, *NOT_COMPARED]))

    def text(self, seconds: float) -> str:
        """One screen for people."""
        lines = []
        for twin in self.twins:
            lines.append(f"twin of {self.recipe.run.name} on {self.processes} processes ({twin.degrees}): {twin.about}")
        for comparison in self.comparisons:
            lines.append(comparison.what)
            for kind, one in sorted(comparison.worst.items(), key=lambda item: KINDS.index(item[0])):
                limit = f"limit {one.limit:.0e}" if one.limit else "to the bit"
                worst_of = f"{one.key}" if one.error else ""
                lines.append(f"  {kind:<18} {one.error:8.1e}  {limit:<12} {worst_of}".rstrip())
        lines.append(f"not compared: {'; '.join(self.not_compared)}")
        return "\n".join([*lines, self.line(seconds)])

    def line(self, seconds: float) -> str:
        """The verdict alone."""
        if self.is_proved:
            return f"PROVED in {seconds:.0f} s: {self.processes} processes compute what one process computes"
        last = self.comparisons[-1]
        what = (
            ""
            if last.first is None
            else f"{last.first.key} is {last.first.error:.1e} off (limit {last.first.limit:.0e})"
        )
        return f"WRONG after {seconds:.0f} s, {last.what}: {'; '.join(filter(None, [what, last.why]))}"

    def json(self, seconds: float) -> str:
        """The same for programs."""
        return json.dumps(
            {
                "verdict": "proved" if self.is_proved else "wrong",
                "seconds": round(seconds, 1),
                "processes": self.processes,
                "line": self.line(seconds),
                "meshes": [str(twin.degrees) for twin in self.twins],
                "comparisons": [_row(comparison) for comparison in self.comparisons],
                "not_compared": self.not_compared,
            }
        )


def _row(comparison: Comparison) -> dict[str, Any]:
    kinds = {
        kind: {"worst": one.error, "limit": one.limit, "of": str(one.key)} for kind, one in comparison.worst.items()
    }
    first = None if comparison.first is None else str(comparison.first.key)
    return {"what": comparison.what, "worst": kinds, "first": first, "diagnosis": comparison.why}
