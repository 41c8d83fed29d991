"""Every number of a plan for scripts, not rounded: `--plan --json`. Imports no torch."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from parallel.config import MeshDegrees
from recipes.lab.plan.plan import Plan, World
from recipes.lab.plan.screen import IMBALANCE, Money, StagePlan, cost_of_all, unequal
from recipes.plan.hardware import Gpu
from recipes.plan.memory import FULL, Prediction
from recipes.recipe.schema import Recipe


def numbers_of(plan: Plan, money: Money) -> dict[str, Any]:
    time, (shortest, longest) = plan.time, plan.range
    model, worst, processes = plan.recipe.model, unequal(plan), plan.world.processes
    return {
        "recipe": plan.recipe.run.name,
        "parameters": model.num_params(),
        "active_parameters": model.active_params(),
        **numbers_of_world(plan.recipe, plan.world, plan.degrees),
        "tokens_per_step": plan.step_tokens,
        **numbers_of_memory(plan.memory, plan.world.gpu),
        "tokens_per_second": time.tokens_per_second * processes,
        "tokens_per_second_per_device": time.tokens_per_second,
        "tokens_per_second_per_device_range": [time.tokens / longest, time.tokens / shortest],
        "step_seconds": time.step_seconds,
        "step_seconds_range": [shortest, longest],
        "seconds": time.seconds,
        "hidden_seconds": time.hidden,
        "mfu": plan.mfu("causal"),
        "mfu_full": plan.mfu("full"),
        "unequal_loads": worst
        and {
            "imbalance": IMBALANCE,
            "fits": worst.fits,
            "peak_memory_gib": worst.memory.peak / 2**30,
            "tokens_per_second_per_device": worst.time.tokens_per_second,
        },
        "calibrated": plan.world.rates.calibrated,
        "evidence": time.evidence,
        "assumed": sorted(plan.world.rates.assumed),
        "cost": {**asdict(money.of(plan)), "price": money.price},
        "loss": money.loss(plan),
    }


def numbers_of_world(recipe: Recipe, world: World, degrees: MeshDegrees) -> dict[str, Any]:
    """The GPUs, and how they share the batch."""
    return {
        "gpu": world.gpu.name,
        "gpu_from": world.kind_from,
        "processes": world.processes,
        "processes_from": world.number_from,
        "nodes": world.nodes,
        "degrees": asdict(degrees),
        "global_batch_size": recipe.batch.global_batch_size,
        "micro_batch_size": recipe.batch.micro_batch_size,
    }


def numbers_of_memory(memory: Prediction, gpu: Gpu) -> dict[str, Any]:
    """Whether it fits, and every piece at every moment."""
    return {
        "fits": memory.peak <= FULL * gpu.memory,
        "peak_memory_gib": memory.peak / 2**30,
        "gpu_memory_gib": gpu.memory / 2**30,
        "fullest": memory.fullest + memory.where,
        "memory_gib": {
            moment: {piece: count / 2**30 for piece, count in pieces.items()}
            for moment, pieces in memory.moments.items()
        },
    }


def stages_numbers(stages: Sequence[StagePlan]) -> dict[str, Any]:
    with_steps = [
        {"stage": one.stage.name, "first_step": one.stage.first + 1, "last_step": one.stage.last}
        | numbers_of(one.plan, one.money)
        for one in stages
    ]
    fits = all(planned.plan.fits for planned in stages)
    return {"stages": with_steps, "fits": fits, "cost": {**asdict(cost_of_all(stages)), "price": stages[0].money.price}}
