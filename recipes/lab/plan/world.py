"""The GPUs that a plan is for, and their number: asked for, in the recipe or its name, in this machine, or assumed.

Imports no torch.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from parallel.config import MeshDegrees
from parallel.errors import UserError
from recipes.metrics.hardware import Hardware, hardware_of
from recipes.plan.hardware import GPUS, Gpu, devices, gpu_named, gpu_of
from recipes.plan.rates import RATES, Rates
from recipes.recipe.fields import one_line
from recipes.recipe.schema import Recipe

ASSUMED = "H100"

LIKE = 0.05
"""How far the memory of a device may be from that of a known GPU with its name, as a share of it."""


@dataclass(frozen=True)
class Asked:
    """What the user said about the GPU."""

    file: str
    """The name of the recipe's file, which may hold a kind of GPU and a number."""
    gpu: str | None = None
    calibrated_by: Path | None = None
    assume: frozenset[str] = frozenset()
    """What all-to-all is assumed to do."""


@dataclass(frozen=True)
class World:
    """The GPUs of a plan, what is known of their speed, and why these."""

    gpu: Gpu
    """The GPU, whose per_node is that of this world."""
    processes: int
    nodes: int = 1
    rates: Rates = RATES
    kind_from: str = ""
    """Where the kind of GPU comes from."""
    number_from: str = ""
    """Where their number comes from."""


def world_of(recipe: Recipe, asked: Asked, *, processes: int | None = None, nodes: int | None = None) -> World:
    """The GPUs to plan for: as asked, or as the recipe or its name says, or else as many as its mesh needs.

    Raises UserError if the processes cannot be divided among the nodes.
    """
    named, named_by = _named(recipe, asked)
    if processes is None and nodes is not None:
        per_node = _device(recipe, asked, processes=1)[0].per_node
        processes, number_from = nodes * per_node, f"--nodes, {per_node} in each"
    elif processes is not None:
        number_from = "--processes"
    elif named:
        processes, nodes, number_from = named.processes, named.nodes, named_by
    else:
        processes, number_from = recipe.mesh.fit(None).processes, "the fewest that the mesh allows"
    gpu, rates, kind_from = _device(recipe, asked, processes=processes)
    if asked.assume and not recipe.model.experts:
        raise UserError(f"--assume: {recipe.model.name} has no experts, whose all-to-all it is about; leave it out")
    rates = replace(rates, assumed=asked.assume)
    nodes = nodes or -(-processes // gpu.per_node)
    if processes % nodes:
        raise UserError(
            f"--processes {processes}: cannot be divided equally among {nodes} nodes; write a multiple of {nodes}, or"
            " the number of nodes: --nodes M"
        )
    if nodes > 1 or processes > gpu.per_node:
        gpu = replace(gpu, per_node=processes // nodes)
    return World(gpu, processes, nodes, rates, kind_from, number_from)


def degrees_of(recipe: Recipe, world: World) -> MeshDegrees:
    """The mesh of the recipe in this world. Raises UserError, in one line, if it does not fit."""
    try:
        return recipe.mesh.fit(world.processes, nodes=world.nodes)
    except UserError as error:
        raise UserError(f"{world.processes:,} {world.gpu.name}: {one_line(error)}") from None


def _named(recipe: Recipe, asked: Asked) -> tuple[Hardware | None, str]:
    """(the hardware that the recipe is for, if it says so, and where it does)."""
    run = recipe.run
    if run.hardware:
        return hardware_of("", written=run.hardware), "from run.hardware"
    return hardware_of(run.name) or hardware_of(asked.file), "from the recipe's name"


def _device(recipe: Recipe, asked: Asked, *, processes: int) -> tuple[Gpu, Rates, str]:
    """The GPU, its rates on so many processes, and where it comes from."""
    gpu = None if asked.gpu is None else gpu_named(asked.gpu)
    if asked.calibrated_by is not None:
        from recipes.plan.calibration import calibrated

        return *calibrated(asked.calibrated_by, gpu, processes=processes), f"measured: {asked.calibrated_by.name}"
    if gpu is not None:
        return gpu, RATES, "--gpu"
    named, named_by = _named(recipe, asked)
    if named:
        return GPUS[named.gpu], RATES, named_by
    if recipe.run.device == "cpu":
        return GPUS[ASSUMED], RATES, 'assumed: run.device is "cpu"'
    for device, memory in devices()[:1]:
        if gpu := known(device, memory):
            return gpu, RATES, "this machine has it"
        return GPUS[ASSUMED], RATES, f"assumed: this machine's {device} is unknown"
    return GPUS[ASSUMED], RATES, "assumed: neither the recipe's name nor this machine has one"


def known(device: str, memory: int) -> Gpu | None:
    """The GPU with this name, as its driver says it, and about as many bytes; None if it is none of GPUS."""
    named = gpu_of(device)
    for gpu in GPUS.values():
        same = named is not None and gpu.name.partition("-")[0] == named.name.partition("-")[0]
        if same and abs(memory - gpu.memory) <= LIKE * gpu.memory:
            return gpu
    return None
