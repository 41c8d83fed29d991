"""A CPU as a device to plan for, from the record of `bench.py --suite calibrate`.

Products, attention, copies, the loss, the optimizer and messages were measured one by one, and each gives its rates.
What the host adds cannot be measured alone: it is what is left of the steps of small models, by least squares.
Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from parallel.errors import UserError, listed
from recipes.plan.hardware import Gpu
from recipes.plan.rates import RATES, Host, Rates
from recipes.plan.time import BACKWARD, host_work, time_of, update_bytes
from recipes.plan.work import work_of
from recipes.recipe.load import CONFIGS, load
from recipes.recipe.schema import Recipe

SPREAD = 0.1
"""How far a step may still be off, as a share of it: docs/plan.md has how far ten were."""
ROUNDS = 20_000
"""Rounds of the fit: far more than it needs for all its digits, in half a second."""

Rows = list[dict[str, Any]]


def calibrated(record: dict[str, Any], path: Path, gpu: Gpu | None, *, processes: int) -> tuple[Gpu, Rates]:
    """The CPU and its rates for so many processes. Raises UserError for a number that was not measured."""
    if gpu is not None and gpu.name != "cpu":
        raise UserError(f"{path} was measured on a CPU, not on {gpu.name}; leave --gpu out, or write another file")
    known = record["processes"]
    if str(processes) not in known:
        raise UserError(
            f"{path} was measured with {listed(known)} processes, not with {processes}: they"
            f" share the cores; run bench.py --suite calibrate --processes {processes}"
        )
    found, about = known[str(processes)], record["environment"]
    none: dict[str, Any] = dict.fromkeys(("overlaps", "gap", "launch", "wave", "ramp", "beside"), 0.0)
    same: dict[str, Any] = dict.fromkeys(("narrow_heads", "moved", "added", "updated", "cast", "cast_eager"), 1.0)
    rates = replace(RATES, **none, **same)
    cpu, rates = _computing(found, about, processes, rates)
    rates = _attention(found["attention"], cpu, rates)
    cpu, rates = _links(found["links"], cpu, rates)
    per_logit = {row["kind"]: row["seconds"] / row["logits"] * cpu.bandwidth for row in found["loss"]}
    rates = replace(
        rates,
        loss=per_logit["eager"],
        loss_chunked=per_logit["chunked"],
        loss_compiled=per_logit["compiled"] / 2,  # time.py counts it for elements of 2 bytes; these had 4
    )
    rates = _host(found["steps"], processes, cpu, rates)
    many = "one process" if processes == 1 else f"{processes} processes"
    what = f"by {path.name} ({many} on {about['cores']} cores)"
    return cpu, replace(rates, spread=SPREAD, calibrated=what)


def _computing(found: dict[str, Rows], about: dict[str, Any], processes: int, rates: Rates) -> tuple[Gpu, Rates]:
    """Rates of products in float32 and bfloat16, and of memory, which is the optimizer's."""
    seconds = {}
    for kind in ("float32", "bfloat16"):
        own = [row for row in found["products"] if row["kind"] == kind]
        rows = [(2.0 * m * n * k, 2.0 * m * n) for m, n, k in (row["shape"] for row in own)]
        seconds[kind] = nonnegative(rows, [row["seconds"] for row in own])
    per_flop, start = seconds["float32"]
    largest = max(found["optimizer"], key=lambda row: row["parameters"])
    cpu = Gpu(
        name="cpu",
        memory=about["memory"] // processes,  # their share
        bandwidth=update_bytes("float32") * largest["parameters"] / largest["seconds"],
        bf16_peak=1 / seconds["bfloat16"][0],
        float8_peak=None,
        link=1.0,  # _links() measures it
        network=1.0,
        source="measured",
        per_node=processes,
        float32_peak=1 / per_flop,
        units=1,
        family="measured",
    )
    return cpu, replace(rates, depth=start / per_flop)


def _attention(rows: Rows, cpu: Gpu, rates: Rates) -> Rates:
    """Seconds per FLOP and per score, and how much longer the backward pass takes."""
    scores = [row["batch"] * row["heads"] * row["tokens"] ** 2 / 2 for row in rows]
    known = [(4.0 * row["head_width"] * count, count) for row, count in zip(rows, scores, strict=True)]
    per_flop, score = nonnegative(known, [row["forward"] for row in rows])
    forward, backward = (sum(row[name] for row in rows) for name in ("forward", "backward"))
    return replace(
        rates,
        flash=1 / per_flop / cpu.bf16_peak,
        score=score,
        attention_backward=BACKWARD * forward / backward,
    )


def _links(rows: Rows, cpu: Gpu, rates: Rates) -> tuple[Gpu, Rates]:
    """Speed and latency of messages; none for one process."""
    if not rows:
        return cpu, rates
    names = ("all_gather", "reduce_scatter")
    sent = [(row["bytes"] * (cpu.per_node - 1) / cpu.per_node, 1.0) for row in rows for _ in names]
    per_byte, latency = nonnegative(sent, [row[name] for row in rows for name in names])
    return replace(cpu, link=1 / per_byte, network=1 / per_byte), replace(rates, link=1.0, hop=0.0, collective=latency)


def _host(rows: Rows, processes: int, cpu: Gpu, rates: Rates) -> Rates:
    """What the host takes, and the speed of element-wise operators and of fused ones: what is left of whole steps."""
    names = [field.name for field in fields(Host)]
    nothing = replace(rates, host=Host(*[0.0] * len(names)), eager=1e9, fused=1e9)
    moving = (replace(nothing, eager=1.0), replace(nothing, fused=1.0))
    known, left = [], []
    for row in rows:
        recipe = recipe_of(row["changes"], processes)
        work = work_of(recipe, recipe.mesh.fit(processes), per_node=processes)
        rest, *whole = (time_of(work, gpu=cpu, rates=at).step_seconds for at in (nothing, *moving))
        counts = host_work(work)
        known.append([*(float(counts[name]) for name in names), *(seconds - rest for seconds in whole)])
        left.append(max(0.0, row["seconds"] - rest))
    *host, eager, fused = nonnegative(known, left, weights=[1 / row["seconds"] for row in rows])
    return replace(rates, host=Host(*host), eager=1 / max(eager, 1e-9), fused=1 / max(fused, 1e-9))


def recipe_of(changes: dict[str, Any], processes: int) -> Recipe:
    """A small Llama with these changes; "micro_batches" is the number of them."""
    values = {key: value for key, value in changes.items() if key != "micro_batches"}
    size = changes["micro_batches"] * changes["batch.micro_batch_size"] * processes
    values |= {"batch.global_batch_size": size, "run.device": "cpu"}
    words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    return load(CONFIGS / "llama3_debug.toml", words, rules=False)


def nonnegative(
    known: Sequence[Sequence[float]], seconds: Sequence[float], *, weights: Sequence[float] | None = None
) -> list[float]:
    """Factors, none below 0, with which the columns add up to the seconds: least squares of relative errors."""
    weights = weights or [1 / value for value in seconds]
    rows = [[weight * value for value in row] for row, weight in zip(known, weights, strict=True)]
    scales = [max(row[column] for row in rows) or 1.0 for column in range(len(rows[0]))]
    rows = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    left = [weight * value for weight, value in zip(weights, seconds, strict=True)]
    found = [0.0] * len(scales)
    for _ in range(ROUNDS // len(rows)):
        for column in range(len(found)):
            own = [row[column] for row in rows]
            length = sum(value * value for value in own)
            if not length:
                continue
            change = max(-found[column], sum(a * b for a, b in zip(own, left, strict=True)) / length)
            found[column] += change
            left = [rest - change * value for rest, value in zip(left, own, strict=True)]
    return [value / scale for value, scale in zip(found, scales, strict=True)]
