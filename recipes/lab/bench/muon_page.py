"""The page and the picture of the muon suite. Imports no torch."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

Record = dict[str, Any]
NAMES = {"adamw": "AdamW", "muon": "Muon"}
COLOURS = {"adamw": "#0072B2", "muon": "#D55E00"}


def page(records: Record) -> list[str]:
    """The lines of docs/benchmarks/muon.md."""
    finals, steps = records["finals"], records["adamw"][0]["steps"]
    whole = {name: _of(finals, name, steps) for name in NAMES}
    return [
        "# Muon and AdamW on a small model",
        "",
        *_summary(records, whole),
        "",
        "![Validation loss over tokens](muon.png)",
        "",
        "## At the best rates, three seeds",
        "",
        *_table_of_seeds(records, whole),
        "",
        "## How the rates were tuned",
        "",
        *_table_of_rates(records),
        "",
        "## What this does and does not say",
        "",
        *_conditions(records, whole),
    ]


def share_of_steps(records: Record, seed: int) -> float | None:
    """The shortest run of Muon that ends at AdamW's final loss, as a share of AdamW's steps; None if none is so short.

    Between the lengths that were trained, the final loss is taken as linear in the logarithm of the length.
    """
    steps = records["adamw"][0]["steps"]
    [goal] = [one["loss"] for one in records["finals"] if (one["optimizer"], one["seed"]) == ("adamw", seed)]
    runs = [one for one in records["finals"] if (one["optimizer"], one["seed"]) == ("muon", seed)]
    points = sorted((one["steps"], one["loss"]) for one in runs)
    for (fewer, worse), (more, better) in pairwise(points):
        if better <= goal <= worse:
            share = (worse - goal) / (worse - better)
            return math.exp(math.log(fewer) + share * math.log(more / fewer)) / steps
    return points[0][0] / steps if points[0][1] < goal else None


def tokens_on_the_way(records: Record, seed: int) -> float | None:
    """Tokens after which Muon's whole run is at AdamW's final loss, while its rate may still be high."""
    [goal] = [one["loss"] for one in records["finals"] if (one["optimizer"], one["seed"]) == ("adamw", seed)]
    steps = records["adamw"][0]["steps"]
    [curve] = [one["curve"] for one in _of(records["finals"], "muon", steps) if one["seed"] == seed]
    for (tokens, loss), (later, lower) in pairwise(curve):
        if lower <= goal < loss:
            return float(tokens + (later - tokens) * (loss - goal) / (loss - lower))
    return None


def draw(records: Record, file: Path) -> None:
    """Validation loss over tokens: thin lines of the seeds, thick ones of their means; final losses over lengths."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    finals, steps = records["finals"], records["adamw"][0]["steps"]
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for name, label in NAMES.items():
        runs = _of(finals, name, steps)
        for one in runs:
            axes.plot(*zip(*one["curve"], strict=True), color=COLOURS[name], linewidth=0.7, alpha=0.6)
        together = zip(*(one["curve"] for one in runs), strict=True)
        mean = [(points[0][0], fmean(loss for _, loss in points)) for points in together]
        label += f", mean of {len(runs)} seeds" * (len(runs) > 1)
        axes.plot(*zip(*mean, strict=True), color=COLOURS[name], linewidth=2.2, label=label)
    goal = fmean(one["loss"] for one in _of(finals, "adamw", steps))
    axes.axhline(goal, color="#7F7F7F", linewidth=0.8, linestyle="--", label="AdamW's final loss")
    shorter = sorted({one["steps"] for one in finals if one["steps"] != steps})
    ends = [one["curve"][-1] for length in shorter for one in _of(finals, "muon", length)]
    if ends:
        style: dict[str, Any] = {
            "color": COLOURS["muon"],
            "marker": "o",
            "linestyle": "none",
            "markerfacecolor": "none",
        }
        axes.plot(*zip(*ends, strict=True), **style, label="ends of shorter runs of Muon")
    losses = [loss for one in finals for _, loss in one["curve"]]
    axes.set_ylim(min(losses) - 0.1, sorted(losses)[-len(losses) // 12])  # the first points would flatten the rest
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel("validation loss, nats per token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(linewidth=0.4, alpha=0.5)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def _of(finals: Sequence[Record], optimizer: str, steps: int) -> list[Record]:
    return [one for one in finals if one["optimizer"] == optimizer and one["steps"] == steps]


def _summary(records: Record, whole: dict[str, list[Record]]) -> Iterator[str]:
    tokens = whole["adamw"][0]["curve"][-1][0]
    shares = [share_of_steps(records, one["seed"]) for one in whole["adamw"]]
    found = [share for share in shares if share is not None]
    yield "Written by `python scripts/bench.py --suite muon --write-docs`; [muon.json](muon.json) has every curve."
    yield ""
    if len(found) < len(shares):
        yield f"**Muon did not reach AdamW's final loss with {len(shares) - len(found)} of {len(shares)} seeds.**"
    else:
        yield (
            f"**Muon ends at AdamW's final loss after {fmean(found):.0%} of AdamW's tokens** (seeds:"
            f" {', '.join(f'{share:.0%}' for share in found)}), in runs of their own length with their own decay."
        )
    losses = {name: fmean(one["loss"] for one in runs) for name, runs in whole.items()}
    yield (
        f"With the same {tokens:,} tokens it ends at {losses['muon']:.3f} instead of {losses['adamw']:.3f} nats per"
        " token of held-out text."
    )


def _table_of_seeds(records: Record, whole: dict[str, list[Record]]) -> Iterator[str]:
    steps = whole["adamw"][0]["steps"]
    shorter = sorted({one["steps"] for one in records["finals"] if one["steps"] != steps}, reverse=True)
    yield (
        f"| seed | AdamW, {steps} steps | Muon, {steps} steps | "
        + "".join(f"Muon, {length} | " for length in shorter)
        + "Muon's tokens to AdamW's loss: own length | on the way |"
    )
    yield "|---:|" + "---:|" * (4 + len(shorter))
    for adamw in whole["adamw"]:
        seed = adamw["seed"]
        muon = [next(o for o in _of(records["finals"], "muon", n) if o["seed"] == seed) for n in (steps, *shorter)]
        share, way = share_of_steps(records, seed), tokens_on_the_way(records, seed)
        tokens = adamw["curve"][-1][0]
        cells = [f"{one['loss']:.4f}" for one in (adamw, *muon)]
        cells += ["not reached" if share is None else f"{share * tokens:,.0f} ({share:.0%})"]
        cells += ["not reached" if way is None else f"{way:,.0f} ({way / tokens:.0%})"]
        yield f"| {seed} | {' | '.join(cells)} |"
    yield ""
    yield (
        'Final validation losses. "Own length": between runs of Muon of these lengths, each with a warm-up and a decay'
        ' of its own; a share that equals the shortest run\'s is an upper limit. "On the way": in the middle of the'
        " longest run, before its decay has ended, which is later."
    )


def _table_of_rates(records: Record) -> Iterator[str]:
    yield f"One run each, {len(records['adamw'])} of AdamW and {len(records['muon'])} of Muon; final validation losses."
    yield ""
    yield "| optimizer | lr | matrix_lr | loss |"
    yield "|---|---:|---:|---:|"
    for name in NAMES:
        best = min(one["loss"] for one in records[name])
        for one in records[name]:
            loss = f"**{one['loss']:.4f}**" if one["loss"] == best else f"{one['loss']:.4f}"
            matrix_lr = f"{one['matrix_lr']:g}" if one["matrix_lr"] else ""
            yield f"| {NAMES[name]} | {one['lr']:g} | {matrix_lr} | {loss} |"
    yield ""
    yield (
        "Muon's `lr`, of embeddings, head and norms, began at AdamW's best; half and twice of it were tried at the best"
        " `matrix_lr`. " + _at_the_edge(records)
    )


def _at_the_edge(records: Record) -> str:
    """Whether a best rate is the first or the last that was tried."""
    found = []
    for name, key in (("adamw", "lr"), ("muon", "matrix_lr"), ("muon", "lr")):
        best = min(records[name], key=lambda one: float(one["loss"]))
        tried = sorted({one[key] for one in records[name]})
        if best[key] in (tried[0], tried[-1]):
            found.append(f"{NAMES[name]}'s best {key} is at the edge of what was tried, so it may do better still.")
    return " ".join(found) or "No best rate is at the edge of what was tried."


def _conditions(records: Record, whole: dict[str, list[Record]]) -> Iterator[str]:
    facts, steps = records["environment"], whole["adamw"][0]["steps"]
    tokens = whole["adamw"][0]["curve"][-1][0]
    adamw, muon = (min(one["step_seconds"] for one in records[name]) for name in ("adamw", "muon"))
    yield (
        f"- **It is very small**: 4 layers of width 128, 1.1M parameters, {steps} steps of {tokens // steps:,} tokens,"
        " trained in float32. Large models and long runs may differ in the size, and even in the sign, of the effect."
    )
    yield (
        "- The text is the source code of Python's library, about 2% of it held out, with a tokenizer of 2,048 entries"
        " trained on it. Both optimizers read the same batches of a seed in the same order."
    )
    yield (
        "- Both have `wsd` (warm-up over 10% of the steps, decay over the last 30%), weight decay 0.1, gradients"
        " clipped at 1 and AdamW's betas (0.9, 0.95). Muon has momentum 0.95 with Nesterov, five Newton-Schulz steps"
        ' and `lr_adjust = "match_rms_adamw"`. Only the learning rates were tuned.'
    )
    yield (
        f"- A step of Muon took {muon / adamw:.2f} times as long as one of AdamW ({muon:.3f} s and {adamw:.3f} s, in"
        " one thread; the fastest ten steps of any run of the sweep, as the machine was busy with other work): a rough"
        " number. On a larger model and batch the share is smaller; `--plan` predicts it for GPUs."
    )
    yield (
        f"- Measured on a {facts['device']}, with Python {facts['python']}, torch {facts['packages']['torch']}, commit"
        f" {str(facts['git_commit'])[:12]}."
    )
