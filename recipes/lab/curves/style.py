"""How our pictures look. Imports no torch."""

import matplotlib
from matplotlib.axes import Axes

# Okabe and Ito's palette, which most colour-blind readers can distinguish, and some more.
BLUE, ORANGE, GREEN, PINK, SKY, VERMILION = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, "#8C564B", "#7F7F7F")
INK, FAINT, GRID, RED = "#222222", "#888888", "#DDDDDD", "#B00020"
plain_text = matplotlib.rc_context({"text.parse_math": False})
"""Decorates what draws: names, devices and folders may have dollars, which stay what they are."""


def tidy(axes: Axes) -> None:
    """A pale grid behind everything, and no frame above and on the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def short(value: float) -> str:
    """A number at an axis, as in 1.5k, 20M, 3B, 11T, 2e-4 or 1e18."""
    if 0 < abs(value) < 0.01 or abs(value) >= 1e15:
        digits, exponent = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.4g}"


def shortened(text: str, most: int) -> str:
    """The text without its middle where it is longer."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}\N{HORIZONTAL ELLIPSIS}{text[-half:]}"
