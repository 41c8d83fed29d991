"""Plot a sweep: bars of throughput and memory, loss curves and gaps, underflow of float8 casts. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from recipes.lab.curves.style import COLOURS, DOTS_PER_INCH, plain_text, tidy
from recipes.lab.sweep.grid import Sweep
from recipes.lab.sweep.results import (
    Result,
    baseline_row,
    by_seed,
    loss_gaps,
    reference_row,
    reference_title,
    remarks,
    row_title,
)

BARS = "bars.png"
LOSS = "loss.png"
UNDERFLOW = "underflow.png"
UNDERFLOW_SHOWS = "Largest share of a tensor's nonzero values that a cast to float8 made zero, in any sampled step."


@plain_text
def draw_sweep(sweep: Sweep, results: dict[str, Result]) -> list[Path]:
    """Write the pictures for which there are results; returns their paths."""
    done = [result for result in results.values() if result["outcome"] == "done"]
    devices = ", ".join(dict.fromkeys(f"{result['processes']} x {result['environment']['device']}" for result in done))
    models = ", ".join(dict.fromkeys(row.recipe.model.name for row in sweep.rows))
    head = f"{sweep.name}: {models}" + (f" on {devices}" if devices else "")
    sampled = any(result.get("float8") for result in results.values())
    drawn = []
    for name, picture, wanted in ((BARS, bars, results), (LOSS, loss_curves, done), (UNDERFLOW, underflow, sampled)):
        if wanted:
            figure = picture(sweep, results)
            lines = [head, *remarks(sweep), *([UNDERFLOW_SHOWS] if name == UNDERFLOW else [])]
            figure.suptitle("\n".join(lines), fontsize=10)
            figure.savefig(sweep.folder / name, dpi=DOTS_PER_INCH)
            drawn.append(sweep.folder / name)
    return drawn


def bars(sweep: Sweep, results: dict[str, Result]) -> Figure:
    """Two panels with one bar per row; a row without numbers shows its outcome."""
    figure = Figure(figsize=(11, 1.7 + 0.48 * len(results)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.invert_yaxis()  # the first row on top, in both panels
    left.set_yticks(range(len(results)), [row_title(row) for row in sweep.rows if row.label in results])
    slow = baseline_row(sweep, results)
    first = results[slow.label]["tokens_per_second_per_device"] if slow else None
    for bar, (label, result) in enumerate(results.items()):
        if result["outcome"] != "done":
            _bar(left, bar, 0, 0, result["outcome"], colour="#B00020")
            _bar(right, bar, 0, 0, "", colour="#B00020")
            continue
        rate, seconds = result["tokens_per_second_per_device"], result["step_seconds"]
        memory = result["peak_memory_gib"]
        slowest, fastest = (rate * seconds / result[f"step_seconds_{end}"] for end in ("most", "least"))
        faster = f"  ({rate / first:.2f}x)" if first and slow and label != slow.label else ""
        _bar(left, bar, rate, fastest, f"{rate:,.0f}{faster}", colour=COLOURS[0])
        left.plot([slowest, fastest], [bar, bar], color="black", linewidth=1.2, marker="|", markersize=6)
        _bar(right, bar, memory, memory, f"{memory:.2f}", colour=COLOURS[4])
    for axes, title in ((left, "tokens/s per device; line: slowest to fastest window"), (right, "peak memory, GiB")):
        axes.set_xlim(0, 1.3 * axes.dataLim.x1 or 1)  # space for the numbers
        axes.set_xlabel(title)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        tidy(axes, grid="x")
    return figure


def _bar(axes: Axes, bar: int, value: float, end: float, text: str, *, colour: str) -> None:
    """A bar of length `value` with text to the right of `end`; only the text if the value is 0."""
    axes.barh(bar, value, color=colour, height=0.62)
    style = "normal" if value else "italic"
    where: dict[str, Any] = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(text, (end, bar), fontsize=9, style=style, color="black" if value else colour, **where)


def loss_curves(sweep: Sweep, results: dict[str, Result]) -> Figure:
    """Loss over tokens of every finished row; below it the gap to the reference if there is one. Of rows that differ in
    their seed, the mean and the band from the least to the most."""
    gaps = {label: gap for label, gap in loss_gaps(sweep, results).items() if gap}
    base = reference_row(sweep, results) if len(gaps) > 1 else None
    figure = Figure(figsize=(9, 7.2 if base else 4.6), layout="constrained")
    panels = figure.subplots(2, 1, height_ratios=(3, 2), sharex=True) if base else [figure.subplots()]
    top, bottom, colours = panels[0], panels[-1], _colours(sweep, results)
    for name, rows in by_seed(sweep, results).items():
        curves = [{tokens: loss for _, tokens, loss in results[row.label]["curve"] if loss is not None} for row in rows]
        is_base = base is not None and base in rows
        style: dict[str, Any] = {"color": colours[name], "linewidth": 2.4 if is_base else 1.4}
        style |= {"zorder": 1 if is_base else 2}
        _plot(top, curves, label=f"{name} (reference)" if is_base else name, **style)
        if is_base and len(rows) > 1:  # how far a loss is from the mean with another seed alone
            mean = _mean(curves)
            noise = [{x: curve[x] - mean[x] for x in mean} for curve in curves]
            _plot(bottom, noise, label="noise: the reference's spread over seeds", **style)
        elif base and all(row.label in gaps for row in rows):
            _plot(bottom, [_over_tokens(results[row.label], gaps[row.label]) for row in rows], **style)
    top.xaxis.set_major_formatter(EngFormatter(sep=""))  # 1500 -> "1.5k"
    top.set_ylabel("training loss, nats per token")
    _legend(top)
    bottom.set_xlabel("tokens")
    if base:
        bottom.set_ylabel(f"loss minus that of\n{reference_title(sweep, results)}")
        bottom.legend(*bottom.get_legend_handles_labels(), frameon=False, fontsize=9)
    for axes in panels:
        tidy(axes)
    return figure


def _mean(curves: Sequence[dict[int, float]]) -> dict[int, float]:
    """The mean of curves where all have a value."""
    return {x: fmean(curve[x] for curve in curves) for x in curves[0] if all(x in curve for curve in curves)}


def _plot(axes: Axes, curves: Sequence[dict[int, float]], **style: Any) -> None:
    """Draw the mean of curves, and for several the band between the least and the most."""
    mean = _mean(curves)
    axes.plot(list(mean), list(mean.values()), marker=".", markersize=4, **style)
    if len(curves) > 1:
        low, high = ([end(curve[x] for curve in curves) for x in mean] for end in (min, max))
        axes.fill_between(list(mean), low, high, color=style["color"], alpha=0.2, linewidth=0)


def _over_tokens(result: Result, gap: Sequence[tuple[int, float]]) -> dict[int, float]:
    tokens = {step: tokens for step, tokens, _ in result["curve"]}
    return {tokens[step]: difference for step, difference in gap}


def _legend(axes: Axes) -> None:
    """Name the lines above the panel, where they hide nothing."""
    longest = max(map(len, axes.get_legend_handles_labels()[1]), default=0)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=max(1, 110 // (8 + longest)), frameon=False, fontsize=9)


OPERANDS = {"input": "inputs", "weight": "weights", "grad_output": "output gradients"}


def underflow(sweep: Sweep, results: dict[str, Result]) -> Figure:
    """The largest underflow of any cast of a layer in a sampled step, over the layers; one panel per operand."""
    figure = Figure(figsize=(9, 7.2), layout="constrained")
    panels = figure.subplots(len(OPERANDS), 1, sharex=True)
    groups = by_seed(sweep, results).items()
    casts_of = {name: [cast for row in rows for cast in results[row.label].get("float8", [])] for name, rows in groups}
    sampled = {name: casts for name, casts in casts_of.items() if casts}
    colours = _colours(sweep, results)
    layers = list(dict.fromkeys(_layer(linear) for casts in sampled.values() for linear, *_ in casts))
    for axes, (operand, words) in zip(panels, OPERANDS.items(), strict=True):
        most = 0.0
        for number, (name, casts) in enumerate(sampled.items()):
            worst: dict[int, float] = {}
            for linear, tensor, _, share in casts:
                if tensor.partition("_for_")[0] == operand:
                    layer = layers.index(_layer(linear))
                    worst[layer] = max(worst.get(layer, 0.0), 100 * share)
            most = max(most, *worst.values(), 0.0)
            # Rows often coincide: earlier ones have wider lines, so that they show behind the later ones.
            style: dict[str, Any] = {"color": colours[name], "linewidth": 3.0 - 2.0 * number / len(sampled)}
            style |= {"marker": "os^D"[number % 4], "markersize": 6, "markerfacecolor": "none", "clip_on": False}
            axes.plot(list(worst), list(worst.values()), label=name, **style)
        axes.set_ylabel(f"{words}\nthat become zero, %")
        axes.set_ylim(bottom=0, top=1.05 * most or 1)
        tidy(axes)
    every = -(-len(layers) // 20)  # no more than 20 names
    panels[-1].set_xticks(range(0, len(layers), every), layers[::every])
    panels[-1].set_xlabel("layer")
    _legend(panels[0])
    return figure


def _colours(sweep: Sweep, results: dict[str, Result]) -> dict[str, str]:
    """Title in by_seed() -> colour, the same in all pictures; black for the row that others are compared with."""
    base = reference_row(sweep, results)
    compared = sum(map(bool, loss_gaps(sweep, results).values())) > 1
    colours = iter(COLOURS * len(results))
    return {
        title: "black" if compared and base in rows else next(colours)
        for title, rows in by_seed(sweep, results).items()
    }


def _layer(linear: str) -> str:
    """The number in the name of a block's linear, such as 3; the whole name of a linear outside of the blocks."""
    return next((part for part in linear.split(".") if part.isdigit()), linear)
