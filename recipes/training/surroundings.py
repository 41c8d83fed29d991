"""What surrounds the model of a run: rates, predictions, facts for environment.json, and what watches its steps."""

import platform
from typing import TYPE_CHECKING, Any

import torch

from parallel.dist import World, allocator_settings, communication_backend, records_collectives
from parallel.mesh import Mesh
from recipes.files.layout import PROFILE
from recipes.files.version import commit, of_package
from recipes.metrics.throughput import Throughput, device_name
from recipes.recipe.schema import Recipe
from recipes.training.border import Process

if TYPE_CHECKING:
    from recipes.metrics.float8_samples import CastSampler
    from recipes.metrics.profile import StepProfiler
    from recipes.training.build import Built
    from recipes.training.kept_code import KeptCode


def predicted_memory(recipe: Recipe, mesh: Mesh, device: torch.device) -> list[str]:
    """Lines for the log about the peak of a step on a GPU."""
    if device.type != "cuda":
        return []
    if recipe.model.by_transformers:
        return ["memory: as train.py RECIPE --check predicts it, which takes longer than a run should wait"]
    from recipes.plan.memory import predict, summary

    return summary(predict(recipe, mesh.degrees), torch.cuda.get_device_properties(device).total_memory)


def environment_of(process: Process, mesh: Mesh, *, attention: str) -> dict[str, Any]:
    """What environment.json records, on rank 0, which writes it; with several processes, also the speed of what
    connects them. attention: its kernel."""
    world = process.world
    # git looks at every file of the checkout, which may be on a file system that all nodes share.
    about = environment(world_size=world.size, device=world.device) if world.is_main else {}
    about |= {"attention": attention}
    if world.size == 1:
        return about
    from recipes.cluster.links import measure_axes, summary

    found = measure_axes(world, mesh)
    for line in summary(found, world):
        process.console.log(line)
    if world.device.type == "cuda" and not records_collectives():
        process.console.log(f"warning: {NO_RECORD}")
    return about | {"preflight": found}


def throughput(recipe: Recipe, world: World) -> Throughput:
    batch, length = recipe.batch.global_batch_size, recipe.batch.sequence_length
    sizes = {"tokens_per_step": batch * length, "sequence_length": length, "devices": world.size}
    return Throughput(recipe.model, **sizes, device=world.device)


def profiler_of(recipe: Recipe, process: Process) -> "StepProfiler | None":
    """What traces steps of this start, if the recipe asks for that."""
    if not recipe.profile.trace_steps:
        return None
    from recipes.metrics.profile import StepProfiler

    folder, log = recipe.run.folder / PROFILE, process.console.log
    return StepProfiler(recipe.profile, process.world, folder=folder, clock=process.clock, log=log)


def sampler_of(recipe: Recipe, process: Process, built: "Built") -> "CastSampler | None":
    """What counts the float8 casts of some steps, if the recipe asks for that."""
    if not recipe.float8.sample_every:
        return None
    from recipes.metrics.float8_samples import CastSampler

    return CastSampler(
        built.model,
        recipe.float8,
        process.world,
        recipe.run.folder,
        mesh=built.mesh,
        clock=process.clock,
        log=process.console.log,
    )


def code_of(recipe: Recipe, process: Process, mesh: Mesh) -> "KeptCode | None":
    """What keeps compiled code for later starts, if the recipe asks for that."""
    if not (recipe.compile.enabled and recipe.compile.cache):
        return None
    from recipes.training.kept_code import KeptCode

    return KeptCode(recipe, process, mesh)


NO_RECORD = "torch has recorded none of the collectives so far, and hang/nccl-RANK would be as empty"
PACKAGES = ("torch", "torchao", "datasets", "tokenizers", "safetensors", "numpy", "wandb")


def environment(*, world_size: int, device: torch.device) -> dict[str, Any]:
    """Versions, commit and device, so that a number can be traced to what produced it."""
    return {
        **commit(),
        "python": platform.python_version(),
        "packages": {name: of_package(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "device": device_name(device),
        "host": platform.node(),
        "world_size": world_size,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "allocator": allocator_settings() if device.type == "cuda" else None,
        "communication": communication_backend(device.type),
    }
