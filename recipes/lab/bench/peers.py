"""Our training step beside other loops that train the same model: part of `bench.py --suite overhead`.

The model is that of smollm3_debug with 27 million parameters in 8 blocks, on random tokens. Each loop runs in processes
of its own, as its users would start it, and all loops of a table take turns, so that a change of the machine's load
affects them alike.
"""

import copy
import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from models.decoder import Decoder
from models.interface import blocks_of
from models.loss import IGNORED
from parallel.config import MeshConfig
from parallel.dist import World, keep_freed_memory, start
from parallel.fsdp import materialize
from parallel.passes import sum_over_group
from parallel.stages import costs_of
from recipes.data.batches import MicroBatch
from recipes.lab.bench.turns import MeasuredLoop, Turns
from recipes.metrics.clock import RunClock
from recipes.optimization.optimizer import build_optimizer
from recipes.optimization.skip_steps import StepGuard
from recipes.recipe.load import CONFIGS, load
from recipes.recipe.rules_pipeline import stages_in
from recipes.recipe.schema import Recipe
from recipes.training.build import build
from recipes.training.step import train_step

KINDS = ("float32", "bf16", "compiled")
"""Compute types: "compiled" is float32 with every block compiled."""
TOLERANCE = 1e-2
"""Relative, of the first loss of all loops: beyond it they do not train the same model."""
SHAPE = {
    **{"model.layers": 8, "model.width": 512, "model.feed_forward_width": 1408, "model.heads": 8},
    **{"model.key_value_heads": 8, "model.head_width": 64, "model.no_rope_every": 0, "model.vocabulary": 4096},
    **{"batch.sequence_length": 128, "batch.global_batch_size": 8, "batch.micro_batch_size": 4},
}
OURS, SHARDED, PLAIN, DDP = "ours", "ours, sharded", "plain loop", "DDP"
"""Ours is replicated on two processes, as DDP is."""
STAGES = {"ours, 1f1b": "1f1b", "ours, interleaved": "interleaved"}
"""Ours in a pipeline, by schedule."""
TRAINER = "transformers' Trainer"
Loop = Callable[[], float]
"""Takes one optimizer step; returns its loss."""
Times = dict[str, list[float]]
"""Seconds per step of each window, by loop."""


def peers(
    kinds: Sequence[str],
    overrides: list[str],
    *,
    processes: int,
    windows: int,
    steps: int,
    others: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Kind -> loop -> median seconds per step, median of the ratio to ours, its median_interval(), all windows.

    others: the loops beside ours; None = those of other programs.
    """
    recipe(kinds[0], overrides)  # an error in them is raised here, once
    names = [OURS, *(others or ((PLAIN, TRAINER) if processes == 1 else (SHARDED, DDP)))]
    if missing_for_trainer():
        names = [name for name in names if name != TRAINER]
    found = {}
    for kind in kinds:
        with ExitStack() as ending:
            loops: dict[str, MeasuredLoop] = {}
            losses = {}
            for name in names:
                settings = {"name": name, "kind": kind, "overrides": overrides, "steps": steps}
                loops[name] = MeasuredLoop(f"{name} in {kind}", _work, settings, processes=processes)
                ending.callback(loops[name].close)
                losses[name] = loops[name].first_loss()
            _require_same_losses({name: loss for name, loss in losses.items() if loss is not None})
            times: Times = {name: [] for name in names}
            for window in range(windows):  # the order changes from window to window
                for name in sorted(names, reverse=window % 2 == 1):
                    times[name].append(loops[name].turn() / steps)
        found[kind] = {name: _compared(seconds, times[OURS]) for name, seconds in times.items()}
    return found


def _compared(seconds: list[float], ours: list[float]) -> dict[str, Any]:
    """One loop's entry of peers(), from the seconds per step of its windows and of the same windows of ours."""
    ratios = [theirs / mine for theirs, mine in zip(seconds, ours, strict=True)]
    return {
        "seconds": statistics.median(seconds),
        "ratio": statistics.median(ratios),
        "ratio_interval": median_interval(ratios),
        "windows": seconds,
    }


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest (k-th smallest, k-th largest value) that holds the true median in at least 95% of cases.

    This is the interval of the sign test, which assumes nothing about how the values are distributed: how many of n are
    below the median is binomial with probability 1/2. None for fewer than six values: no k reaches 95%.
    """
    ordered, n, k = sorted(values), len(values), 0
    # The median is beyond the k-th value from an end if fewer than k values are on that side of it.
    while sum(math.comb(n, fewer) for fewer in range(k + 1)) / 2**n <= 0.025:
        k += 1
    return (ordered[k - 1], ordered[-k]) if k else None


def table(found: dict[str, Any], *, processes: int) -> str:
    """The medians for people: one line per kind and loop."""
    title = "one process" if processes == 1 else f"{processes} processes"
    lines = [f"{title:<36} {'s/step':>8} {'time / ours':>12} {'95% interval':>16}"]
    for kind, loops in found.items():
        for name, row in loops.items():
            interval = row["ratio_interval"]
            shown = "{:.3f} to {:.3f}".format(*interval) if interval else "too few windows"
            lines.append(f"{f'{kind}, {name}':<36} {row['seconds']:8.3f} {row['ratio']:12.3f} {shown:>16}")
    if processes == 1 and not any(TRAINER in loops for loops in found.values()):
        lines.append(f"{TRAINER}: not measured, because {' and '.join(missing_for_trainer())} cannot be imported")
    return "\n".join(lines)


def recipe(kind: str, overrides: list[str]) -> Recipe:
    """What ours trains."""
    fixed = {**SHAPE, "fsdp.param_dtype": "bfloat16" if kind == "bf16" else "float32", "run.device": "cpu"}
    fixed |= {"fsdp.reshard_after_forward": "false", "compile.enabled": str(kind == "compiled").lower()}
    options = [word for name, value in fixed.items() for word in (f"--{name}", str(value))]
    return load(CONFIGS / "smollm3_debug.toml", [*options, *overrides])


def _work(turns: Turns, rank: int, processes: int, *, name: str, kind: str, overrides: list[str], steps: int) -> None:
    """Take turns of so many steps in this process, one of those that peers() starts and ends."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    ours = recipe(kind, overrides)
    batch = _batch(ours, rank, processes)
    if name == TRAINER:
        return _trainer(ours, batch, turns, steps=steps)
    if name in STAGES:
        step = _ours(_in_stages(ours, name, processes), start("cpu", seed=0), _batch(ours, 0, 1))
    elif name in (OURS, SHARDED):
        mesh = ours.mesh if name == SHARDED else MeshConfig(replicate=processes, shard=1)
        step = _ours(replace(ours, mesh=mesh), start("cpu", seed=0), batch)
    elif name == PLAIN:
        keep_freed_memory()  # as ours does; DDP and the Trainer run as their users start them
        step = _plain(ours, batch)
    else:
        dist.init_process_group("gloo")
        step = _ddp(ours, batch)
    loss = step()
    step()  # allocators and thread pools have warmed up after the second
    turns.ready(loss)
    while True:
        turns.begin()
        for _ in range(steps):
            step()
        turns.end()


def _in_stages(ours: Recipe, name: str, processes: int) -> Recipe:
    config = replace(ours.pipeline, schedule=cast(Any, STAGES[name]))
    return replace(ours, mesh=MeshConfig(shard=1, pipeline=processes), pipeline=config)


def bubbles(overrides: list[str], *, processes: int) -> dict[str, dict[str, float]]:
    """Loop -> the share of a step in which the first process of a pipeline computes nothing: seen, and predicted."""
    found = {}
    for name in STAGES:
        ours = _in_stages(recipe("float32", overrides), name, processes)
        stages, count = stages_in(ours, degree=processes), ours.batch.global_batch_size // ours.batch.micro_batch_size
        layer, head = costs_of(ours.model, ours.batch.sequence_length)
        loads = [layer * len(stages.layers_of(rank)) + head * (rank == stages.ends[1]) for rank in range(processes)]
        slots = count + (processes - 1) / ours.pipeline.runs
        found[name] = {"predicted": 1 - count * loads[0] / (slots * max(loads))}
        settings = {"name": name, "overrides": overrides}
        with closing(MeasuredLoop(name, _idle, settings, processes=processes)) as loop:
            found[name]["seen"] = cast(float, loop.first_loss())  # what it says when it is ready
    return found


def _idle(turns: Turns, rank: int, processes: int, *, name: str, overrides: list[str]) -> None:
    """Say the median of a few steps: the share of the time in which this process's thread had no processor."""
    torch.set_num_threads(1)  # others would compute unseen
    ours = recipe("float32", overrides)
    step = _ours(_in_stages(ours, name, processes), start("cpu", seed=0), _batch(ours, 0, 1))
    shares = []
    for _ in range(9):
        dist.barrier()
        begin, busy = time.perf_counter(), time.thread_time()
        step()
        shares.append(1 - (time.thread_time() - busy) / (time.perf_counter() - begin))
    turns.ready(statistics.median(shares[2:]))


def _batch(recipe: Recipe, rank: int, processes: int) -> list[MicroBatch]:
    """This process's micro-batches of one global batch."""
    batch, generator = recipe.batch, torch.Generator().manual_seed(0)
    shape = (batch.global_batch_size, batch.sequence_length + 1)
    mine = torch.randint(recipe.model.vocabulary, shape, generator=generator).chunk(processes)[rank]
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous(), None) for part in mine.split(batch.micro_batch_size)]


def _require_same_losses(losses: dict[str, float]) -> None:
    for name, loss in losses.items():
        if abs(loss / losses[OURS] - 1) > TOLERANCE:
            raise RuntimeError(f"{name} starts with the loss {loss}, but ours with {losses[OURS]}: not the same model")


def _ours(recipe: Recipe, world: World, batch: list[MicroBatch]) -> Loop:
    built, clock = build(recipe, world), RunClock(world.device)
    guard = StepGuard(built.mesh, device=world.device, max_skipped_steps=1)
    numbers = count(1)

    def step() -> float:
        number, rate = next(numbers), recipe.optimizer.lr
        found = train_step(built, batch, step=number, learning_rate=rate, guard=guard, clock=clock)
        return sum_over_group(found.loss, built.mesh.loss_group).item()

    return step


def _model(recipe: Recipe) -> Decoder:
    """A model with the same weights as ours, without FSDP."""
    with torch.device("meta"):
        model = Decoder(recipe.model, loss_chunks=recipe.batch.loss_chunks)
    materialize(model, device=torch.device("cpu"), seed=recipe.run.seed)
    return model


def _compile(recipe: Recipe, model: nn.Module) -> None:
    for block in blocks_of(model) if recipe.compile.enabled else ():
        block.compile(fullgraph=True)


def _plain(recipe: Recipe, batch: list[MicroBatch]) -> Loop:
    """The leanest loop that computes the same numbers.

    In bf16 a copy of the model computes, to which the weights are cast once per step, and gradients are summed in
    float32: no autocast could cast less.
    """
    model = _model(recipe)
    weights: list[Tensor] = list(model.parameters())
    optimizer = build_optimizer(model, recipe.optimizer)
    low = copy.deepcopy(model).to(torch.bfloat16) if recipe.fsdp.param_dtype == "bfloat16" else None
    used: list[Tensor] = list(low.parameters()) if low else []
    _compile(recipe, low or model)

    def step() -> float:
        if used:
            with torch.no_grad():
                torch._foreach_copy_(used, weights)
        total = torch.zeros(())
        targets = sum(int((part != IGNORED).sum()) for _, part, _ in batch)
        for inputs, part, _ in batch:
            loss = (low or model)(inputs, part) / targets
            loss.backward()
            total += loss.detach()
            _add_gradients(weights, used)
        clip_grad_norm_(weights, recipe.optimizer.grad_clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step


def _add_gradients(weights: list[Tensor], used: list[Tensor]) -> None:
    """Move the gradients of the bfloat16 copies to the float32 weights."""
    for weight, copied in zip(weights, used, strict=False):
        assert copied.grad is not None
        if weight.grad is None:
            weight.grad = copied.grad.float()
        else:
            weight.grad += copied.grad
        copied.grad = None


def _ddp(recipe: Recipe, batch: list[MicroBatch]) -> Loop:
    """torch's DistributedDataParallel; in bf16 under autocast. It averages gradients, so losses are scaled."""
    model = _model(recipe)
    optimizer = build_optimizer(model, recipe.optimizer)
    _compile(recipe, model)
    replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
    weights = list(model.parameters())
    low = recipe.fsdp.param_dtype == "bfloat16"

    def step() -> float:
        total = torch.zeros(())
        targets = torch.stack([(part != IGNORED).sum() for _, part, _ in batch]).sum()
        dist.all_reduce(targets)
        for index, (inputs, part, _) in enumerate(batch):
            last = index == len(batch) - 1
            with nullcontext() if last else replicated.no_sync(), torch.autocast("cpu", torch.bfloat16, enabled=low):
                loss = replicated(inputs, part) / targets
                (loss * dist.get_world_size()).backward()
            total += loss.detach()
        clip_grad_norm_(weights, recipe.optimizer.grad_clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item()

    return step


def missing_for_trainer() -> list[str]:
    """Packages that transformers' Trainer needs, of which this project needs neither."""
    return [name for name in ("transformers", "accelerate") if find_spec(name) is None]


def _trainer(recipe: Recipe, batch: list[MicroBatch], turns: Turns, *, steps: int) -> None:
    """Transformers' Trainer on a Llama of this shape."""
    for name in ("torchao", "torch.utils._pytree", "transformers"):  # notes to their own developers
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    shape = recipe.model
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            intermediate_size=shape.feed_forward_width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_value_heads,
            head_dim=shape.head_width,
            tie_word_embeddings=shape.tied_embeddings,
        )
    )
    rows = [{"input_ids": row, "labels": row} for inputs, _, _ in batch for row in cast(torch.Tensor, inputs)]
    warm_up, many = 3, 10_000  # steps; peers() ends this process long before the last one

    class InTurns(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            done = state.global_step - warm_up
            if done >= 0 and done % steps == 0:
                if done:
                    turns.end()
                else:
                    turns.ready(None)
                turns.begin()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=many,
            per_device_train_batch_size=recipe.batch.micro_batch_size,
            gradient_accumulation_steps=len(batch),
            learning_rate=recipe.optimizer.lr,
            lr_scheduler_type="constant",
            max_grad_norm=recipe.optimizer.grad_clip,
            optim="adamw_torch_fused",
            bf16=recipe.fsdp.param_dtype == "bfloat16",
            torch_compile=recipe.compile.enabled,
            use_cpu=True,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        dataset = rows * many
        trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[InTurns()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
