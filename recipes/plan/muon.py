"""What Muon costs in a step: the owners' products, the messages around them, and the memory of a batch.

Owners are dealt the same matrices as in a run (parallel/owners.py). Predicted, not measured. Imports no torch.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from models.config import ModelConfig
from parallel.owners import Shape, deal, newton_schulz_flops
from recipes.plan.hardware import Gpu
from recipes.plan.messages import Group, Seconds
from recipes.plan.rates import Rates
from recipes.plan.work import Work

MOVED = 92
"""Bytes moved per parameter of a shard: 12 for the momentum, 22 sent, 4 packed, 40 to keep the old or the new value,
which depends on whether the step is skipped, and 14 for weight decay and update."""
BATCHES, SQUARES = 4, 2
"""What is live of a batch while it is multiplied: before and after, the next one, and either it as it was sent or the
one before it on its way back; and its Gram matrices and their polynomials. Read off, and a test counts."""


@dataclass(frozen=True)
class Cost:
    """Costs of one step."""

    flops: int
    """FLOPs of all matrices, once for all replicas."""
    busiest: int
    """FLOPs of the owner with most."""
    rounds: int
    gathered: int
    """Bytes that the owner with most gathers, and sends back."""
    shared: int
    """Bytes that a process has once replicas have shared results: its part of all matrices, padded to equal parts."""
    live: int
    """Bytes that live beside the state, at most."""


def matrix_params(model: ModelConfig) -> int:
    """Parameters in the matrices of all blocks, and of all their experts."""
    idle = 3 * model.expert_width * (model.experts - model.experts_per_token) - model.experts  # without routers
    of_experts = (model.layers - len(model.dense)) * model.width * idle if model.experts else 0
    return model.matmul_params() - model.vocabulary * model.width + of_experts


def cost(work: Work) -> Cost:
    """The costs of a step of this work, whose matrices, but for those of experts, all processes share."""
    shapes, layers = tuple(work.linears.values()), -(-work.layers // work.pipeline)
    return _cost(shapes, layers, work.per_layer, work.replicate, work.newton_schulz, work.element)


@lru_cache(256)
def _cost(shapes: tuple[Shape, ...], layers: int, group: int, replicas: int, steps: int, element: int) -> Cost:
    everything = shapes * layers
    rounds, owners = deal(everything, owners=group * replicas), range(group * replicas)
    elements = [[sum(prod(everything[number]) for number in batch) for batch in batches] for batches in rounds]
    squares = [[sum(min(everything[number]) ** 2 for number in batch) for batch in batches] for batches in rounds]
    flops = [newton_schulz_flops(shape, steps=steps) for shape in everything]
    shared = [
        replicas * max(sum(sizes[replica::replicas]) for replica in range(replicas)) // group for sizes in elements
    ]
    batch = max(BATCHES * max(sizes) + SQUARES * max(more) for sizes, more in zip(elements, squares, strict=True))
    return Cost(
        flops=sum(flops),
        busiest=max(sum(flops[number] for batches in rounds for number in batches[owner]) for owner in owners),
        rounds=len(rounds),
        gathered=element * max(sum(sizes[owner] for sizes in elements) for owner in owners),
        shared=element * sum(shared) if replicas > 1 else 0,
        live=element * (batch + (max(shared) if replicas > 1 else 0)),
    )


def messages(work: Work, gpu: Gpu, rates: Rates) -> Seconds:
    """Seconds of the gathering, the way back and the sharing between replicas."""
    seconds, needed = {}, cost(work)
    group = Group("matrices", work.per_layer, 1, gpu, rates)
    replicas = Group("replicate", work.replicate, group.size, gpu, rates)
    if group.size > 1:
        latency = (needed.rounds - 1) * group.latency
        seconds[group.name] = 2 * (group.exchange(needed.gathered) + latency)
    if replicas.size > 1:
        seconds[replicas.name] = replicas.ring(needed.shared) + (needed.rounds - 1) * replicas.latency
    return seconds
