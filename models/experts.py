"""Feed-forwards of routed experts: each token is computed by a few of them, and none is dropped.

Routers are outside the blocks: their float32 weights are a unit of their own, and what balances loads is counted once
although a block may be computed again.

B batch, T tokens of a row, N = B T, D model width, F width of an expert, E experts, K experts of a token, R = N K rows.
"""

from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch import Tensor, library, nn
from torch.nn.functional import grouped_mm, linear, silu

from models.config import ModelConfig

Compute = Callable[[Tensor, Tensor], Tensor]
"""From rows (R, D), those of one expert after those of another, and the number of rows of each, to as many rows."""

LIMIT, SLOPE = 7.0, 1.702
"""Of GPT-OSS's activation."""
Routed = tuple[Tensor, Tensor, Tensor]
"""What balancing reads: how many tokens of each row an expert computes, (B, E); sums over these tokens of every
expert's share of the scores, (B, E); the sum over all tokens of log(sum of exponentials of their logits)^2, ()."""


class Router(nn.Module):
    """The parameters that choose experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))
        self.register_parameter("logit_bias", nn.Parameter(torch.empty(config.experts)) if config.biases else None)
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(config.experts) if config.router_bias else None)


class Routers(nn.Module):
    """The routers of all sparse layers, by their layer, and what a step has counted of them."""

    def __init__(self, config: ModelConfig, layers: Collection[int]) -> None:
        super().__init__()
        self.count = config.experts
        self.places = {layer: place for place, layer in enumerate(layers)}
        for layer in layers:
            self.add_module(str(layer), Router(config))
        self.sum_of_rows = nn.Identity()  # of hits, (B, E): replaced where a process has a part of the rows' tokens
        self.sum_of_batch: nn.Module | None = None  # of (1, E): what loads are counted in, if not each row by itself
        self.balance_weight = self.z_weight = 0.0
        self._scale: Tensor | None = None
        self.found = torch.zeros(0)
        """(layers, E + 2): tokens of each expert, balance loss and router z-loss, both summed over tokens."""

    def forward(self) -> dict[int, tuple[Tensor, Tensor | None]]:
        """Layer -> weight in float32, (E, D), or (E, D + 1) where the last column is added to logits; bias of the
        choice, (E,), or None."""
        own = {layer: [*self.get_submodule(str(layer)).parameters()] for layer in self.places}
        return {
            layer: (torch.cat([one.view(self.count, -1) for one in weights], dim=1), self.bias_of(layer))
            for layer, weights in own.items()
        }

    def bias_of(self, layer: int) -> Tensor | None:
        """The bias of a layer's router, (E,), if it has one."""
        return cast(Router, self.get_submodule(str(layer))).bias

    def begin(self, tokens: Tensor) -> None:
        """Count anew, for a step whose global batch has so many tokens."""
        self._scale = 1 / tokens
        self.found = torch.zeros(len(self.places), self.count + 2, device=tokens.device)

    def noted(self, layer: int, x: Tensor, routed: Routed) -> Tensor:
        """What a sparse block has returned, without what balancing reads: that is counted, and its losses are added.

        The balance loss is one of each row by itself (DeepSeek-V3, section 2.1.2), E / (K T) x hits x mean share,
        summed over experts, times T: so it adds up to the same on any mesh and with any number of micro-batches. Over
        the batch (arXiv 2501.11873), hits are those of all processes in the micro-batches of the step up to this one,
        and K T their sum: the global batch where each has one micro-batch, else what is known of it by then.
        """
        hits, probabilities, squares = routed
        if self._scale is None or not torch.is_grad_enabled():
            return x
        place = self.places[layer]
        if self.sum_of_batch is None:
            whole = self.sum_of_rows(hits)
        else:
            whole = self.sum_of_batch(self.found[place, None, :-2] + hits.sum(0))  # (1, E)
        shares = whole * self.count / whole.sum(1, keepdim=True)  # (B, E); 1 each if loads are equal
        balance = (shares * probabilities).sum()
        of_step = [hits.sum(0), torch.stack([balance.detach(), squares.detach()])]
        self.found[place] += torch.cat(of_step)
        if not (self.balance_weight or self.z_weight):
            return x
        loss = self.balance_weight * balance + self.z_weight * squares
        return cast(Tensor, _WithLoss.apply(x, loss, self._scale))


class _WithLoss(torch.autograd.Function):
    """Its first argument, and a loss that is added to that of the model: its gradient begins here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.clone()  # not a view, which a pipeline that splits its backward pass cannot detach

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        [scale] = ctx.saved_tensors
        return gradient, scale, None


class SparseFeedForward(nn.Module):
    """Routed experts and, perhaps, experts that compute all tokens."""

    def __init__(self, config: ModelConfig, *, shared: nn.Module | None) -> None:
        """shared: what computes all tokens."""
        super().__init__()
        self.config = config
        self.experts, self.exchange = Experts(config), Exchange()
        self.shared_experts = shared

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Routed]:
        """x: (B, T, D); weight, bias: of the router, as Routers returns them. Returns (B, T, D), and what balancing
        reads."""
        tokens, chosen = x.flatten(0, 1), self.config.experts_per_token
        weight, added = (weight[:, :-1], weight[:, -1]) if self.config.biases else (weight, None)
        logits = linear(tokens.float(), weight, added)  # (N, E)
        scores = logits.sigmoid() if self.config.router == "sigmoid" else logits.softmax(-1)
        experts = self._best(scores.detach() if bias is None else scores.detach() + bias)  # (N, K)
        weights = scores.gather(1, experts)
        if self.config.normalize_scores:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        hits = scores.new_zeros(len(x), self.config.experts)
        hits.scatter_add_(1, experts.view(len(x), -1), torch.ones_like(hits[:, :1]).expand(-1, x.shape[1] * chosen))
        order = experts.flatten().argsort(stable=True)  # (R,)
        inverse = inverted(order)
        rows = _Copied.apply(tokens, order, inverse, chosen)  # (R, D)
        rows = permuted(self.exchange(rows, hits.sum(0).long(), self.experts), inverse, order)
        out = rows.unflatten(0, (-1, chosen))  # (N, K, D)
        # In the order of the choice, which is the same on any mesh.
        y = (out * (weights * self.config.router_scale).to(out.dtype)[..., None]).sum(1).view_as(x)
        shares = scores / scores.sum(-1, keepdim=True)
        routed = hits, shares.view(len(x), -1, self.config.experts).sum(1), logits.logsumexp(-1).square().sum()
        return y if self.shared_experts is None else y + self.shared_experts(x), routed

    def _best(self, scores: Tensor) -> Tensor:
        """The experts of each token, (N, K), of those groups of experts whose best scores, two or one, are most."""
        groups, kept = self.config.expert_groups, self.config.groups_per_token
        if kept < groups:
            by_group = scores.unflatten(1, (groups, -1))  # (N, groups, E / groups)
            count = 2 if self.config.expert_groups_by == "two" else 1
            best = by_group.topk(count, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
            outside = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, False)
            scores = by_group.masked_fill(outside[..., None], -torch.inf).flatten(1)
        return scores.topk(self.config.experts_per_token, dim=-1).indices


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """GPT-OSS's activation (arXiv 2508.10925): silu with another slope, of clamped gates, times 1 + clamped factors."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * (SLOPE * gate).sigmoid() * (up + 1)


class Experts(nn.Module):
    """A gated linear unit by each expert, of the rows that are its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, width, inner = config.experts, config.width, config.expert_width
        self.gate_proj = nn.Parameter(torch.empty(count, inner, width))
        self.up_proj = nn.Parameter(torch.empty(count, inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))
        for name, features in (("gate_bias", inner), ("up_bias", inner), ("down_bias", width)):
            self.register_parameter(name, nn.Parameter(torch.empty(count, features)) if config.biases else None)
        self.clamps = config.activation == "swiglu_clamped"
        self.matrices = nn.Identity()  # those of the experts that are here, (E', ...): expert parallelism replaces it

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: (R, D), those of one expert after those of another; counts: (E,), how many of each. Returns (R, D)."""
        ends = counts.cumsum(0).to(torch.int32)
        gate, up, down = (self.matrices(whole) for whole in (self.gate_proj, self.up_proj, self.down_proj))
        biases = (self.gate_bias, self.up_bias, self.down_bias)
        of_gate, of_up, of_down = (None if whole is None else self.matrices(whole) for whole in biases)
        gated, factors = by_experts(rows, gate, ends, of_gate), by_experts(rows, up, ends, of_up)
        inner = clamped_swiglu(gated, factors) if self.clamps else silu(gated) * factors
        return by_experts(inner, down, ends, of_down)


class Exchange(nn.Module):
    """Brings rows to the experts and back. Here they are in one place; expert parallelism replaces this."""

    def forward(self, rows: Tensor, counts: Tensor, compute: Compute) -> Tensor:
        """rows: (R, D), sorted by expert; counts: (E,). Returns what their experts make of them, (R, D)."""
        return compute(rows, counts)


def inverted(order: Tensor) -> Tensor:
    """The permutation that undoes this one."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """rows[order]; the gradient is a permutation, too, not a sum in an order that a device chooses."""
    return cast(Tensor, _Copied.apply(rows, order, inverse, 1))


class _Copied(torch.autograd.Function):
    """As many copies of each row as `copies`, in the order of their indexes among all copies."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows[order // copies]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        [inverse] = ctx.saved_tensors
        copies = gradient[inverse]
        return copies if ctx.copies == 1 else copies.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


# Operators, so that torch.compile neither looks into them nor asks for sizes that follow from routing. (torch's own
# grouped product has a fake kernel for bfloat16 only, up to 2.13.)


@library.custom_op("shardwright::by_experts", mutates_args=())
def by_experts(rows: Tensor, matrices: Tensor, ends: Tensor, biases: Tensor | None = None) -> Tensor:
    """Each row by the matrix of its expert: (R, in), (E, out, in) -> (R, out). ends: (E,), where their rows end.
    biases: (E, out), which are added."""
    made = grouped_mm(rows, matrices.mT, offs=ends)
    if biases is not None:
        made += biases.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), dim=0, output_size=len(rows))
    return made


@by_experts.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor, biases: Tensor | None = None) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[1])


@library.custom_op("shardwright::gradient_of_experts", mutates_args=())
def gradient_of_experts(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """The gradient of by_experts() for its matrices: (R, out), (R, in) -> (E, out, in)."""
    return grouped_mm(gradient.mT, rows, offs=ends)


@gradient_of_experts.register_fake
def _(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], gradient.shape[1], rows.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    *kept, biases = inputs
    ctx.save_for_backward(*kept)
    ctx.adds = biases is not None


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, matrices, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    # A sum over rows as a product with ones, as many as a row of 16 bytes has: in one order, and read once.
    ones = gradient.new_ones(len(rows), 8) if ctx.adds else None
    of_biases = None if ones is None else gradient_of_experts(gradient, ones, ends)[..., 0]
    return by_experts(gradient, matrices.mT, ends), gradient_of_experts(gradient, rows, ends), None, of_biases


by_experts.register_autograd(_gradients, setup_context=_keep)
