"""A plan: what a recipe will need and how fast it will be, before a GPU is rented. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from models.config import AttentionFlops
from parallel.config import MeshDegrees
from recipes.data.config import BatchConfig
from recipes.lab.plan.world import Asked, World, degrees_of, world_of
from recipes.plan.memory import FULL, Prediction, predict
from recipes.plan.time import StepTime, step_time
from recipes.recipe.fields import Problem, refusal
from recipes.recipe.rules import violations
from recipes.recipe.schema import Recipe

DAY = 24 * 3600
"""Seconds of a day."""
MESSAGES = "messages: "
"""Prefix of the pieces of a step that are sent, such as "messages: shard, inside nodes"."""


@dataclass(frozen=True)
class TrainingCost:
    """The cost of training on a number of tokens, without start-up, validation, checkpoints and restarts."""

    tokens: int
    days: float
    gpu_hours: float
    money: float | None
    """None if no price was given."""


@dataclass(frozen=True)
class Plan:
    """Memory and time of one recipe on some GPUs."""

    recipe: Recipe
    degrees: MeshDegrees
    world: World
    memory: Prediction
    time: StepTime

    @property
    def fits(self) -> bool:
        """Whether the predicted peak leaves room for what is not predicted."""
        return self.memory.peak <= FULL * self.world.gpu.memory

    @property
    def step_tokens(self) -> int:
        """Tokens of a global batch."""
        return self.recipe.batch.global_batch_size * self.recipe.batch.sequence_length

    @property
    def range(self) -> tuple[float, float]:
        """The shortest and the longest seconds of a step that the spread of the prediction allows."""
        return self.time.step_seconds / (1 + self.time.spread), self.time.step_seconds * (1 + self.time.spread)

    def mfu(self, attention: AttentionFlops) -> float:
        """MFU as in recipes/metrics/throughput.py, for whole sequences."""
        flops = self.recipe.model.flops_per_token(self.recipe.batch.sequence_length, attention)
        return self.time.tokens_per_second * flops / self.world.gpu.bf16_peak

    @property
    def exposed(self) -> float:
        """Seconds of a step in which a GPU waits for messages."""
        return sum(seconds for piece, seconds in self.time.seconds.items() if piece.startswith(MESSAGES))

    def cost(self, *, tokens: int | None = None, price: float | None = None) -> TrainingCost:
        """The cost of training. tokens: by default those of the recipe's steps. price: that of one GPU for one hour."""
        tokens = self.recipe.run.steps * self.step_tokens if tokens is None else tokens
        seconds = tokens / self.step_tokens * self.time.step_seconds
        hours = seconds / 3600 * self.degrees.processes
        return TrainingCost(tokens, seconds / DAY, hours, None if price is None else price * hours)


def plan(recipe: Recipe, world: World) -> Plan:
    """Predict memory and time. Raises UserError if the mesh does not fit these GPUs."""
    degrees = degrees_of(recipe, world)
    memory = predict(recipe, degrees, imbalance=world.rates.imbalance)
    return Plan(recipe, degrees, world, memory, step_time(recipe, degrees, gpu=world.gpu, rates=world.rates))


def plans_of_sizes(recipe: Recipe, asked: Asked, *, processes: Sequence[int]) -> list[Plan]:
    """A plan for each of these numbers of processes, with the batch that so many can divide.

    Raises UserError for a number that the mesh does not fit.
    """
    plans = []
    for number in dict.fromkeys(processes):
        world = world_of(recipe, asked, processes=number)
        shares = degrees_of(recipe, world).data_parallel
        fitting = replace(recipe, batch=nearest_batch(recipe.batch, shares=shares))
        broken = violations(fitting, None, processes=number, nodes=world.nodes, elsewhere=True)
        if problems := [Problem(key, message) for key, message in broken]:
            raise refusal(problems, where=f"the recipe on {number} processes")
        plans.append(plan(fitting, world))
    return plans


def nearest_batch(batch: BatchConfig, *, shares: int) -> BatchConfig:
    """The batch itself if so many equal shares can be made of it; or else the nearest, of at least one sequence each.

    What is trained stays if it can: the micro-batch, which changes the speed only, gives way before the global batch.
    """
    size, micro = batch.global_batch_size, batch.micro_batch_size
    fitting = max(1, round(size / shares)) * shares
    share = fitting // shares
    return replace(
        batch,
        global_batch_size=fitting,
        micro_batch_size=max(rows for rows in range(1, min(micro, share) + 1) if share % rows == 0),
    )
