"""A plan: what a recipe will need and how fast it will be, before a GPU is rented. Imports no torch."""

from dataclasses import dataclass

from models.config import AttentionFlops
from parallel.config import MeshDegrees
from recipes.plan.hardware import Gpu
from recipes.plan.memory import FULL, Prediction, predict
from recipes.plan.rates import RATES, Rates
from recipes.plan.time import StepTime, step_time
from recipes.recipe.schema import Recipe

DAY = 24 * 3600
"""Seconds of a day."""


@dataclass(frozen=True)
class Cost:
    """The cost of training on a number of tokens, without start-up, validation, checkpoints and restarts."""

    tokens: int
    days: float
    gpu_hours: float
    money: float | None
    """None if no price was given."""


@dataclass(frozen=True)
class Plan:
    """Memory and time of one recipe on one mesh of one kind of GPU."""

    recipe: Recipe
    degrees: MeshDegrees
    gpu: Gpu
    memory: Prediction
    time: StepTime

    @property
    def fits(self) -> bool:
        """Whether the predicted peak leaves room for what is not predicted."""
        return self.memory.peak <= FULL * self.gpu.memory

    @property
    def step_tokens(self) -> int:
        """Tokens of a global batch."""
        return self.recipe.batch.global_batch_size * self.recipe.batch.sequence_length

    @property
    def range(self) -> tuple[float, float]:
        """The shortest and the longest seconds of a step that the spread of the prediction allows."""
        return self.time.step_seconds / (1 + self.time.spread), self.time.step_seconds * (1 + self.time.spread)

    def mfu(self, attention: AttentionFlops) -> float | None:
        """MFU as in recipes/metrics/throughput.py, for whole sequences; None for a CPU, whose peak nobody promises."""
        if self.gpu.family == "measured":
            return None
        flops = self.recipe.model.flops_per_token(self.recipe.batch.sequence_length, attention)
        return self.time.tokens_per_second * flops / self.gpu.bf16_peak

    @property
    def exposed(self) -> float:
        """Seconds of a step in which a GPU waits for messages."""
        return sum(seconds for piece, seconds in self.time.seconds.items() if piece.startswith(MESSAGES))

    def cost(self, *, tokens: int | None = None, price: float | None = None) -> Cost:
        """The cost of training. tokens: by default those of the recipe's steps. price: that of one GPU for one hour."""
        tokens = self.recipe.run.steps * self.step_tokens if tokens is None else tokens
        seconds = tokens / self.step_tokens * self.time.step_seconds
        hours = seconds / 3600 * self.degrees.processes
        return Cost(tokens, seconds / DAY, hours, None if price is None else price * hours)


MESSAGES = "messages: "
"""Prefix of the pieces of a step that are sent, such as "messages: shard, inside nodes"."""


def plan(recipe: Recipe, degrees: MeshDegrees, *, gpu: Gpu, rates: Rates = RATES) -> Plan:
    """Predict memory and time."""
    has_cuda = gpu.family != "measured"
    memory = predict(recipe, degrees, context=has_cuda, imbalance=rates.imbalance)
    return Plan(recipe, degrees, gpu, memory, step_time(recipe, degrees, gpu=gpu, rates=rates))
