"""One process of a run: what it has from its first stage to its last, and what environment.json says about it."""

import os
import platform
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from parallel.dist import World, allocator_settings, communication_backend, records_collectives
from parallel.mesh import Mesh
from recipes.files.lock import FolderLock
from recipes.files.version import commit, of_package
from recipes.metrics.clock import Goodput, RunClock
from recipes.metrics.throughput import device_name
from recipes.metrics.writer import MetricsWriter
from recipes.training.console import Console
from recipes.training.interruption import Interruption

if TYPE_CHECKING:
    from recipes.evaluation.beside import Beside
    from recipes.metrics.profile import StepProfiler

NO_RECORD = "torch has recorded none of the collectives so far, and hang/nccl-RANK would be as empty"
PACKAGES = ("torch", "torchao", "datasets", "tokenizers", "safetensors", "numpy", "wandb")


@dataclass(frozen=True)
class Process:
    """One process of a run. This goes on when a stage ends; all else is built again, from the checkpoint at its end."""

    world: World
    """Its rank, and the other processes."""
    console: Console
    clock: RunClock
    lock: FolderLock = field(default_factory=FolderLock)
    """That of the run's folder, held for as long as this process lives."""
    interruption: Interruption = field(default_factory=Interruption)
    profiler: "StepProfiler | None" = None
    """Traces steps of this start, if the recipe asks for that."""
    # None until its first stage is built:
    metrics: MetricsWriter | None = None
    goodput: Goodput | None = None
    beside: "Beside | None" = None  # on rank 0 only, of runs that ask for evaluations beside them
    # What its results are counted from:
    first_step: int = 0
    """The steps that were completed when it began to train."""
    trains_since: float = 0.0
    """The time then, by time.perf_counter()."""

    def environment(self, mesh: Mesh, *, attention: str) -> dict[str, Any]:
        """What environment.json records, on rank 0, which writes it; with several processes, also the speed of what
        connects them. attention: its kernel."""
        world = self.world
        # git looks at every file of the checkout, which may be on a file system that all nodes share.
        about = environment(world_size=world.size, device=world.device) if world.is_main else {}
        command = [os.path.abspath(word) if os.path.isfile(word) else word for word in sys.argv]  # for any folder
        about |= {"attention": attention, "nodes": len(world.nodes), "command": command}
        if world.size == 1:
            return about
        from recipes.cluster.links import measure_axes, summary

        links = measure_axes(world, mesh)
        for line in summary(links, world):
            self.console.log(line)
        if world.device.type == "cuda" and not records_collectives():
            self.console.log(f"warning: {NO_RECORD}")
        return about | {"preflight": links}


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
