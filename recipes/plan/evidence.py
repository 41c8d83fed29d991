"""How far a predicted time may be off: as far as published runs of its kind were, whose project the fit left out.

`python -m tests.published.errors --write` writes the numbers. Imports no torch.
"""

from functools import lru_cache
from itertools import combinations

from recipes.plan.hardware import Gpu
from recipes.plan.rates import Rates
from recipes.plan.work import Work

BOTH = {"experts and float8": {"experts", "float8"}, "pipeline and float8": {"pipeline", "float8"}}
"""Kinds that have two of the traits, whose errors add up."""
KINDS = (*BOTH, "experts", "B200", "pipeline", "H200", "context", "float8", "tensor", "A100", "H100")
"""Each step is of the first kind that describes it, and so is each row."""
FEW = 1.5
"""Power of the largest factor where rows are too few for their nine tenths, or none is like the step. Assumed."""
# ROWS: kind -> its rows, and how far nine in ten were off, as a share. TOGETHER: trait -> later ones in the same row.
# Written by python -m tests.published.errors --write.
ROWS: dict[str, tuple[int, float]] = {
    "experts and float8": (4, 2.41),
    "pipeline and float8": (20, 0.2),
    "experts": (4, 0.74),
    "B200": (1, 0.26),
    "pipeline": (3, 0.26),
    "H200": (10, 0.2),
    "context": (7, 0.53),
    "float8": (24, 0.47),
    "tensor": (10, 0.17),
    "A100": (91, 0.17),
    "H100": (44, 0.17),
}
TOGETHER: dict[str, str] = {
    "A100": "",
    "B200": "experts float8 pipeline",
    "H100": "context experts float8 pipeline tensor",
    "H200": "tensor",
    "context": "float8 pipeline tensor",
    "experts": "float8 pipeline tensor",
    "float8": "pipeline tensor",
    "pipeline": "tensor",
    "tensor": "",
}
# End.


def traits_of(work: Work, gpu: Gpu) -> tuple[str, ...]:
    """What makes times of this step hard to predict, in order; the GPU is among them."""
    has = {
        gpu.name.partition("-")[0]: True,  # A100-40, H100-500W
        "Muon": work.newton_schulz > 0,
        "context": work.context > 1,
        "experts": work.experts is not None,
        "float8": work.float8 != "none",
        "pipeline": work.pipeline > 1,
        "tensor": work.tensor > 1,
    }
    return tuple(sorted(name for name, true in has.items() if true))


def kind_of(traits: tuple[str, ...]) -> str:
    """The first of KINDS that describes a step with these traits."""
    return next(kind for kind in (*KINDS, *traits) if BOTH.get(kind, {kind}) <= {*traits})


def range_of(work: Work, gpu: Gpu, rates: Rates) -> tuple[float, str]:
    """How far the step may be off, as a share of it, and from what that is known."""
    return _by_rows(traits_of(work, gpu)) if rates.spread is None else (rates.spread, "calibrated")


@lru_cache(256)
def _by_rows(traits: tuple[str, ...]) -> tuple[float, str]:
    missing = [trait for trait in traits if trait not in TOGETHER]
    missing += [f"{one} with {two}" for one, two in combinations(traits, 2) if two not in TOGETHER.get(one, "").split()]
    if missing:
        kinds = {kind_of(traits), *(kind_of((trait,)) for trait in traits)}
        widest = max((ROWS[kind][1] for kind in kinds if kind in ROWS), default=1.0)
        return round((1 + widest) ** FEW - 1, 2), f"a guess: no published row has {missing[0]}"
    rows, spread = ROWS[kind_of(traits)]
    return spread, f"{rows} published row{'s' if rows > 1 else ''}: {kind_of(traits)}"
