"""Seconds of messages in a step, by axis of the mesh and place, and what computation hides of them; what Muon costs.

NCCL sends along rings: each byte crosses every link once, each of n - 1 steps has its latency. Inside a node a ring
uses NVLink. A ring through several nodes enters and leaves each of them by the adapters of all its members there, and
is as fast as the slower of the two. Where each exchanges parts with each, as context groups exchange tokens for heads,
what goes to other nodes leaves by a process's own adapter.

FSDP gathers a block's weights while the block before it computes, and reduces gradients while the next one does. The
first gather and the last reduction have nothing to hide behind. On ZeRO-3 both share the backward pass.
Imports no torch.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from models.config import ModelConfig
from parallel.owners import Shape, deal, newton_schulz_flops
from recipes.plan.hardware import Gpu
from recipes.plan.rates import Rates
from recipes.plan.routing import DEDUPLICATED, HIDDEN
from recipes.plan.work import Work

Seconds = dict[str, float]
"""Seconds of messages by name, such as "messages: shard, inside nodes"."""
MUON_MOVED = 92
"""Bytes moved per parameter of a shard: 12 for the momentum, 22 sent, 4 packed, 40 to keep the old or the new value,
which depends on whether the step is skipped, and 14 for weight decay and update."""
BATCHES, SQUARES = 4, 2
"""What is live of a batch while it is multiplied: before and after, the next one, and either it as it was sent or the
one before it on its way back; and its Gram matrices and their polynomials. Read off, and a test counts."""


@dataclass(frozen=True)
class Messages:
    """Seconds of the messages of one step: those that cost time, and those behind computation."""

    exposed: Seconds = field(default_factory=dict)
    hidden: Seconds = field(default_factory=dict)

    def add(self, sent: Seconds, *, hiding: float, times: float = 1.0) -> None:
        """Add messages that are sent `times` times, of which computation hides `hiding` seconds each time."""
        total = sum(sent.values())
        share = min(1.0, hiding / total) if total else 0.0
        for name, seconds in sent.items():
            for where, part in ((self.exposed, 1 - share), (self.hidden, share)):
                if part:
                    where[name] = where.get(name, 0.0) + times * part * seconds


@dataclass(frozen=True)
class Group:
    """Processes that exchange messages: every `stride`-th one of a mesh."""

    axis: str
    size: int
    stride: int
    gpu: Gpu
    rates: Rates

    @cached_property
    def in_node(self) -> int:
        """Members of one node."""
        return max(1, min(self.size, self.gpu.per_node // self.stride))

    @cached_property
    def nodes(self) -> int:
        return -(-self.size // self.in_node)

    @cached_property
    def name(self) -> str:
        return f"messages: {self.axis}, {'inside' if self.nodes == 1 else 'between'} nodes"

    @cached_property
    def rate(self) -> float:
        """Bytes per second of the slowest link of a ring."""
        if self.nodes > 1:
            return min(self.inside, self.in_node * self.rates.network * self.gpu.network)
        return self.inside

    @cached_property
    def inside(self) -> float:
        """Bytes per second between members of one node."""
        rate = self.rates.link * self.gpu.link
        if not self.gpu.switched:
            rate *= (self.in_node - 1) / (self.gpu.per_node - 1) if self.in_node > 1 else 1.0
        return rate

    @cached_property
    def latency(self) -> float:
        """Seconds of a ring without bytes."""
        crossings = self.nodes if self.nodes > 1 else 0
        return self.rates.collective + (self.size - self.nodes) * self.rates.hop + crossings * self.rates.node_hop

    def ring(self, amount: float) -> float:
        """Seconds to gather so many bytes in all members, or to scatter their sum."""
        return self.latency + amount * (self.size - 1) / self.size / self.rate if self.size > 1 else 0.0

    def exchange(self, amount: float, *, chosen: int = 0) -> float:
        """Seconds in which each member sends a part of so many bytes to each: to other nodes by its own adapter.

        chosen: experts of a token that goes to each node, and then to each process there, at most once; 0 = to each
        expert by itself.
        """
        if self.size == 1:
            return 0.0
        part = amount / self.size
        outside = part * (self.size - self.in_node) / (self.rates.network * self.gpu.network)
        inside = part * (self.in_node - 1) / self.inside
        if chosen:  # the mean number of different nodes, and processes, among so many choices
            outside *= self.nodes * (1 - (1 - 1 / self.nodes) ** chosen) / chosen
            inside = inside * self.nodes * self.size * (1 - (1 - 1 / self.size) ** chosen) / chosen
        return self.latency + max(inside, outside)

    def pass_on(self, amount: float) -> float:
        """Seconds to send so many bytes to the next member, by the own adapter of each process between nodes."""
        rate, hop = self.rates.link * self.gpu.link, self.rates.hop
        if self.nodes > 1:
            rate, hop = min(rate, self.rates.network * self.gpu.network), self.rates.node_hop
        return self.rates.collective + hop + amount / rate

    def sum(self, amount: float) -> float:
        """Seconds to sum so many bytes in all members: a scatter and a gather, along trees of nodes."""
        if self.size == 1:
            return 0.0
        up = (self.in_node - 1) * self.rates.hop + math.ceil(math.log2(self.nodes)) * self.rates.node_hop
        return self.rates.collective + 2 * up + 2 * amount * (self.size - 1) / self.size / self.rate


def messages_of(work: Work, gpu: Gpu, rates: Rates, *, forward: float, backward: float) -> Messages:
    """The messages of one step. forward, backward: seconds of computation of one layer for one micro-batch."""
    messages = Messages()
    again = work.recomputed if work.recompute == "full" else 0.0
    times = work.micro_batches * work.own_layers
    hidden = rates.overlapped if work.overlap_tensor else 0.0
    for scatters, passes in ((2, 1 + again), (work.scatters, 1.0)) if work.tensor * work.context > 1 else ():
        sent = _inside_blocks(work, gpu, rates, scatters=scatters)
        messages.add(sent, hiding=hidden * sum(sent.values()), times=times * passes)
    if work.experts and work.experts.degree > 1:
        behind = forward + backward if HIDDEN in rates.assumed | work.experts.assumed else 0.0
        messages.add(_exchanges(work, gpu, rates, again=again), hiding=behind, times=times * work.experts.share)
    group = Group("tensor", work.tensor, 1, gpu, rates)
    if small := small_sums(work):
        messages.add({group.name: group.sum(0)}, hiding=0.0, times=small)
    if work.whole_loss and work.tensor > 1:
        logits = work.tokens * work.vocabulary * work.element
        messages.add({group.name: group.ring(logits)}, hiding=0.0, times=work.micro_batches)
    _fully_sharded(work, gpu, rates, messages, forward=forward, backward=backward)
    if work.stages:
        copy = Group("pipeline", work.pipeline, work.replicate * work.per_layer, gpu, rates)
        sent = {copy.name: copy.pass_on(work.tokens * work.width * work.element / work.tensor)}
        # torch's 1F1B waits for each message; with several stages, it asks for one before it is needed.
        hidden = forward * work.layers / (work.pipeline * work.virtual) if work.virtual > 1 else 0.0
        messages.add(sent, hiding=hidden, times=2 * work.micro_batches * work.virtual)
    return messages


def small_sums(work: Work) -> float:
    """Number of messages in a tensor group, per step, that are only latency.

    FSDP sums the gradient of each norm, and tensorwise float8 finds four largest magnitudes of each linear: of what is
    cut among weight, input and gradient of the output, in the forward pass and in the backward one.
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _get_grad_inner_tensor; torchao/float8/float8_linear.py)
    """
    if work.tensor == 1:
        return 0.0
    layers = work.own_layers
    linears = 6 + work.gated - len(work.plain_linears) if work.float8 == "tensorwise" else 0
    reductions = work.micro_batches if work.reduces_each else 1
    return reductions * (2 * layers + 1) + work.micro_batches * layers * 4 * linears


def _inside_blocks(work: Work, gpu: Gpu, rates: Rates, *, scatters: int) -> Seconds:
    """Seconds of one pass of one layer, by group: two gathers of tokens and `scatters` sums of them, or exchanges."""
    seconds = {}
    if work.tensor > 1:
        group = Group("tensor", work.tensor, 1, gpu, rates)
        amount = work.tokens * work.width * work.element
        gathers = 2 * group.ring(amount / (2 if work.float8_activations else 1))
        copies = (2 + scatters) * 2 * amount / (rates.moved * gpu.bandwidth) if work.copies_tokens else 0.0
        seconds[group.name] = gathers + scatters * group.ring(amount) + copies
    if work.context > 1:
        group = Group("context", work.context, work.tensor, gpu, rates)
        query, key = work.query / work.tensor, work.key / work.tensor
        if work.context_by == "heads":
            heads = work.key // (work.tensor * work.head_width)
            copies = work.context // math.gcd(work.context, heads)  # of keys and values, so that each process has some
            seconds[group.name] = 2 * group.exchange(work.tokens * (query + copies * key) * work.element)
        else:
            seconds[group.name] = group.ring(work.tokens * work.context * 2 * key * work.element)
    return seconds


def _exchanges(work: Work, gpu: Gpu, rates: Rates, *, again: float) -> Seconds:
    """Seconds of all-to-all in one sparse layer, forward and backward. again: share of the layers that send again.

    Nothing hides them: no product of the layer begins before all rows are there. --assume may say otherwise.
    """
    assert work.experts is not None
    group = Group("expert", work.experts.degree, 1, gpu, rates)
    chosen = work.experts.chosen if DEDUPLICATED in rates.assumed | work.experts.assumed else 0
    amount = work.expert_rows(rates.imbalance) * work.width * work.element
    there_and_back = 2 * group.exchange(amount, chosen=chosen)
    return {group.name: (2 + again) * there_and_back + (1 + again) * group.exchange(0)}  # and how many rows


def _fully_sharded(work: Work, gpu: Gpu, rates: Rates, found: Messages, *, forward: float, backward: float) -> None:
    """Gathers of weights and reductions of gradients of all blocks and both tables."""
    shard = Group("shard", work.shard * work.context, work.tensor, gpu, rates)
    replicas = Group("replicate", work.replicate, work.tensor * shard.size, gpu, rates)
    if shard.size * replicas.size == 1:
        return
    parts = work.tensor * work.pipeline
    block, layers = work.block_params / work.tensor, work.own_layers
    experts, of_experts = work.expert_params, Group("shard", 1, 1, gpu, rates)
    if work.experts and work.experts.degree * work.tensor == 1:
        block, experts = block + experts, 0.0  # with the rest
    elif work.experts:
        of_experts = Group("expert shard", work.expert_shards, work.experts.degree, gpu, rates)
    table = work.vocabulary * work.width / parts
    element = work.gathered

    def reduction(params: float, experts: float = 0.0) -> Seconds:
        sums = {shard.name: shard.ring(work.reduced * params)} if shard.size > 1 else {}
        if experts and of_experts.size > 1:
            sums[of_experts.name] = of_experts.ring(work.reduced * experts)
        own = work.reduced * params / shard.size + work.reduced * experts / of_experts.size
        return sums | ({replicas.name: replicas.sum(own)} if replicas.size > 1 else {})

    gather = {shard.name: shard.ring(element * block)} if shard.size > 1 else {}
    first = {shard.name: shard.ring(work.element * table) + shard.ring(element * block)} if gather else {}
    if experts and of_experts.size > 1:
        gather[of_experts.name] = first[of_experts.name] = of_experts.ring(work.element * experts)
    reduced, last = reduction(block, experts), reduction(table)
    both = {name: gather.get(name, 0.0) + reduced.get(name, 0.0) for name in {**gather, **reduced}}
    micro_batches = work.micro_batches
    gathers = micro_batches if work.reshard else 1
    reductions = micro_batches if work.reduces_each else 1
    found.add(first, hiding=0.0, times=gathers)
    found.add(gather, hiding=forward, times=gathers * (layers - 1))
    if work.stages:  # what is gathered in the backward passes; gradients are reduced after them
        found.add(gather, hiding=backward, times=gathers * (layers - 1) if work.reshard else 0)
        found.add(reduced, hiding=0.0, times=layers - 1)
    elif work.reshard:
        found.add(gather, hiding=backward, times=(micro_batches - reductions) * (layers - 1))
        found.add(both, hiding=backward, times=reductions * (layers - 1))
    else:
        found.add(reduced, hiding=backward, times=reductions * (layers - 1))
    found.add(reduced, hiding=0.0, times=reductions)
    found.add(last, hiding=0.0, times=reductions)


@dataclass(frozen=True)
class MuonCost:
    """What Muon costs in one step. Owners are dealt the same matrices as in a run (parallel/owners.py)."""

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


def muon_cost(work: Work) -> MuonCost:
    """The costs of a step of this work, whose matrices, but for those of experts, all processes share."""
    shapes, layers = tuple(work.linears.values()), -(-work.layers // work.pipeline)
    return _muon_cost(shapes, layers, work.per_layer, work.replicate, work.newton_schulz, work.element)


@lru_cache(256)
def _muon_cost(shapes: tuple[Shape, ...], layers: int, group: int, replicas: int, steps: int, element: int) -> MuonCost:
    everything = shapes * layers
    rounds, owners = deal(everything, owners=group * replicas), range(group * replicas)
    elements = [[sum(math.prod(everything[number]) for number in batch) for batch in batches] for batches in rounds]
    squares = [[sum(min(everything[number]) ** 2 for number in batch) for batch in batches] for batches in rounds]
    flops = [newton_schulz_flops(shape, steps=steps) for shape in everything]
    shared = [
        replicas * max(sum(sizes[replica::replicas]) for replica in range(replicas)) // group for sizes in elements
    ]
    batch = max(BATCHES * max(sizes) + SQUARES * max(more) for sizes, more in zip(elements, squares, strict=True))
    return MuonCost(
        flops=sum(flops),
        busiest=max(sum(flops[number] for batches in rounds for number in batches[owner]) for owner in owners),
        rounds=len(rounds),
        gathered=element * max(sum(sizes[owner] for sizes in elements) for owner in owners),
        shared=element * sum(shared) if replicas > 1 else 0,
        live=element * (batch + (max(shared) if replicas > 1 else 0)),
    )


def muon_messages(work: Work, gpu: Gpu, rates: Rates) -> Seconds:
    """Seconds of the gathering, the way back and the sharing between replicas."""
    seconds, needed = {}, muon_cost(work)
    group = Group("matrices", work.per_layer, 1, gpu, rates)
    replicas = Group("replicate", work.replicate, group.size, gpu, rates)
    if group.size > 1:
        latency = (needed.rounds - 1) * group.latency
        seconds[group.name] = 2 * (group.exchange(needed.gathered) + latency)
    if replicas.size > 1:
        seconds[replicas.name] = replicas.ring(needed.shared) + (needed.rounds - 1) * replicas.latency
    return seconds
