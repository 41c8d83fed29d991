"""Predict the seconds of a training step, piece by piece. Imports no torch."""

from dataclasses import dataclass

from parallel.config import MeshDegrees
from recipes.plan.hardware import Gpu
from recipes.schema import Recipe


@dataclass(frozen=True)
class StepTime:
    """One optimizer step on one device."""

    tokens: int
    """That this device's share of the batch has: those of a step divided by the number of devices."""
    seconds: dict[str, float]
    """By piece: what computes, and what is sent and not hidden. They add up to the step."""
    hidden: dict[str, float]
    """Seconds of messages behind computation, by piece."""
    spread: float
    """How far the step may be off, as a share of it."""
    calibrated: str = ""
    """By what the rates were calibrated; empty if by nothing."""

    @property
    def step_seconds(self) -> float:
        """Of one optimizer step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Per device."""
        return self.tokens / self.step_seconds


def step_time(recipe: Recipe, degrees: MeshDegrees, *, gpu: Gpu) -> StepTime:
    """What a step of the recipe takes on a mesh of these degrees."""
    batch = recipe.batch
    tokens = batch.global_batch_size * batch.sequence_length // degrees.processes
    flops = 6 * recipe.model.matmul_params() * tokens
    return StepTime(tokens, {"products": flops / (0.7 * gpu.bf16_peak)}, {}, 0.5)
