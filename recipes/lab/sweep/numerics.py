"""Compare float8 rows with the reference on the same batches, and apply the pass rule. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from parallel.errors import some
from recipes.files.markdown import markdown_table
from recipes.lab.sweep.grid import Row, Sweep
from recipes.lab.sweep.results import (
    LEAST_STEPS,
    Result,
    last_quarter,
    loss_gaps,
    reference_row,
    reference_title,
    row_title,
)

LARGEST_LOSS_GAP = 0.005
"""Largest gap of the mean loss over the last quarter of the logged steps, as a share of the reference's. DeepSeek-V3
(arXiv 2412.19437, section 3.3) reports float8 within 0.25% of bf16; runs of a few hundred steps are noisier."""
LARGEST_NOISE = 0.05
"""A bf16 row that rounds elsewhere is not a yardstick if it is further from the reference than this."""
NORM_RATIO = (0.9, 1.1)
"""Range of the median, over the logged steps, of the gradient norm divided by the reference's."""
HOW_TO_READ = "docs/benchmarks/README.md says when a row passes."
YARDSTICK = "yardstick"


@dataclass(frozen=True)
class Comparison:
    """A row against the reference. None: unknown, because numbers are missing or not finite."""

    label: str
    loss_gap: float | None
    """Mean over the last quarter of the logged steps, as a share of the reference's mean loss."""
    largest_loss_gap: tuple[int, float] | None
    """(step, loss minus the reference's) where the difference is largest in magnitude."""
    norm_ratio: float | None
    """Median of the gradient norm's ratio to the reference's."""
    limit: float | None
    """The largest magnitude of loss_gap that passes; None for a yardstick."""
    verdict: str
    """The verdict: "pass", or what failed."""


def compare(sweep: Sweep, results: dict[str, Result]) -> list[Comparison]:
    """Every finished row on the reference's batches except the reference; empty if none of them uses float8."""
    gaps = loss_gaps(sweep, results)
    bases = {row.label: reference_row(sweep, results, seed=row.recipe.run.seed) for row in sweep.rows}
    rows = [row for row in sweep.rows if row.label in gaps and row != bases[row.label]]
    if all(row.recipe.float8.recipe == "none" for row in rows):
        return []
    limit = LARGEST_LOSS_GAP
    compared = {}
    # Yardsticks first: they set the limit of the others.
    for row in sorted(rows, key=lambda row: row.recipe.float8.recipe != "none"):
        base = bases[row.label]
        assert base is not None  # otherwise the row has no gap
        compared[row.label] = comparison = _compared(
            results[base.label], results[row.label], gaps[row.label], row, limit=limit
        )
        if comparison.verdict == YARDSTICK and comparison.loss_gap is not None:
            limit = max(limit, abs(comparison.loss_gap))
    return [compared[row.label] for row in rows]


def _compared(base: Result, result: Result, gap: Sequence[tuple[int, float]], row: Row, *, limit: float) -> Comparison:
    expected = {step: loss for step, _, loss in base["curve"]}
    last = last_quarter(gap)
    loss_gap = fmean(loss for _, loss in last) / fmean(expected[step] for step, _ in last) if last else None
    norms = dict(base.get("grad_norms", []))
    norms_here = result.get("grad_norms", [])
    ratios = [norm / norms[step] for step, norm in norms_here if norm is not None and norms.get(step)]
    ratio = median(ratios) if ratios else None
    float8 = row.recipe.float8.recipe != "none"
    short = float8 and row.recipe.run.steps < LEAST_STEPS
    wrong = {
        **_skipped(base, "the reference skipped"),
        **_skipped(result, "skipped"),
        "not finite": None in [loss for _, _, loss in result["curve"]] + [norm for _, norm in norms_here],
        "loss": not short and (loss_gap is None or abs(loss_gap) > (limit if float8 else LARGEST_NOISE)),
        "gradient norm": not short and (ratio is None or not NORM_RATIO[0] <= ratio <= NORM_RATIO[1]),
    }
    failures = ", ".join(name for name, failed in wrong.items() if failed)
    if float8:
        verdict = f"FAIL: {failures}" if failures else "too short to judge" if short else "pass"
    else:
        verdict = f"no {YARDSTICK}: {failures}" if failures else YARDSTICK
    return Comparison(
        label=row_title(row),
        loss_gap=loss_gap,
        largest_loss_gap=max(gap, key=lambda point: abs(point[1]), default=None),
        norm_ratio=ratio,
        limit=limit if float8 else None,
        verdict=verdict,
    )


def _skipped(result: Result, prefix: str) -> dict[str, bool]:
    """{message: True} for a run that skipped steps; empty for others."""
    steps = result.get("skipped_steps", [])
    words = f"{prefix} {'steps' if len(steps) > 1 else 'step'} {some(steps)}"
    return {words: True} if steps else {}


def numerics_table(sweep: Sweep, results: dict[str, Result]) -> str:
    """The "Numerics" section of the sweep's page, with the rule; empty if there is nothing to compare."""
    comparisons = compare(sweep, results)
    if not comparisons:
        return ""
    columns = ("loss gap, %", "limit, %", "largest gap", "gradient-norm ratio", "verdict")
    rows = [(row.label, *_cells(row)) for row in comparisons]
    lines = markdown_table((f"against {reference_title(sweep, results)}", *columns), rows, align="lrrrrl")
    return "\n".join(["## Numerics", "", *lines, "", HOW_TO_READ, ""])


def _cells(row: Comparison) -> list[str]:
    step, gap = row.largest_loss_gap or (0, None)
    return [
        "not finite" if row.loss_gap is None else f"{100 * row.loss_gap:+.3f}",
        "none" if row.limit is None else f"{100 * row.limit:.3f}",
        "not finite" if gap is None else f"{gap:+.4f} at step {step}",
        "unknown" if row.norm_ratio is None else f"{row.norm_ratio:.3f}",
        row.verdict,
    ]
