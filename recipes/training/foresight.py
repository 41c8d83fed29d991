"""How far a run's plan was off: predicted before its first step, compared after its last one. Imports no torch."""

from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from models.transformers_config import TransformersConfig
from parallel.config import MeshDegrees
from parallel.errors import UserError
from recipes.files.reading import user_path
from recipes.plan.calibration import calibrated
from recipes.plan.hardware import gpu_of
from recipes.plan.rates import RATES
from recipes.plan.time import step_time
from recipes.recipe.fields import toml
from recipes.recipe.schema import Recipe

LEAST_ROWS = 3
"""Logged steps after the first one, which compiles, that a comparison needs."""


@dataclass
class Foresight:
    """A prediction, and the steps that it is compared with."""

    predicted: float
    """Seconds per step."""
    by: str
    """What the prediction's rates were calibrated by; empty if by nothing."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of each logged step."""

    def row(self) -> dict[str, Any]:
        """The row for metrics.jsonl; empty with too few steps."""
        if len(self.seconds) <= LEAST_ROWS:
            return {}
        measured = median(self.seconds[1:])
        seconds = {"predicted_seconds": self.predicted, "measured_seconds": measured}
        return {"plan": seconds | {"ratio": measured / self.predicted, "calibrated": self.by}}

    def line(self, row: dict[str, Any]) -> str:
        """The row as a line for people."""
        plan, by = row["plan"], self.by or "not calibrated"
        times = f"{plan['measured_seconds']:.3g} s per step, {self.predicted:.3g} predicted"
        return f"plan: {times} ({plan['ratio']:.2f} times as long; {by})"


def foresight(recipe: Recipe, degrees: MeshDegrees, *, device: str, nodes: int) -> Foresight | None:
    """The prediction for a run on these devices; None where none can be made: an unknown GPU, or what is not modelled.

    Raises UserError for a file of metrics.calibrated_by that is wrong.
    """
    processes, file = degrees.processes, recipe.metrics.calibrated_by
    gpu, rates = gpu_of(device), RATES
    if file:
        measured, rates = calibrated(user_path(file), gpu, processes=processes)
        if measured.name != (gpu.name if gpu else device):
            raise UserError(f"metrics.calibrated_by = {toml(file)}: measured on {measured.name}, but this is {device}")
        gpu = measured
    if gpu is None or isinstance(recipe.model, TransformersConfig) or recipe.model.uncounted(by_plan=True):
        return None
    try:
        predicted = step_time(recipe, degrees, gpu=replace(gpu, per_node=processes // nodes), rates=rates)
    except UserError:  # no reason to end a run
        return None
    return Foresight(predicted.step_seconds, rates.calibrated)
