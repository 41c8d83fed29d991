"""Random recipes that --check accepts, to be proved. A seed and a number of processes decide all of a recipe.

`python -m tests.random_recipes PROCESSES FIRST LAST FILE` proves those of these seeds; each verdict is a line of FILE.
"""

import json
import random
import sys
import time
from ast import literal_eval
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torch

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
from tests.twins import lean

MESH = ("pipeline", "replicate", "context", "tensor", "expert")
SECTIONS = "model pipeline attention float8 activation_checkpointing compile fsdp optimizer experts schedule metrics"
FIELDS = {"data.document_mask", "mesh.context_by", "checkpoint.asynchronous"}
LEFT_OUT = {"model.name", "model.weights", "model.config", "model.upcycle", "model.dropout", "attention.backend"}
LEFT_OUT |= {"fsdp.symmetric_memory", "compile.autotune", "metrics.wandb", "metrics.tensorboard"}
NUMBERS = """
model.layers: 2 3 4 5 6 8 12 | model.heads: 2 4 6 8 9 12 16 | model.head_width: 32 64
model.key_value_heads: 1 2 3 4 8 | model.norm_eps: 1e-06 1e-05 | model.rope_theta: 100.0 10000.0 1000000.0
model.no_rope_every: 0 2 3 4 | model.no_rope_layers: () (0,) (1,) (0,1) | model.window: 0 128
model.full_attention_layers: () (0,) (1,) | model.sparse_every: 0 1 2 | model.further_dense_layers: () (0,) (1,)
model.full_attention_every: 0 2 3 | model.attention_scale_width: 0 20 | model.rope_factor: 2.0 8.0
model.logit_softcap: 0.0 5.0 30.0 | model.experts: 0 6 8 64 | model.experts_per_token: 1 2 3 8
model.rope_local_theta: 0.0 50.0 | model.rope_attention_factor: 0.0 1.2 | model.expert_width: 128
model.shared_experts: 0 1 2 | model.dense_layers: 0 1 3 | model.router_scale: 1.0 2.5 | model.expert_groups: 1 2 4
model.groups_per_token: 1 2 | batch.micro_batch_size: 1 2 4 | batch.global_batch_size: 64 96
batch.loss_chunks: 1 2 5 | pipeline.stages_per_rank: 0 1 2 3 | batch.sequence_length: 768 2048
activation_checkpointing.blocks: 1 2 0.5 'all'
float8.exclude: ('lm_head',) ('lm_head','experts') ('lm_head','attention') () | fsdp.prefetch: 1 2
optimizer.matrix_lr: 0.0 0.001 0.02 | optimizer.momentum: 0.8 0.95 | optimizer.ns_steps: 3 5
optimizer.betas: (0.9,0.95) (0.8,0.99) (0.9,0.999) | optimizer.eps: 1e-08 1e-05 | optimizer.weight_decay: 0.0 0.1 0.5
optimizer.z_loss: 0.0 0.0001 0.01 | optimizer.grad_clip: 0.0 1.0 | experts.loss_weight: 0.001 0.05
experts.bias_rate: 0.001 0.01 | experts.z_loss: 0.0 0.001 0.01 | schedule.warmup_steps: 0 10 0.1
schedule.decay_steps: 0 20 0.2 | schedule.min_lr_ratio: 0.0 0.1 | run.loss_spike_z: 0.0 6.0 | run.seed: 0 1 77
optimizer.lr: 0.0001 0.003 | optimizer.qk_clip: 0.0 100.0
"""
"""Values of fields that are neither true or false nor one of several words."""
TOGETHER = """
activation_checkpointing.mode: 'full'
activation_checkpointing.mode: 'selective'
data.prompt_field: 'prompt' | data.answer_field: 'answer'
model.router_bias: True | experts.balance: 'bias' | model.router: 'sigmoid'
pipeline.schedule: 'zbv' | compile.enabled: False | fsdp.reshard_after_forward: False
pipeline.schedule: 'interleaved_zero_bubble' | compile.enabled: False | fsdp.reshard_after_forward: False
fsdp.param_dtype: 'bfloat16' | fsdp.reduce_dtype: 'bfloat16'
float8.recipe: 'tensorwise' | float8.all_gather: True | float8.exclude: ('lm_head',)
model.window: 128 | model.full_attention_every: 2 | model.rope_scaling: 'linear' | model.rope_scaled_layers: 'full'
"""
"""What is only accepted, or only means something, together."""


def draw(seed: int, processes: int) -> Recipe:
    """A recipe for so many processes: a published model with half of all fields redrawn, as far as that is accepted."""
    dice = random.Random(seed * 100 + processes)
    experts = dice.random() < 0.4
    model = dice.choice([size for size in SIZES.values() if bool(size.experts) == experts])
    batch = {"sequence_length": 2048, "global_batch_size": 64, "micro_batch_size": 1}
    recipe = change(load(DEBUG), run={"name": f"random-{seed}"}, model=vars(model), batch=batch)
    of_mesh = [{f"mesh.{axis}": dice.choice((1, 2, 2, 4, 8))} for axis in dice.sample(MESH, len(MESH))]
    choices = {key: some for key, kind in field_types().items() if (some := choices_of(key, kind))}
    singles = [{key: dice.choice(some)} for key, some in choices.items()]
    together = [{key: value for key, [value] in row.items()} for row in rows_of(TOGETHER)]
    fields = singles + dice.sample(together, 3)
    for values in of_mesh + dice.sample(fields, len(fields) // 2):
        changed = with_values(recipe, values)
        if not any(violations(changed, None, processes=processes, nodes=1, elsewhere=True)):
            recipe = changed
    return recipe


def rows_of(table: str) -> list[dict[str, list[Any]]]:
    """The fields of each line of a table, with their values."""
    words = [[field.split() for field in line.split(" | ")] for line in table.strip().splitlines()]
    return [{key.rstrip(":"): [*map(literal_eval, values)] for key, *values in line} for line in words]


def choices_of(key: str, kind: Any) -> list[Any]:
    """The values that a field may get; none if it is left as it is."""
    numbers = {key: values for row in rows_of(NUMBERS) for key, values in row.items()}
    if key in numbers or key in LEFT_OUT or (key.partition(".")[0] not in SECTIONS.split() and key not in FIELDS):
        return numbers.get(key, [])
    return [*get_args(kind)] if get_origin(kind) is Literal else [False, True] if kind is bool else []


def prove_all(recipes: list[Recipe], file: str = "") -> list[str]:
    """Prove recipes in the processes that call this. Returns the verdicts; each is also a line of the file."""
    world, lines = start("cpu", seed=0), []
    for recipe in recipes:
        torch.compiler.reset()
        began = time.monotonic()
        with lean(), graphs_only():
            verdict = verdict_on(recipe, world)
        seconds = time.monotonic() - began
        lines.append(f"{recipe.run.name} on {world.size}: {verdict.line(seconds)}")
        if world.is_main and file:
            print(lines[-1], flush=True)
            with open(file, "a") as rows:
                rows.write(json.dumps({"name": recipe.run.name} | json.loads(verdict.json(seconds))) + "\n")
    stop()
    return lines


def main(processes: int, first: int, last: int, file: str) -> None:
    """Prove the recipes of these seeds, ten in one process group, and go on behind one that fails."""
    left = [draw(seed, processes) for seed in range(first, last + 1)]
    while left:
        try:
            run_processes(processes, prove_all, left[:10], file, timeout=1800)
            left = left[10:]
        except AssertionError as error:
            rows = map(json.loads, Path(file).read_text().splitlines() if Path(file).exists() else ())
            done = {row["name"] for row in rows if row["processes"] == processes}
            failed, *left = [recipe for recipe in left if recipe.run.name not in done]
            print(f"{failed.run.name} on {processes}: FAILED\n{error}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4])
