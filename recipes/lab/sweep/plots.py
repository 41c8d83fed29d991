"""Plot a sweep: bars of throughput and memory, loss curves and gaps, underflow of float8 casts. Imports no torch."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from recipes.lab.curves.style import COLOURS, DOTS_PER_INCH, tidy
from recipes.lab.sweep.grid import Sweep
from recipes.lab.sweep.results import Result, baseline_row, loss_gaps, reference_row

BARS = "bars.png"
LOSS = "loss.png"
UNDERFLOW = "underflow.png"


def draw(sweep: Sweep, results: dict[str, Result]) -> list[Path]:
    """Write the pictures for which there are results; returns their paths."""
    done = [result for result in results.values() if result["outcome"] == "done"]
    devices = ", ".join(dict.fromkeys(f"{result['processes']} x {result['environment']['device']}" for result in done))
    models = ", ".join(dict.fromkeys(row.recipe.model.name for row in sweep.rows))
    title = f"{sweep.name}: {models}" + (f" on {devices}" if devices else "")
    sampled = any(result.get("float8") for result in results.values())
    drawn = []
    for name, picture, wanted in ((BARS, bars, results), (LOSS, losses, done), (UNDERFLOW, underflow, sampled)):
        if wanted:
            figure = picture(sweep, results)
            figure.suptitle(title, fontsize=11)
            figure.savefig(sweep.folder / name, dpi=DOTS_PER_INCH)
            drawn.append(sweep.folder / name)
    return drawn


def bars(sweep: Sweep, results: dict[str, Result]) -> Figure:
    """Two panels with one bar per row; a row without numbers shows its outcome."""
    figure = Figure(figsize=(11, 1.7 + 0.48 * len(results)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.invert_yaxis()  # the first row on top, in both panels
    left.set_yticks(range(len(results)), list(results))
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
    place: dict[str, Any] = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(text, (end, bar), fontsize=9, style=style, color="black" if value else colour, **place)


def losses(sweep: Sweep, results: dict[str, Result]) -> Figure:
    """Loss over tokens of every finished row; below it, over steps, the gap to the reference if there is one."""
    gaps = {label: gap for label, gap in loss_gaps(sweep, results).items() if gap}
    base = reference_row(sweep, results) if len(gaps) > 1 else None
    figure = Figure(figsize=(9, 7.2 if base else 4.6), layout="constrained")
    panels = figure.subplots(2, 1, height_ratios=(3, 2)) if base else [figure.subplots()]
    colours = _colours(sweep, results)
    top = panels[0]
    for label, result in results.items():
        if result["outcome"] != "done":
            continue
        is_base = base is not None and label == base.label
        colour = colours[label]
        points = [(tokens, loss) for _, tokens, loss in result["curve"] if loss is not None]
        name = f"{label} (reference)" if is_base else label
        style: dict[str, Any] = {"color": colour, "linewidth": 2.4 if is_base else 1.4, "zorder": 1 if is_base else 2}
        top.plot(*zip(*points, strict=True), label=name, marker=".", markersize=4, **style)
        if base and label in gaps:
            panels[1].plot(*zip(*gaps[label], strict=True), marker=".", markersize=4, **style)
    top.set_xlabel("tokens")
    top.xaxis.set_major_formatter(EngFormatter(sep=""))  # 1500 -> "1.5k"
    top.set_ylabel("training loss, nats per token")
    top.legend(frameon=False, fontsize=9)
    tidy(top)
    if base:
        panels[1].set_xlabel("step")
        panels[1].set_ylabel(f"loss minus {base.label}'s")
        tidy(panels[1])
    return figure


OPERANDS = {"input": "inputs", "weight": "weights", "grad_output": "output gradients"}


def underflow(sweep: Sweep, results: dict[str, Result]) -> Figure:
    """The largest underflow of any cast of a layer in a sampled step, over the layers; one panel per operand."""
    figure = Figure(figsize=(9, 7.2), layout="constrained")
    panels = figure.subplots(len(OPERANDS), 1, sharex=True)
    sampled = {label: result["float8"] for label, result in results.items() if result.get("float8")}
    colours = _colours(sweep, results)
    layers = list(dict.fromkeys(_layer(linear) for casts in sampled.values() for linear, *_ in casts))
    for axes, (operand, words) in zip(panels, OPERANDS.items(), strict=True):
        most = 0.0
        for number, (label, casts) in enumerate(sampled.items()):
            worst: dict[int, float] = {}
            for linear, tensor, _, share in casts:
                if tensor.partition("_for_")[0] == operand:
                    layer = layers.index(_layer(linear))
                    worst[layer] = max(worst.get(layer, 0.0), 100 * share)
            most = max(most, *worst.values(), 0.0)
            # Rows often coincide: earlier ones have wider lines, so that they show behind the later ones.
            style: dict[str, Any] = {"color": colours[label], "linewidth": 3.0 - 2.0 * number / len(sampled)}
            style |= {"marker": "os^D"[number % 4], "markersize": 6, "markerfacecolor": "none", "clip_on": False}
            axes.plot(list(worst), list(worst.values()), label=label, **style)
        axes.set_ylabel(f"{words}\nthat become zero, %")
        axes.set_ylim(bottom=0, top=1.05 * most or 1)
        tidy(axes)
    every = -(-len(layers) // 20)  # no more than 20 names
    panels[-1].set_xticks(range(0, len(layers), every), layers[::every])
    panels[-1].set_xlabel("layer")
    panels[0].legend(frameon=False, fontsize=9)
    return figure


def _colours(sweep: Sweep, results: dict[str, Result]) -> dict[str, str]:
    """Label -> colour, the same in all pictures; black for the row that others are compared with."""
    base = reference_row(sweep, results)
    gaps = loss_gaps(sweep, results)
    compared = base is not None and any(gap for label, gap in gaps.items() if label != base.label)
    colours = iter(COLOURS * len(results))
    return {
        label: "black" if compared and base is not None and label == base.label else next(colours)
        for label, result in results.items()
        if result["outcome"] == "done"
    }


def _layer(linear: str) -> str:
    """The number in the name of a block's linear, such as 3; the whole name of a linear outside of the blocks."""
    return next((part for part in linear.split(".") if part.isdigit()), linear)
