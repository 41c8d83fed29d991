"""The page of the scale suite. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
HOW = {"run": "r", "fitted": "f", "simulated": "s", "counted": "c"}
LARGEST = 64
"""Processes that are really run: what is "run" for more of them was extrapolated by a fitted slope."""
HEADINGS = {
    "processes": "Sockets, memory, store and rank 0",
    "start": "Start: imports and environment",
    "files": "Files and data",
    "steps": "Steps, pre-flight and agreement",
    "checkpoint": "Checkpoints",
    "watch": "Heartbeats, hangs and the end",
}
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def page(now: Record, before: Record) -> list[str]:
    """The lines of docs/benchmarks/scale.md. now, before: of the file scale.json and of scale_before.json."""
    found = [
        "# What grows with the cluster",
        "",
        "Written by `python scripts/bench.py --suite scale --write-docs`; [scale.json](scale.json) has the numbers,",
        f"and [scale_before.json](scale_before.json) those of commit {before['commit'][:7]}, from the same functions",
        "on its code. What they mean, and what an operator sets: [scale.md](../scale.md).",
        "",
        f"{now['device_text']}; commit {(now['commit'] or 'unknown')[:7]}.",
        "",
        "Each number says how it was got: *r* run by so many real processes; *f* run by up to 64 processes and",
        "carried on by the slopes below; *s* simulated, by this project's code with so many ranks' inputs in one",
        "process; *c* counted, by the formula of the code.",
    ]
    for name, heading in HEADINGS.items():
        if name in now:
            found += ["", f"## {heading}", "", *table(now[name], before.get(name, {}))]
    if "slopes" in now:
        found += ["", "## Fitted slopes", "", *_slopes(now["slopes"], before.get("slopes", []))]
        found += ["", "## A store under load", "", *_costs(now["store_costs"])]
    return found


def table(now: Mapping[str, Sequence[Any]], before: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """One line for each number before, if it is known, and one for it now; a column for each size."""
    sizes = sorted({*now, *before}, key=int)
    cells: dict[str, dict[str, dict[str, str]]] = {}  # what -> before or now -> size -> cell
    for side, rows_of in (("now", now), ("before", before)):
        for size in rows_of:
            for what, value, unit, how in rows_of[size]:
                text = f"{number(value, unit)} *{HOW['fitted' if how == 'run' and int(size) > LARGEST else how]}*"
                cells.setdefault(what, {}).setdefault(side, {})[size] = text
    yield "| | | " + " | ".join(f"{int(size):,}" for size in sizes) + " |"
    yield "|---|---|" + "---:|" * len(sizes)
    for what, sides in cells.items():
        first = what
        for side in ("before", "now"):
            if side in sides:
                yield f"| {first} | {side} | " + " | ".join(sides[side].get(size, "") for size in sizes) + " |"
                first = ""


def number(value: float, unit: str) -> str:
    """Three digits and a unit, or a whole number that is not large: "1,183", "16.1 GB", "0.12 s", "35 µs"."""
    if unit in ("MB", "GB", "KB", "kB"):
        value, unit = value * {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}[unit[0]], "B"
    elif unit in ("bytes", "byte"):
        unit = "B"
    elif unit == "s" and 0 < value < 0.1:
        value, unit = (1e3 * value, "ms") if value >= 1e-3 else (1e6 * value, "µs")
    size, prefix = next(((size, name) for size, name in PREFIXES if abs(value) >= size), (1.0, ""))
    if unit == "s" or (unit != "B" and abs(value) < 1e6):
        size, prefix = 1.0, ""
    scaled = value / size
    digits = f"{scaled:,.0f}" if abs(scaled) >= 100 or scaled == int(scaled) else f"{scaled:.3g}"
    return f"{digits} {prefix}{unit}".rstrip()


def _slopes(now: Sequence[Record], before: Sequence[Record]) -> Iterator[str]:
    sizes = list(now[0]["measured"])
    yield f"Measured with {', '.join(map(str, sizes))} processes, eight to a node, which start, take two steps of a toy"
    yield "model, save and resume. N: processes; a sum over all processes is shown per process."
    yield ""
    yield "| | before | now |"
    yield "|---|---|---|"
    earlier = {line["quantity"]["what"]: line for line in before}
    for line in now:
        what = line["quantity"]["what"] + (" / N" if line["quantity"]["total"] else "")
        old = earlier.get(line["quantity"]["what"])
        yield f"| {what} | {_formula(old) if old else ''} | {_formula(line)} |"
    yield ""
    yield "Rank 0's neighbours in the tree of host messages, at most 23, are counted and not fitted."


def _formula(line: Record) -> str:
    unit, tree = line["quantity"]["unit"], " + neighbours" if line["quantity"]["tree"] else ""
    base, slope = number(line["base"], unit), line["slope"]
    grows = abs(slope) * max(map(int, line["measured"])) > 1e-3 * abs(line["base"]) or abs(slope) > 1e-2
    return f"{base}{f' + {number(slope, unit)} x N' if grows else ''}{tree}"


def _costs(costs: Sequence[Record]) -> Iterator[str]:
    yield "A real TCPStore in a process of its own; CPU time of that process. Clients set, get and add as at a start."
    yield ""
    yield "| clients | per connection | per operation | operations/s that it can serve |"
    yield "|---:|---:|---:|---:|"
    for one in costs:
        connection, operation = (f"{one[name] * 1e6:.0f} µs" for name in ("connection", "operation"))
        yield f"| {one['clients']:,} | {connection} | {operation} | {number(1 / one['operation'], '')} |"
