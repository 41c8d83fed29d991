"""Rates from a record of tests/gpu/suite.py: those of recipes/plan/rates.py that are marked (measured).

`python -m tests.published.kernels RECORD` prints them. Imports no torch.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from recipes.files.screen import say
from recipes.plan.hardware import Gpu
from recipes.plan.rates import RATES, SHARES, Rates
from recipes.plan.time import attention_seconds, product_seconds

Json = dict[str, Any]
KERNELS = {
    "weights to bfloat16 and copied": "moved",
    "weights to float8, eager": "cast_eager",
    "gradient added up in float32": "added",
    "activation to float8, compiled": "cast",
}
"""Name of a cast -> the field of Rates with its rate."""


def rates_of(record: Json, gpu: Gpu) -> Rates:
    """RATES with what the kernels of the record, measured on this GPU, reach instead."""
    found: dict[str, list[Json]] = {}
    for row in record["rows"].values():
        for measured in row.get("measurements", []):
            if "seconds" in measured:  # else it failed
                found.setdefault(measured["operation"], []).append(measured)
    rates = RATES
    for measure in (_moved, _products, _attention, _loss):  # in this order: each takes what is known already
        rates = measure(found, gpu, rates)
    return rates


def _moved(found: dict[str, list[Json]], gpu: Gpu, rates: Rates) -> Rates:
    """The share of the bandwidth that copies reach, and the rates of casts and of the optimizer relative to them."""
    fields = {"copy": "moved", "optimizer": "updated"} | KERNELS
    reached: dict[str, list[float]] = {}
    for row in (row for name in ("copy", "cast", "optimizer") for row in found.get(name, [])):
        if "bytes_per_second" in row:
            field = fields[row["name"] if "name" in row else row["operation"]]
            reached.setdefault(field, []).append(row["bytes_per_second"])
    copies = median(reached.pop("moved", [rates.moved * gpu.bandwidth]))
    slower: Json = {field: median(values) / copies for field, values in reached.items()}
    return replace(rates, moved=copies / gpu.bandwidth, **slower)


def _products(found: dict[str, list[Json]], gpu: Gpu, rates: Rates) -> Rates:
    """The shares of the peak, by the seconds of all products of a kind together."""
    rows = [row for row in found.get("product", []) if "as one" not in row["linear"]]
    fields = {"bf16": SHARES[gpu.family], "float8 tensorwise": "float8", "float8 rowwise": "rowwise"}

    def predicted(rates: Rates, own: list[Json], float8: str) -> float:
        shapes = [row["shape"] for row in own]
        return sum(product_seconds(m, n, k, gpu=gpu, rates=rates, float8=float8) for m, k, n in shapes)

    for kind, field in fields.items():
        own, float8 = [row for row in rows if row["kind"] == kind], kind.partition(" ")[2] or "none"
        if own and (float8 == "none" or gpu.float8_peak is not None):
            rates = _scaled(
                rates, field, partial(predicted, own=own, float8=float8), sum(row["seconds"] for row in own)
            )
    return rates


def _attention(found: dict[str, list[Json]], gpu: Gpu, rates: Rates) -> Rates:
    """The share of the peak of each kernel, and the rate of the backward pass relative to the forward pass."""
    rows = {(row["backend"], row["model"], row["passes"]): row for row in found.get("attention", [])}
    pairs = [
        (row, rows[kernel, model, "both"])
        for (kernel, model, passes), row in rows.items()
        if passes == "forward" and kernel in ("flash", "cudnn") and (kernel, model, "both") in rows
    ]

    def predicted(rates: Rates, own: list[Json], *, backward: bool) -> float:
        total = 0.0
        for row in own:
            flops, tokens = 1e12 * row["tflops"] * row["seconds"], row["tokens"]
            total += attention_seconds(flops, row["backend"], gpu=gpu, rates=rates, sequence=tokens)[backward]
        return total

    for kernel in dict.fromkeys(row["backend"] for row, _ in pairs):
        own = [row for row, _ in pairs if row["backend"] == kernel]
        measured = sum(row["seconds"] for row in own)
        rates = _scaled(rates, kernel, partial(predicted, own=own, backward=False), measured)
    backward = sum(both["seconds"] - forward["seconds"] for forward, both in pairs)
    if backward > 0:
        own = [forward for forward, _ in pairs]
        rates = _scaled(rates, "attention_backward", partial(predicted, own=own, backward=True), backward)
    return rates


def _loss(found: dict[str, list[Json]], gpu: Gpu, rates: Rates) -> Rates:
    """Bytes per logit that the loss seems to move, eager in chunks and compiled."""
    for kind, field in (("eager", "loss_chunked"), ("compiled", "loss_compiled")):
        if own := [row for row in found.get("loss", []) if row["kind"] == kind]:
            seconds, logits = sum(row["seconds"] for row in own), sum(row["logits"] for row in own)
            rates = replace(rates, **{field: seconds * rates.moved * gpu.bandwidth / logits})
    return rates


def _scaled(rates: Rates, field: str, predicted: Callable[[Rates], float], measured: float) -> Rates:
    """The rates with a field, a share of a peak, at which the predicted seconds are the measured ones."""
    for _ in range(20):  # not all of the seconds are inversely proportional to it: products may wait for memory
        rates = replace(rates, **{field: getattr(rates, field) * predicted(rates) / measured})
    return rates


def main(file: Path) -> None:
    """Print each rate that differs from the one in use."""
    from tests.published.gpu import gpu_of_device

    record = json.loads(file.read_text(encoding="utf-8"))
    found = rates_of(record, gpu_of_device(record["environment"]["device"]))
    for name in (field.name for field in fields(Rates)):
        if getattr(found, name) != getattr(RATES, name):
            say(f"{name}: {getattr(found, name):.4g}, in use {getattr(RATES, name):.4g}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
