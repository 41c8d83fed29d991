"""Random recipes that --check accepts, to be proved. A seed and a number of processes decide all of a recipe.

`python -m tests.random_recipes PROCESSES FIRST LAST FILE` proves those of these seeds, and appends the verdicts to a file.
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from models.sizes import SIZES
from parallel.dist import start, stop
from recipes.lab.prove.prove import verdict_on
from recipes.recipe.fields import field_types, with_values
from recipes.recipe.load import load
from recipes.recipe.rules import violations
from recipes.recipe.schema import Recipe
from tests.compiling import graphs_only
from tests.processes import run_processes
from tests.training import DEBUG, change

MESH = ("pipeline", "replicate", "context", "tensor", "expert")
SECTIONS = ("model", "pipeline", "attention", "float8", "activation_checkpointing", "compile", "fsdp", "optimizer")
SECTIONS += ("experts", "schedule", "metrics", "checkpoint")
LEFT_OUT = {"model.name", "model.weights", "model.config", "model.upcycle", "model.dropout", "attention.backend"}
LEFT_OUT |= {
    "fsdp.symmetric_memory",
    "compile.autotune",
    "metrics.wandb",
    "metrics.tensorboard",
    "checkpoint.export_hf",
}
OTHERS = ("data.document_mask", "mesh.context_by")
NUMBERS: dict[str, tuple[Any, ...]] = {
    **{"model.layers": (2, 3, 4, 5, 6, 8, 12), "model.heads": (2, 4, 6, 8, 9, 12, 16), "model.head_width": (32, 64)},
    **{"model.key_value_heads": (1, 2, 3, 4, 8), "model.norm_eps": (1e-6, 1e-5), "model.rope_theta": (100.0, 1e4, 1e6)},
    **{"model.no_rope_every": (0, 2, 3, 4), "model.no_rope_layers": ((), (0,), (1,), (0, 1)), "model.window": (0, 128)},
    **{
        "model.full_attention_every": (0, 2, 3),
        "model.attention_scale_width": (0, 20),
        "model.rope_factor": (2.0, 8.0),
    },
    **{
        "model.logit_softcap": (0.0, 5.0, 30.0),
        "model.experts": (0, 6, 8, 64),
        "model.experts_per_token": (1, 2, 3, 8),
    },
    **{"model.rope_local_theta": (0.0, 50.0), "model.rope_attention_factor": (0.0, 1.2), "model.expert_width": (128,)},
    **{"model.shared_experts": (0, 1, 2), "model.dense_layers": (0, 1, 3), "model.router_scale": (1.0, 2.5)},
    **{"model.expert_groups": (1, 2, 4), "model.groups_per_token": (1, 2), "batch.micro_batch_size": (1, 2, 4)},
    **{"batch.global_batch_size": (64, 96), "batch.loss_chunks": (1, 2, 5), "pipeline.stages_per_rank": (0, 1, 2, 3)},
    **{"batch.sequence_length": (768, 2048), "activation_checkpointing.blocks": (1, 2, 0.5, "all")},
    **{"float8.exclude": (("lm_head",), ("lm_head", "experts"), ("lm_head", "attention"), ()), "fsdp.prefetch": (1, 2)},
    **{"optimizer.matrix_lr": (0.0, 1e-3, 0.02), "optimizer.momentum": (0.8, 0.95), "optimizer.ns_steps": (3, 5)},
    **{"optimizer.betas": ((0.9, 0.95), (0.8, 0.99), (0.9, 0.999)), "optimizer.eps": (1e-8, 1e-5)},
    **{
        "optimizer.weight_decay": (0.0, 0.1, 0.5),
        "optimizer.z_loss": (0.0, 1e-4, 1e-2),
        "optimizer.grad_clip": (0.0, 1.0),
    },
    **{"experts.loss_weight": (0.001, 0.05), "experts.bias_rate": (0.001, 0.01), "experts.z_loss": (0.0, 0.001, 0.01)},
    **{
        "schedule.warmup_steps": (0, 10, 0.1),
        "schedule.decay_steps": (0, 20, 0.2),
        "schedule.min_lr_ratio": (0.0, 0.1),
    },
    **{"run.loss_spike_z": (0.0, 6.0), "run.seed": (0, 1, 77), "optimizer.lr": (1e-4, 3e-3)},
}
ZERO_BUBBLE = {"compile.enabled": False, "fsdp.reshard_after_forward": False, "activation_checkpointing.mode": "none"}
TOGETHER: tuple[dict[str, Any], ...] = (
    *({"activation_checkpointing.mode": mode} for mode in ("full", "selective")),
    {"data.prompt_field": "prompt", "data.answer_field": "answer"},
    {"model.router_bias": True, "experts.balance": "bias", "model.router": "sigmoid"},
    *({"pipeline.schedule": name} | ZERO_BUBBLE for name in ("zbv", "interleaved_zero_bubble")),
    {"fsdp.param_dtype": "bfloat16", "fsdp.reduce_dtype": "bfloat16"},
    {"float8.recipe": "tensorwise", "float8.all_gather": True, "float8.exclude": ("lm_head",)},
    {
        "model.window": 128,
        "model.full_attention_every": 2,
        "model.rope_scaling": "linear",
        "model.rope_scaled_layers": "full",
    },
)
"""What is only accepted, or only means something, together."""


def draw(seed: int, processes: int) -> Recipe:
    """A recipe for so many processes: a published model with half of all fields redrawn, as far as that is accepted."""
    dice = random.Random(seed * 100 + processes)
    recipe = with_values(
        load(DEBUG), {"run.name": f"random-{seed}", "batch.global_batch_size": 64, "batch.micro_batch_size": 1}
    )
    experts = dice.random() < 0.4
    model = dice.choice([size for size in SIZES.values() if bool(size.experts) == experts])
    recipe = change(recipe, model=vars(model), batch={"sequence_length": 2048})
    of_mesh = [{f"mesh.{axis}": dice.choice((1, 2, 2, 4, 8))} for axis in dice.sample(MESH, len(MESH))]
    kinds = {key: choices for key, kind in field_types().items() if (choices := choices_of(key, kind))}
    others = [*({key: dice.choice(choices)} for key, choices in kinds.items()), *dice.sample(TOGETHER, 3)]
    for values in of_mesh + dice.sample(others, len(others) // 2):
        changed = with_values(recipe, values)
        if not any(violations(changed, None, processes=processes, nodes=1, elsewhere=True)):
            recipe = changed
    return recipe


def choices_of(key: str, kind: Any) -> tuple[Any, ...]:
    """The values that a field may get; none if it is left as it is."""
    if key in NUMBERS:
        return NUMBERS[key]
    if key in LEFT_OUT or (key.partition(".")[0] not in SECTIONS and key not in OTHERS):
        return ()
    return get_args(kind) if get_origin(kind) is Literal else (False, True) if kind is bool else ()


def prove_all(seeds: list[int], processes: int, file: str) -> None:
    """Prove the recipes of these seeds in the processes that call this; each verdict is a line of the file."""
    import torch

    world = start("cpu", seed=0)
    for seed in seeds:
        torch.compiler.reset()
        began = time.monotonic()
        with graphs_only():
            verdict = verdict_on(draw(seed, processes), world)
        seconds = time.monotonic() - began
        if world.is_main:
            print(f"{processes} processes, seed {seed}: {verdict.line(seconds)}", flush=True)
            with open(file, "a") as lines:
                lines.write(json.dumps({"seed": seed} | json.loads(verdict.json(seconds))) + "\n")
    stop()


if __name__ == "__main__":
    processes, first, last = map(int, sys.argv[1:4])
    Path(sys.argv[4]).touch()
    for begin in range(first, last + 1, 10):
        left = [*range(begin, min(begin + 10, last + 1))]
        while left:
            try:
                run_processes(processes, prove_all, left, processes, sys.argv[4], timeout=1800)
                left = []
            except AssertionError as error:
                rows = map(json.loads, Path(sys.argv[4]).read_text().splitlines())
                done = {row["seed"] for row in rows if row["processes"] == processes}
                failed, *left = [seed for seed in left if seed not in done]
                print(f"{processes} processes, seed {failed}: FAILED\n{error}", flush=True)
