"""Which GPU a plan is made for, and how many: asked for, in the recipe's name, in this machine, or assumed.

Imports no torch.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace

from parallel.errors import UserError
from recipes.mesh_rules import fitted_mesh
from recipes.metrics.hardware import bf16_peak, hardware_of
from recipes.plan.hardware import GPUS, Gpu, gpu_named
from recipes.schema import Recipe

ASSUMED = "H100"
LIKE = 0.05
"""How far the memory of a device may be from that of a known GPU with its name, as a share of it."""


@dataclass(frozen=True)
class World:
    """The GPUs of a plan, and why these."""

    gpu: Gpu
    """Its per_node is that of this world."""
    processes: int
    nodes: int
    kind_from: str
    """Where the kind of GPU comes from."""
    number_from: str
    """Where their number comes from."""


def world_of(
    recipe: Recipe, *, kind: tuple[Gpu, str], file: str = "", processes: int | None = None, nodes: int | None = None
) -> World:
    """The GPUs to plan for. Raises UserError if the processes cannot be divided among the nodes.

    Args:
        recipe: its name may hold a number of GPUs, or else its mesh decides.
        kind: the GPU, and where it comes from, as kind_of returns them.
        file: the name of the recipe's file, which may hold a number, too.
        processes: as asked.
        nodes: as asked.
    """
    gpu, kind_from = kind
    named = hardware_of(recipe.run.name) or hardware_of(file)
    if processes is None and nodes is not None:
        processes, number_from = nodes * gpu.per_node, f"--nodes, {gpu.per_node} in each"
    elif processes is not None:
        number_from = "--processes"
    elif named:
        processes, nodes, number_from = named.processes, named.nodes, "from the recipe's name"
    else:
        processes, number_from = fitted_mesh(recipe.mesh, None, None).processes, "the fewest that the mesh allows"
    nodes = nodes or -(-processes // gpu.per_node)
    if processes % nodes:
        raise UserError(
            f"--processes {processes}: cannot be divided equally among {nodes} nodes; write a multiple of {nodes}, or"
            " the number of nodes: --nodes M"
        )
    if nodes > 1 or processes > gpu.per_node:
        gpu = replace(gpu, per_node=processes // nodes)
    return World(gpu, processes, nodes, kind_from, number_from)


def kind_of(recipe: Recipe, *, name: str | None, file: str = "") -> tuple[Gpu, str]:
    """The kind of GPU and where it comes from. name: as asked. Raises UserError for an unknown one."""
    if name is not None:
        return gpu_named(name), "--gpu"
    if named := hardware_of(recipe.run.name) or hardware_of(file):
        return GPUS[named.gpu], "from the recipe's name"
    for device, memory in _devices():
        found = known(device, memory)
        return (
            (found, "this machine has it") if found else (GPUS[ASSUMED], f"assumed: this machine's {device} is unknown")
        )
    return GPUS[ASSUMED], "assumed: neither the recipe's name nor this machine has one"


def known(device: str, memory: int) -> Gpu | None:
    """The GPU with this name, as its driver says it, and about as many bytes; None if it is none of GPUS."""
    if "PCIe" in device:  # without the links between GPUs that the others have
        return None
    for gpu in GPUS.values():
        words = re.escape(gpu.name.partition("-")[0])
        same = re.search(rf"\b{words}\b", device) and bf16_peak(device) == gpu.bf16_peak
        if same and abs(memory - gpu.memory) <= LIKE * gpu.memory:
            return gpu
    return None


def _devices() -> Iterator[tuple[str, int]]:
    """Name and bytes of each GPU of this machine, from its driver's own tool, because torch takes a second."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return
    for name, mebibytes in re.findall(r"^(.+), (\d+)\s*$", found.stdout, flags=re.MULTILINE):
        yield name, int(mebibytes) * 2**20
