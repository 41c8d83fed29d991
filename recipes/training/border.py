"""What passes from one stage of a run to the next in the same process."""

import gc
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from parallel.mesh import Mesh
from recipes.metrics.clock import Goodput
from recipes.metrics.writer import MetricsWriter
from recipes.training.interruption import Interruption

if TYPE_CHECKING:
    from recipes.metrics.profile import StepProfiler


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
