"""A process of a run: what it has throughout, what it begins to train from, and what it takes from stage to stage."""

import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from parallel.dist import World
from parallel.mesh import Mesh
from recipes.files.layout import CHECKPOINTS, step_folder
from recipes.metrics.clock import Goodput, RunClock
from recipes.metrics.writer import MetricsWriter
from recipes.recipe.schema import Recipe
from recipes.training.console import Console
from recipes.training.interruption import Interruption

if TYPE_CHECKING:
    from recipes.metrics.profile import StepProfiler


@dataclass(frozen=True)
class Process:
    """One process of a run."""

    world: World
    """Its place among the others."""
    console: Console
    clock: RunClock


@dataclass(frozen=True)
class Beginning:
    """What a process begins to train from."""

    step: int = 0
    checkpoint: Path | None = None
    """None = the weights of the recipe."""
    of_trunk: bool = False
    """Whether it is another run's, see fork.py."""

    @classmethod
    def own(cls, recipe: Recipe, step: int) -> "Beginning":
        """The run's own checkpoint of this step."""
        return cls(step, step_folder(recipe.run.folder / CHECKPOINTS, step))

    def note_origin(self, recipe: Recipe) -> None:
        """Write down what the run is a fork of, if it begins as one."""
        if self.of_trunk and self.checkpoint is not None:
            from recipes.training.fork import note_origin

            note_origin(recipe, self.checkpoint)


@dataclass(frozen=True)
class Start:
    """Where this process began to train."""

    step: int
    tokens: int
    seconds: float
    """The time then, by time.perf_counter()."""


@dataclass(frozen=True)
class Kept:
    """What goes on when a stage ends. Everything else is built again, from the checkpoint at its end."""

    step: int
    """The step of that checkpoint."""
    mesh: Mesh
    """The mesh, which is used again if the next stage has the same degrees."""
    interruption: Interruption
    metrics: MetricsWriter
    goodput: Goodput
    profiler: "StepProfiler | None"
    start: Start


class FellBack(Exception):
    """The checkpoint of a stage is damaged, and the next older one, of this step, belongs to another stage."""

    def __init__(self, step: int) -> None:
        super().__init__(f"resumed from step {step}")
        self.step = step


def free_memory() -> None:
    """Free what the stage that has ended held: its model and moments, and the code compiled for them."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
