"""The record of the gpu suite: rates from its kernels, and predictions beside its kernels and steps."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from parallel.config import MeshDegrees
from recipes.lab.sweep.grid import Sweep, read_sweep
from recipes.plan.hardware import GPUS
from recipes.plan.memory import predict as predict_memory
from recipes.plan.rates import RATES, Rates
from recipes.plan.time import attention_seconds, product_seconds, step_time
from recipes.recipe.load import CONFIGS, load
from tests.gpu.suite import Record
from tests.published.gpu import SWEEP, kernels_table, step_table
from tests.published.kernels import rates_of

H100, H200 = GPUS["H100"], GPUS["H200"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return read_sweep(SWEEP, output=tmp_path_factory.mktemp("gpu"), processes=1)


def compared(rows: Record) -> dict[str, tuple[float, float, float]]:
    """Of kernels: what -> predicted and measured milliseconds, and their ratio."""
    cells = [line.strip("|").split("|") for line in kernels_table({"rows": rows}, H200)[2:]]
    return {name.strip(): (float(a), float(b), float(ratio)) for name, a, b, ratio, *_ in cells}


def group(*measurements: dict[str, Any]) -> dict[str, Any]:
    return {"outcome": "done", "reason": "", "seconds": 1.0, "measurements": list(measurements)}


def test_products_of_a_block_are_compared_together() -> None:
    """A step's products are those of its blocks."""
    shapes = {"q_proj, o_proj": 2048, "k_proj, v_proj": 512, "gate_proj, up_proj": 11008, "down_proj": 11008}
    orders = {"forward": (0, 1, 2), "gradient of the input": (0, 2, 1), "gradient of the weight": (2, 0, 1)}
    rows = []
    for linear, width in shapes.items():
        sizes = (8192, 11008, 2048) if linear == "down_proj" else (8192, 2048, width)
        for product, order in orders.items():
            shape = [sizes[index] for index in order]
            seconds = 2 * math.prod(shape) / 361.131e12
            rows.append(
                {
                    **{"operation": "product", "model": "smollm3_3b", "kind": "bf16", "linear": linear},
                    **{"product": product, "shape": shape, "tflops": 361.131, "seconds": seconds},
                }
            )
    predicted, measured, ratio = compared({"products": group(*rows)})["products, smollm3_3b, bf16"]
    words = ["--activation_checkpointing.mode", "none", "--activation_checkpointing.blocks", "all"]
    words += ["--batch.global_batch_size", "1", "--batch.micro_batch_size", "1", "--fsdp.reshard_after_forward", "true"]
    recipe = load(CONFIGS / "benchmarks/smollm3_3b_h100.toml", words)
    step = step_time(recipe, MeshDegrees(replicate=1, shard=1), gpu=H200)
    assert predicted == pytest.approx(1e3 * step.seconds["products"] / 36, rel=0.01)
    assert ratio == pytest.approx(measured / predicted, abs=0.01)
    rows[0] = {**rows[0], "error": "unsupported"}
    del rows[0]["seconds"]
    assert compared({"products": group(*rows)}) == {}


def test_attention_loss_copies_and_the_optimizer_are_compared() -> None:
    flops = 2 * 16 * 128 * 8192**2
    attention = {"operation": "attention", "model": "smollm3_3b", "backend": "cudnn", "passes": "both", "tokens": 8192}
    seconds = sum(attention_seconds(flops, "cudnn", gpu=H200, rates=RATES))
    found = compared(
        {
            "attention": group(attention | {"seconds": seconds, "tflops": 3 * flops / seconds / 1e12}),
            "loss": group(
                {
                    "operation": "loss",
                    "model": "smollm3_3b",
                    "kind": "compiled",
                    "chunks": 1,
                    "logits": 10**9,
                    "seconds": 1,
                }
            ),
            "bandwidth": group(
                {"operation": "copy", "gib": 4.0, "bytes": 8 * 2**30, "seconds": 0.002},
                {
                    **{"operation": "optimizer", "model": "smollm3_3b", "parameters": 10**9, "moments": "bfloat16"},
                    **{"seconds": 0.01},
                },
            ),
        },
    )
    rate = RATES.moved * H200.bandwidth
    assert found["attention, smollm3_3b, cudnn, both"][2] == 1.0
    assert found["loss, smollm3_3b, compiled"][1] == 1000
    assert found["copy of 4 GiB"][2] == pytest.approx(0.002 / (8 * 2**30 / rate), abs=0.01)
    update = found["AdamW, 1,000,000,000 parameters, bfloat16 moments"][0]
    assert update == pytest.approx(52e12 / (RATES.updated * rate), rel=0.01)


def test_steps_are_compared_if_their_recipe_is_still_the_same(sweep: Sweep) -> None:
    [row] = [row for row in sweep.rows if row.label == "zero2"]
    found = {
        **{"outcome": "done", "step_seconds": 4.0, "peak_memory_gib": 70.0, "tokens_per_second_per_device": 16384.0},
        "overrides": row.overrides,
    }
    _, _, line = step_table({"rows": {"zero2": found}}, [sweep], gpu=H200, rates=RATES)
    degrees = row.recipe.mesh.fit(1)
    error = 4 / step_time(row.recipe, degrees, gpu=H200).step_seconds - 1
    memory = predict_memory(row.recipe, degrees, context=False).peak / (70 * 2**30) - 1
    assert line == f"| zero2 | 16,384 | {error:+.1%} | 75.2 | {memory:+.2%} |"
    other = {"rows": {"zero2": found | {"overrides": {"run.steps": 7}}}}
    assert len(step_table(other, [sweep], gpu=H200, rates=RATES)) == 2


def kernels(rates: Rates) -> dict[str, Any]:
    """A record of the gpu suite on an H100 that has these rates."""
    shapes = [(8192, 2048, 11008), (8192, 11008, 2048), (8192, 2048, 2048)]
    rows: list[dict[str, Any]] = []
    for kind, float8 in (("bf16", "none"), ("float8 tensorwise", "tensorwise")):
        for m, k, n in shapes:
            seconds = product_seconds(m, n, k, gpu=H100, rates=rates, float8=float8)
            facts = {"operation": "product", "linear": "gate_proj, up_proj", "kind": kind, "shape": [m, k, n]}
            rows.append(facts | {"seconds": seconds})
    flops = 2.0 * 16 * 128 * 8192**2
    for backend in ("flash", "cudnn"):
        forward, backward = attention_seconds(flops, backend, gpu=H100, rates=rates, sequence=8192)
        for passes, seconds, amount in (("forward", forward, flops), ("both", forward + backward, 3 * flops)):
            facts = {"operation": "attention", "backend": backend, "model": "m", "passes": passes, "tokens": 8192}
            rows.append(facts | {"seconds": seconds, "tflops": amount / seconds / 1e12})
    rows.append({"operation": "copy", "seconds": 1.0, "bytes_per_second": rates.moved * H100.bandwidth})
    rows.append(
        {
            "operation": "loss",
            "kind": "eager",
            "seconds": 1.0,
            "logits": rates.moved * H100.bandwidth / rates.loss_chunked,
        }
    )
    rows.append({"operation": "product", "linear": "down_proj", "kind": "bf16", "error": "out of memory"})
    return {"suite": "gpu", "rows": {"all": {"measurements": rows}}}


def test_record_of_kernels_gives_the_rates_that_they_were_measured_with() -> None:
    true = replace(
        RATES, products=0.61, float8=0.7, flash=0.3, cudnn=0.5, attention_backward=0.7, moved=0.8, loss_chunked=44.0
    )
    rates = rates_of(kernels(true), H100)
    for field in ("products", "float8", "flash", "cudnn", "attention_backward", "moved", "loss_chunked"):
        assert getattr(rates, field) == pytest.approx(getattr(true, field), rel=1e-3), field


def test_rates_in_use_are_those_of_the_record_of_the_h200() -> None:
    record = json.loads((CONFIGS.parent / "docs/benchmarks/gpu-nvidia-h200.json").read_text())
    rates = rates_of(record, GPUS["H200"])
    kernels = ("moved", "added", "updated", "cast", "cast_eager")
    for field in ("products_h200", "float8", "rowwise", "flash", "cudnn", "attention_backward", *kernels):
        assert getattr(RATES, field) == pytest.approx(getattr(rates, field), rel=1e-3), field
    assert rates.rowwise > 1  # cuBLAS's products with a scale per row are faster than those with one per tensor


def test_record_without_attention_leaves_its_rates() -> None:
    record = kernels(RATES)
    rows = record["rows"]["all"]["measurements"]
    record["rows"]["all"]["measurements"] = [row for row in rows if row["operation"] == "product"]
    rates = rates_of(record, H100)
    assert (rates.flash, rates.moved, rates.loss) == (RATES.flash, RATES.moved, RATES.loss)
