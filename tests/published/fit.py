"""Fit the constants of the model of time to published measurements.

Each fitted constant has a value from its source and how sure that is; a fit weighs both against the measurements, so
that a constant that no row shows stays where its source has it. A project's rows count less the more there are, and a
row that is far off counts less, too. Deterministic: Gauss and Newton's method on the logarithms, with damping.
Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from recipes.plan.rates import Rates
from recipes.plan.time import time_of
from tests.published.rows import Published

SOURCES = {
    # constant: (value of its source, how far off it may be, as a logarithm); where rates.py names no source, assumed
    "products": (0.73, 0.10),
    "products_500w": (0.60, 0.10),
    "products_ampere": (0.84, 0.05),
    "depth": (150.0, 0.7),
    "triton": (0.20, 0.15),
    "ring": (0.75, 0.15),
    "narrow_heads": (0.95, 0.10),
    "eager": (0.80, 0.15),
    "loss": (40.0, 0.3),
    "link": (0.80, 0.15),
    "network": (0.80, 0.15),
    "node_hop": (8e-6, 0.7),
    "beside": (0.15, 0.5),
    "overlapped": (0.60, 0.2),
}
LIMITS = {"products_ampere": 0.95, "narrow_heads": 1.0, "eager": 1.0, "link": 1.0, "network": 1.0}
"""Limits that no share exceeds."""
ROW = 0.06
"""How far off a row of the same kind is usually, as a logarithm: what the model leaves out, and the measurement."""
ASSUMED = 0.5
"""Weight of a row of trust B."""
FAR = 2.0
"""Residuals beyond so many times what is usual count linearly instead of squared."""
STEPS = 8
DIFFERENCE = 1e-3
DIGITS = 4
"""Digits of the constants, so that those in the source are those that were checked."""


def fit(
    rows: Sequence[Published], start: Rates, *, widths: float = 1.0, row: float = ROW, equal: bool = False
) -> Rates:
    """The constants for these rows.

    Args:
        rows: measurements.
        start: what the constants are by their sources, or by another fit.
        widths: how far they may move, relative to SOURCES.
        row: how far off a row is usually.
        equal: all rows count the same, whatever their project.
    """
    names = list(SOURCES)
    center = np.log([asdict(start)[name] for name in names])
    deviation = widths * np.array([SOURCES[name][1] for name in names])
    limits = np.log([LIMITS.get(name, np.inf) for name in names])
    weights = np.ones(len(rows)) if equal else _weights(rows)
    point = center.copy()
    for _ in range(STEPS):
        residuals = residuals_of(rows, _rates(start, names, point))
        slopes = np.empty((len(rows), len(names)))
        for column in range(len(names)):
            moved = point.copy()
            moved[column] -= DIFFERENCE  # downwards: never over a limit
            slopes[:, column] = (residuals - residuals_of(rows, _rates(start, names, moved))) / DIFFERENCE
        robust = weights * np.minimum(1.0, FAR * row / np.maximum(np.abs(residuals), 1e-12)) / row**2
        left = slopes.T @ (robust[:, None] * slopes) + np.diag(deviation**-2)
        right = slopes.T @ (robust * residuals) + (point - center) / deviation**2
        point = np.minimum(point - np.clip(np.linalg.solve(left, right), -0.3, 0.3), limits)
    fitted = asdict(_rates(start, names, point))
    return replace(start, **{name: float(f"{fitted[name]:.{DIGITS}g}") for name in names})  # type: ignore[arg-type]


def residuals_of(rows: Sequence[Published], rates: Rates) -> np.ndarray:
    """Logarithms of predicted over measured tokens per second."""
    predicted = [time_of(row.work, gpu=row.gpu, rates=rates).tokens_per_second for row in rows]
    return np.log(np.array(predicted) / [row.measured for row in rows])


def _rates(start: Rates, names: Sequence[str], point: np.ndarray) -> Rates:
    return replace(start, **{name: float(value) for name, value in zip(names, np.exp(point), strict=True)})  # type: ignore[arg-type]


def _weights(rows: Sequence[Published]) -> np.ndarray:
    counts = {row.project: sum(other.project == row.project for other in rows) for row in rows}
    return np.array([(ASSUMED if row.trust == "B" else 1.0) / counts[row.project] ** 0.5 for row in rows])
