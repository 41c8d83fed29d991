"""The record of bench.py --suite calibrate of a machine whose rates are known."""

from dataclasses import replace
from typing import Any

from recipes.plan.hardware import Gpu
from recipes.plan.host import recipe_of
from recipes.plan.rates import RATES, Host, Rates
from recipes.plan.time import BACKWARD, product_seconds, time_of
from recipes.plan.work import work_of

CPU = Gpu(
    *("cpu", 8 * 2**30, 5e10, 4e11, None, 2e9, 2e9, "measured", 2),
    float32_peak=1e11,
    units=1,
    family="measured",
)
TRUE = replace(
    RATES,
    **{"overlaps": 0.0, "gap": 0.0, "launch": 0.0, "wave": 0.0, "ramp": 0.0, "narrow_heads": 1.0, "beside": 0.0},
    **dict.fromkeys(("moved", "added", "updated", "cast", "cast_eager"), 1.0),
    **{"depth": 40.0, "flash": 0.1, "score": 1e-9, "attention_backward": 1.1, "link": 1.0, "hop": 0.0},
    **{"collective": 1e-4, "loss": 60.0, "loss_compiled": 10.0, "eager": 1.5, "fused": 0.4},
    host=Host(1e-3, 3e-3, 2e-3, 8e-4, 3e-4, 1e-3, 2e-3, 4e-3),
)
SMALL = {
    **{"model.width": 32, "model.feed_forward_width": 64, "model.heads": 2, "model.key_value_heads": 1},
    **{"model.head_width": 16, "model.vocabulary": 64, "batch.sequence_length": 16, "batch.micro_batch_size": 1},
}
WIDE = SMALL | {"model.width": 256, "model.feed_forward_width": 512, "batch.sequence_length": 256}
STEPS: list[dict[str, Any]] = [
    *({**SMALL, "model.layers": layers, "micro_batches": count} for layers in (2, 6) for count in (1, 3)),
    SMALL | {"model.layers": 6, "micro_batches": 3, "fsdp.reshard_after_forward": False},
    *(
        {**SMALL, "model.layers": 4, "micro_batches": 2, "activation_checkpointing.mode": mode}
        for mode in ("full", "selective")
    ),
    SMALL | {"model.layers": 4, "micro_batches": 2, "compile.enabled": True},
    *(WIDE | {"model.layers": 4, "micro_batches": 2, "compile.enabled": compiled} for compiled in (False, True)),
]


def seconds_of(changes: dict[str, Any], cpu: Gpu, rates: Rates) -> float:
    recipe = recipe_of(changes, 2)
    return time_of(work_of(recipe, recipe.mesh.fit(2), per_node=2), gpu=cpu, rates=rates).step_seconds


def record() -> dict[str, Any]:
    """What two processes measure on a machine that has the true rates."""
    shapes = [(512, 128, 256), (512, 256, 128), (256, 128, 512), (512, 512, 512)]
    products = [
        {
            "kind": kind,
            "shape": shape,
            "seconds": product_seconds(*shape, gpu=replace(CPU, bandwidth=1e15), rates=TRUE, element=element),
        }
        for kind, element in (("float32", 4), ("bfloat16", 2))
        for shape in shapes
    ]
    attention = []
    for width in (16, 64):
        scores = 2 * 4 * 192**2 / 2
        forward = 4 * width * scores / (TRUE.flash * CPU.bf16_peak) + scores * TRUE.score
        facts = {"batch": 2, "heads": 4, "head_width": width, "tokens": 192}
        attention.append(facts | {"forward": forward, "backward": BACKWARD * forward / TRUE.attention_backward})
    sent = [(size, TRUE.collective + size / 2 / CPU.link) for size in (2**16, 2**24)]
    losses = {"eager": TRUE.loss, "chunked": TRUE.loss_chunked, "compiled": 2 * TRUE.loss_compiled}
    found = {
        "products": products,
        "attention": attention,
        "loss": [{"kind": kind, "logits": 1e6, "seconds": 1e6 * each / CPU.bandwidth} for kind, each in losses.items()],
        "optimizer": [{"parameters": 1e6, "tensors": 8, "seconds": 28e6 / CPU.bandwidth}],
        "links": [{"bytes": size, "all_gather": time, "reduce_scatter": time} for size, time in sent],
        "steps": [{"changes": changes, "seconds": seconds_of(changes, CPU, TRUE)} for changes in STEPS],
    }
    about = {"device": "cpu", "cores": 2, "memory": 2 * CPU.memory, "torch": "2.13.0"}
    return {"suite": "calibrate", "environment": about, "processes": {"2": found}}
