"""A plan: what a recipe will need and how fast it will be, before a GPU is rented; and which GPUs, how many: asked for,
in the recipe or its name, in this machine, or assumed. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from models.config import AttentionFlops
from parallel.config import MeshDegrees
from parallel.errors import UserError
from recipes.data.config import BatchConfig
from recipes.metrics.hardware import Hardware, hardware_of
from recipes.plan.hardware import GPUS, Gpu, devices, gpu_named, gpu_of
from recipes.plan.memory import FULL, Prediction, predict
from recipes.plan.rates import RATES, Rates
from recipes.plan.time import StepTime, step_time
from recipes.recipe.fields import Problem, one_line, refusal
from recipes.recipe.rules import violations
from recipes.recipe.schema import Recipe

DAY = 24 * 3600
"""Seconds of a day."""
MESSAGES = "messages: "
"""Prefix of the pieces of a step that are sent, such as "messages: shard, inside nodes"."""
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
        fitting = replace(recipe, batch=nearest_batch(recipe.batch, shares=degrees_of(recipe, world).data_parallel))
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
