"""A plan: what a recipe will need and how fast it will be, before a GPU is rented. Imports no torch."""

from dataclasses import dataclass

from parallel.config import MeshDegrees
from recipes.plan.hardware import Gpu
from recipes.plan.memory import FULL, Prediction, predict
from recipes.plan.rates import RATES, Rates
from recipes.plan.time import StepTime, step_time
from recipes.schema import Recipe


@dataclass(frozen=True)
class Plan:
    """Of one recipe on one mesh of one kind of GPU."""

    recipe: Recipe
    degrees: MeshDegrees
    gpu: Gpu
    memory: Prediction
    time: StepTime

    @property
    def fits(self) -> bool:
        """Whether the predicted peak leaves room for what is not predicted."""
        return self.memory.peak <= FULL * self.gpu.memory


def plan(recipe: Recipe, degrees: MeshDegrees, *, gpu: Gpu, rates: Rates = RATES) -> Plan:
    """Predict memory and time."""
    return Plan(recipe, degrees, gpu, predict(recipe, degrees), step_time(recipe, degrees, gpu=gpu, rates=rates))
