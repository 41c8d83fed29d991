"""What a training step on a CPU is made of, measured in several processes at once, which share the cores.

`bench.py --suite calibrate` starts it. Each process measures while the others do the same.
"""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from models.loss import EAGER, Kernels, cross_entropy_sum
from parallel.dist import World, all_gather_single, start, stop
from parallel.kernels import compiled_loss_kernels
from recipes.files.screen import say
from recipes.metrics.clock import RunClock
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.optimizer import build_optimizer
from recipes.optimization.skip_steps import StepGuard
from recipes.plan.host import recipe_of
from recipes.recipe.schema import Recipe
from recipes.training.build import build
from recipes.training.step import train_step

SECONDS = 0.3
"""Seconds of each measurement."""
WINDOWS = 5
TIMES = ("seconds", "forward", "backward", "all_gather", "reduce_scatter")
Rows = list[dict[str, Any]]


def measure(world: World) -> dict[str, Rows]:
    """Every group of measurements of this process."""
    groups = (products, attention, loss, optimizer, links, steps)
    return {group.__name__: list(group(world)) for group in groups}


def seconds_of(call: Callable[[], Any], world: World, *, seconds: float = SECONDS) -> float:
    """The time in which all processes make a call once: a mean over many, and the median of such means.

    The mean, because of processes that share a core only some calls are interrupted; and until all have finished, as in
    a step, because those that are let through first would seem fast.
    """
    for _ in range(2):
        call()
    begin = time.perf_counter()
    call()
    once = torch.tensor(time.perf_counter() - begin)
    dist.broadcast(once, 0)
    calls = max(1, round(seconds / WINDOWS / max(float(once), 1e-7)))
    means = []
    for _ in range(WINDOWS):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        dist.barrier()
        means.append((time.perf_counter() - begin) / calls)
    return median(means)


def products(world: World) -> Iterator[dict[str, Any]]:
    """The three products of linears: tokens x in times in x out, and both of the backward pass."""
    for kind in (torch.float32, torch.bfloat16):
        for tokens in (384, 768):
            for inner, outer in ((96, 96), (192, 192), (192, 640), (640, 192), (384, 384), (384, 1152), (192, 3072)):
                x, weight = torch.randn(tokens, inner, dtype=kind), torch.randn(outer, inner, dtype=kind)
                gradient = torch.randn(tokens, outer, dtype=kind)
                calls: dict[tuple[int, int, int], Callable[[], Any]] = {
                    (tokens, outer, inner): partial(torch.matmul, x, weight.t()),
                    (tokens, inner, outer): partial(torch.matmul, gradient, weight),
                    (outer, inner, tokens): partial(torch.matmul, gradient.t(), x),
                }
                for shape, call in calls.items():
                    middle = seconds_of(call, world, seconds=SECONDS / 3)
                    yield {"kind": str(kind)[6:], "shape": shape, "seconds": middle}


def attention(world: World) -> Iterator[dict[str, Any]]:
    """Causal, as models/attention.py calls it."""
    for width in (16, 32, 64, 128):
        for length in (192, 384):
            shapes = [(2, heads, length, width) for heads in (4, 2, 2)]
            query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
            gradient = torch.randn_like(query)

            def forward(query: Any = query, key: Any = key, value: Any = value) -> Any:
                return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

            def both(run: Any = forward, inputs: Any = (query, key, value), gradient: Any = gradient) -> None:
                torch.autograd.grad(run(), inputs, gradient)

            once, twice = (seconds_of(call, world) for call in (forward, both))
            facts = {"batch": 2, "heads": 4, "head_width": width, "tokens": length}
            yield facts | {"forward": once, "backward": twice - once}


def loss(world: World) -> Iterator[dict[str, Any]]:
    """Forward and backward, as in a run: eager, whole and in chunks, and compiled."""
    logits, targets = torch.randn(1, 768, 3072), torch.randint(3072, (1, 768))
    kinds = {"eager": (EAGER, 1), "chunked": (EAGER, 4), "compiled": (compiled_loss_kernels(), 1)}
    copied = seconds_of(logits.clone, world)
    for kind, (kernels, chunks) in kinds.items():

        def both(kernels: Kernels = kernels, chunks: int = chunks) -> None:
            values = logits.clone().requires_grad_()  # all but the first kind overwrite them
            torch.autograd.grad(cross_entropy_sum(values, targets, chunks=chunks, kernels=kernels), values)

        seconds = max(0.0, seconds_of(both, world) - copied)
        yield {"kind": kind, "logits": logits.numel(), "seconds": seconds}


def optimizer(world: World) -> Iterator[dict[str, Any]]:
    """AdamW over parameters of one shape."""
    for tensors, rows in ((8, 256), (8, 1024), (32, 256)):
        layers = nn.ParameterList(nn.Parameter(torch.randn(rows, 384)) for _ in range(tensors))
        for parameter in layers:
            parameter.grad = torch.randn_like(parameter)
        adamw = build_optimizer(layers, OptimizerConfig())
        middle = seconds_of(adamw.step, world)
        yield {"parameters": tensors * rows * 384, "tensors": tensors, "seconds": middle}


def links(world: World) -> Iterator[dict[str, Any]]:
    """All-gather and reduce-scatter of so many bytes in all."""
    if world.size == 1:
        return
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name from torch 2.13 on
    for length in (2**14, 2**18, 2**20, 2**22):
        whole, part = torch.zeros(length), torch.zeros(length // world.size)
        gather = seconds_of(partial(all_gather_single, whole, part), world)
        reduce = seconds_of(partial(reduce_scatter, part, whole), world)
        yield {"bytes": 4 * length, "all_gather": gather, "reduce_scatter": reduce}


TINY = {
    **{"model.width": 32, "model.feed_forward_width": 64, "model.heads": 2, "model.key_value_heads": 1},
    **{"model.head_width": 16, "model.vocabulary": 64, "batch.sequence_length": 16, "batch.micro_batch_size": 1},
}
"""A model so small that a step is what the host does."""
BLOCKS = {
    **{"model.width": 192, "model.feed_forward_width": 640, "model.heads": 4, "model.key_value_heads": 2},
    **{"model.head_width": 48, "model.vocabulary": 1024, "batch.sequence_length": 192, "batch.micro_batch_size": 2},
}
"""A model so large that element-wise operators show."""
STEPS: tuple[dict[str, Any], ...] = (
    TINY | {"model.layers": 2, "micro_batches": 1},
    TINY | {"model.layers": 6, "micro_batches": 1},
    TINY | {"model.layers": 2, "micro_batches": 3},
    TINY | {"model.layers": 6, "micro_batches": 3},
    TINY | {"model.layers": 6, "micro_batches": 3, "fsdp.reshard_after_forward": False},
    TINY | {"model.layers": 6, "micro_batches": 3, "activation_checkpointing.mode": "selective"},
    TINY | {"model.layers": 6, "micro_batches": 3, "activation_checkpointing.mode": "full"},
    TINY | {"model.layers": 6, "micro_batches": 3, "compile.enabled": True},
    BLOCKS | {"model.layers": 4, "micro_batches": 2},
    BLOCKS | {"model.layers": 4, "micro_batches": 2, "activation_checkpointing.mode": "selective"},
    BLOCKS | {"model.layers": 4, "micro_batches": 2, "activation_checkpointing.mode": "full"},
    BLOCKS | {"model.layers": 4, "micro_batches": 2, "compile.enabled": True},
    BLOCKS | {"model.layers": 4, "micro_batches": 3, "fsdp.reshard_after_forward": False},
    BLOCKS | {"model.layers": 2, "micro_batches": 3, "batch.sequence_length": 320},
)


def steps(world: World) -> Iterator[dict[str, Any]]:
    """Whole training steps of small models."""
    for changes in STEPS:
        recipe = recipe_of(changes, world.size)
        step = stepper(recipe, world)
        yield {"changes": changes, "seconds": seconds_of(step, world, seconds=4 * SECONDS)}


def stepper(recipe: Recipe, world: World) -> Callable[[], Any]:
    """A function that takes one step."""
    torch.compiler.reset()  # else the blocks of several models count as one that is compiled again and again
    built, clock = build(recipe, world), RunClock(world.device)
    batch = recipe.batch
    tokens = torch.randint(recipe.model.vocabulary, (batch.global_batch_size // world.size, batch.sequence_length))
    micro_batches = [(part, part, None) for part in tokens.split(batch.micro_batch_size)]
    guard = StepGuard(built.mesh, device=world.device, max_skipped_steps=1)

    def step() -> None:
        train_step(built, micro_batches, step=1, learning_rate=1e-4, guard=guard, clock=clock)

    return step


def main(arguments: list[str]) -> int:
    """Measure in this process; rank 0 writes the means over processes into the named file. Returns the exit code."""
    if len(arguments) != 1:
        say("operators: started by bench.py --suite calibrate, with a file to write", to=2)
        return 2
    world = start("cpu", seed=0)
    measured = measure(world)
    everyone = world.messages.from_all(measured)
    for group, rows in measured.items():
        for number, row in enumerate(rows):
            row |= {name: fmean(their[group][number][name] for their in everyone) for name in TIMES if name in row}
    if world.is_main:
        Path(arguments[0]).write_text(json.dumps(measured), encoding="utf-8")
    stop()
    return 0
