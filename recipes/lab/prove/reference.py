"""What one process computes for itself: the plain model of a twin, eagerly, one micro-batch after the other.

It shares the model with what is proved, and little else: neither FSDP, checkpointing, compilation nor offloading, and
rules of its own for what decays, how gradients are clipped, what is added for the balance of experts, and which biases
move. It never validates what it trains, is never interrupted and skips nothing: it is told which steps do not count.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW, Optimizer

from models.attention import InnerAttention
from models.experts import Routed, SparseFeedForward
from models.interface import blocks_of, interface_of
from models.loss import IGNORED
from recipes.data.batches import MicroBatch
from recipes.lab.prove.twin import FEW, OTHER, SAVED, TEXT, Twin
from recipes.optimization.after_step import rows_of
from recipes.optimization.config import OptimizerConfig
from recipes.training.build import plain_model

Tensors = dict[str, Tensor]
TIE = 5e-6
"""Scores that differ by this share may be in another order on a mesh, after some steps of float32."""


@dataclass
class Record:
    """What a training found, mostly by step. Tensors are whole, and on the host."""

    repeats: bool = False
    """Whether every process must have found the same by itself, to the bit."""
    initial: Tensors = field(default_factory=dict)
    """Parameters and buffers before the first step."""
    gradients: Tensors = field(default_factory=dict)
    """Those of the first step."""
    losses: dict[int, float] = field(default_factory=dict)
    source_losses: dict[int, dict[str, float]] = field(default_factory=dict)
    """Of each text of a mixture, by the name of its file."""
    z_losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    """Steps that changed nothing."""
    validation: dict[int, float] = field(default_factory=dict)
    loads: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> how many tokens of the first step each expert has, (E,)."""
    router_losses: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> balance loss and router z-loss of the first step, summed over tokens, (2,)."""
    state: dict[int, Tensors] = field(default_factory=dict)
    """Parameters and buffers after a step."""
    guard: dict[int, list[float]] = field(default_factory=dict)
    """After the save, how many steps in a row were skipped; after the last step, the losses that one is judged by."""
    ended: str = ""
    """Why the run gave up, if it did."""


class Alone:
    """A plain model, its optimizer, and a record of its steps."""

    def __init__(self, twin: Twin, device: torch.device) -> None:
        self._recipe, self._device, self._model = twin.recipe, device, _filled(twin, device)
        self._dtype, self._optimizer = getattr(torch, twin.recipe.fsdp.param_dtype), _optimizer(self._model, twin)
        routers = interface_of(self._model).routers
        self._routers: Any = self._model.get_submodule(routers) if routers else None
        self._in_float32 = f"{routers}."
        self.data_ranks = twin.degrees.data_parallel
        """Among how many processes a run divides the micro-batches of a step."""
        # Of each layer: what balancing reads of the last micro-batch, and sums over a step as in Routers.found.
        self._routed, self._counted = dict[int, Routed](), dict[int, Tensor]()
        if self._routers is not None:
            self._keep_routing()
        self.record = Record(repeats=device.type == "cpu", initial=self._state())
        self.is_tied = False
        """Whether a token chose experts, or groups of them, whose scores were so near that rounding decides."""
        for layer in self._model.modules():
            if isinstance(layer, SparseFeedForward):
                self._look_for_ties(layer)
            if isinstance(layer, InnerAttention) and twin.recipe.optimizer.qk_clip:
                layer.largest = torch.full((twin.recipe.model.heads,), -torch.inf, device=device)

    def _keep_routing(self) -> None:
        routed = self._routed

        def noted(layer: int, x: Tensor, what: Routed) -> Tensor:
            routed[layer] = what
            return x

        vars(self._routers)["noted"] = noted  # a function, which copies of the model share

    def _look_for_ties(self, layer: SparseFeedForward) -> None:
        """Let a layer note whether it would choose others if, of any two experts, one scored more and one less."""
        best = layer._best

        def noting(scores: Tensor) -> Tensor:
            chosen, numbers = best(scores), torch.arange(scores.shape[-1], device=scores.device)
            for bit in range(len(numbers).bit_length()):
                for share in (-TIE, TIE):
                    moved = best(scores * (1 + share * (1 - 2 * (numbers >> bit & 1))))
                    self.is_tied |= not torch.equal(moved.sort().values, chosen.sort().values)
            return chosen

        vars(layer)["_best"] = noting  # a function, which copies of the model share

    def step(self, number: int, micro_batches: Sequence[MicroBatch], *, rate: float) -> None:
        """Take a step of the whole global batch."""
        record, config = self.record, self._recipe.optimizer
        if self._recipe.data.mixture and self._recipe.metrics.by_source:
            self._note_sources(number, micro_batches)
        self._add_up(number, micro_batches)
        named = {name: one for name, one in self._model.named_parameters()}
        gradients = {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in named.items()}
        norm = math.sqrt(sum(one.double().square().sum().item() for one in gradients.values()))
        record.norms[number], record.rates[number] = norm, rate
        if number == 1:
            record.gradients = {name: one.cpu().clone() for name, one in gradients.items()}
        if config.grad_clip:
            for gradient in gradients.values():
                gradient *= min(1.0, config.grad_clip / (norm + 1e-6))
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group.get("lr_share", 1.0)
        self._optimizer.step()
        if config.qk_clip:
            self._clip_heads(config.qk_clip)
        self._optimizer.zero_grad()
        for state in self._optimizer.state.values():
            for name, moment in state.items():
                if isinstance(moment, Tensor) and name != "step" and config.state_dtype == "bfloat16":
                    moment.copy_(moment.bfloat16())
        if self._recipe.experts.balance in ("bias", "bias_and_loss"):
            for layer, counted in self._counted.items():
                loads = counted[:-2].double()
                self._routers.bias_of(layer).add_((loads.mean() - loads).sign() * self._recipe.experts.bias_rate)
        if number in (SAVED, self._recipe.run.steps):
            record.state[number] = self._state()

    @torch.no_grad()
    def _clip_heads(self, limit: float) -> None:
        for block in blocks_of(self._model):
            largest = cast(Tensor, next(one for one in block.modules() if isinstance(one, InnerAttention)).largest)
            for name, rows in rows_of(self._recipe.model, (limit / largest).where(largest > limit, 1.0)):
                for one in block.get_submodule(name).parameters():
                    one.mul_(rows.view(-1, *[1] * (one.dim() - 1)))
            largest.fill_(-torch.inf)

    def skip(self, number: int, *, rate: float) -> None:
        """Record a step that changes nothing."""
        self.record.rates[number] = rate
        self.record.skipped.add(number)
        self.record.state[number] = self._state()

    @torch.no_grad()
    def validate(self, number: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Record the mean loss of a copy of the model."""
        model = copy.deepcopy(self._model)
        loss = sum(self._losses(one, model).item() for one in micro_batches)
        self.record.validation[number] = loss / sum(int((targets != IGNORED).sum()) for _, targets, _ in micro_batches)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """tokens: (B, T), rows of one document. Returns (B, T, V)."""
        return cast(Tensor, self._model(tokens))

    def _state(self) -> Tensors:
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        return {name: one.detach().cpu().clone() for name, one in named}

    @torch.no_grad()
    def _note_sources(self, number: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Record the mean loss of each text, row by row: all targets of the others are ignored."""
        model, sums, counts = copy.deepcopy(self._model), defaultdict[str, float](float), defaultdict[str, int](int)
        for inputs, targets, documents in micro_batches:
            tokens = [inputs] if isinstance(inputs, Tensor) else [inputs.encoder_tokens, inputs.decoder_tokens]
            for row, own in enumerate(targets):
                name = OTHER if max(int(one[row].max()) for one in tokens) <= FEW else TEXT
                alone = torch.full_like(targets, IGNORED)
                alone[row] = own
                sums[name] += self._losses((inputs, alone, documents), model).item()
                counts[name] += int((own != IGNORED).sum())
        self.record.source_losses[number] = {name: sums[name] / count for name, count in counts.items() if count}

    def _add_up(self, number: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Add up the gradients of a step, and record its losses."""
        record, targets = self.record, [targets for _, targets, _ in micro_batches]
        count, tokens = sum(int((some != IGNORED).sum()) for some in targets), sum(some.numel() for some in targets)
        sums, over_batch = torch.zeros(2, dtype=torch.float64), self._recipe.experts.loss_over == "batch"
        loads = self._loads_so_far(micro_batches) if self._routers is not None and over_batch else []
        self._counted.clear()
        for index, micro_batch in enumerate(micro_batches):
            losses = self._losses(micro_batch, self._model) / count
            (losses.sum() + self._of_routers(loads[index] if loads else {}) / tokens).backward()
            sums[: losses.numel()] += losses.detach().double().cpu().view(-1)
        record.losses[number], record.z_losses[number] = sums.tolist()
        if number == 1:
            for layer, counted in self._counted.items():
                record.loads[layer], record.router_losses[layer] = counted[:-2].cpu(), counted[-2:].cpu()

    @torch.no_grad()
    def _loads_so_far(self, micro_batches: Sequence[MicroBatch]) -> list[dict[int, Tensor]]:
        """Layer -> tokens of each expert, (E,), for each micro-batch: in those that a run's processes have begun by
        then, all of them as many. Each process has neighbouring micro-batches."""
        hits = list[dict[int, Tensor]]()
        for one in micro_batches:
            self._losses(one, self._model)
            hits.append({layer: own.sum(0) for layer, (own, _, _) in self._routed.items()})
        each = len(hits) // self.data_ranks
        begun = [[one for n, one in enumerate(hits) if n % each <= index % each] for index in range(len(hits))]
        return [{layer: torch.stack([one[layer] for one in some]).sum(0) for layer in hits[0]} for some in begun]

    def _of_routers(self, loads: Mapping[int, Tensor]) -> Tensor:
        """What is added to the loss of the last micro-batch, summed over tokens and layers. loads: of each layer, if
        they are not counted in each row by itself."""
        config, added = self._recipe.experts, torch.zeros((), device=self._device)
        weight = config.loss_weight if config.balance in ("loss", "bias_and_loss") else 0.0
        for layer, (hits, probabilities, squares) in self._routed.items():
            share = loads[layer][None] if layer in loads else hits
            balance = (share / share.mean(1, keepdim=True) * probabilities).sum()
            counted = torch.cat([hits.sum(0), torch.stack([balance, squares])]).detach()
            self._counted[layer] = self._counted.get(layer, 0) + counted
            added = added + weight * balance + config.z_loss * squares
        return added

    def _losses(self, micro_batch: MicroBatch, model: nn.Module) -> Tensor:
        inputs, targets, documents = micro_batch
        documents = None if documents is None else documents.to(self._device)
        weights = {
            name: one if name.startswith(self._in_float32) else one.to(self._dtype)
            for name, one in model.named_parameters()
        }
        with sdpa_kernel(SDPBackend.MATH) if self._dtype == torch.float32 else nullcontext():
            given = inputs.to(self._device), targets.to(self._device)
            losses: Tensor = functional_call(model, weights, given, {"documents": documents})
        return losses


def _filled(twin: Twin, device: torch.device) -> nn.Module:
    recipe = twin.recipe
    model = plain_model(replace(recipe, batch=replace(recipe.batch, loss_chunks=1)), device_type=device.type)
    if recipe.float8.recipe != "none":
        from parallel.float8 import convert_linears

        by_itself = replace(recipe.float8, all_gather=False, gather_activations=False)
        convert_linears(model, by_itself, device_type=device.type)
        if twin.degrees.context > 1:
            _scale_in_parts(model, twin)
    model.to_empty(device=device)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    shapes = {name: one.shape for name, one in tensors.items()}
    draw = cast(Callable[..., Any], model.initial_values)
    with torch.no_grad():
        for name, values in draw(shapes, seed=recipe.run.seed, device=device):
            tensors[name].copy_(values)
    return model


def _scale_in_parts(model: nn.Module, twin: Twin) -> None:
    """Let every float8 linear scale parts of the tokens by themselves, as the processes of a context group do."""
    parts = twin.degrees.context
    order = torch.arange(twin.recipe.batch.sequence_length).view(2 * parts, -1)
    if twin.recipe.mesh.context_by == "gather":  # a part is one chunk from either end
        order = order[[chunk for part in range(parts) for chunk in (part, 2 * parts - 1 - part)]]
    order = order.flatten()

    def in_parts(whole: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return torch.cat([whole(part) for part in x[:, order].chunk(parts, dim=1)], dim=1)[:, order.argsort()]

    for module in model.modules():
        if type(module).__name__.endswith("Float8Linear"):
            module.forward = partial(in_parts, module.forward)


def _optimizer(model: nn.Module, twin: Twin) -> Optimizer:
    """torch's own AdamW, without fused kernels; beside it a plain Muon. Another one is built as the run builds it."""
    config = twin.recipe.optimizer
    if config.name not in ("adamw", "muon"):
        from recipes.optimization.optimizer import build_optimizer

        return build_optimizer(model, config, fields=twin.recipe.fields_of("optimizer", config.name))
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    inside = {one for block in blocks_of(model) for one in block.parameters()} if config.name == "muon" else set()
    of_muon, decayed, others = list[nn.Parameter](), list[nn.Parameter](), list[nn.Parameter]()
    for name, one in model.named_parameters():
        is_matrix = one.dim() > 1 and not (".experts." in name and name.endswith("_bias"))
        if is_matrix and one in inside and one not in embeddings:
            of_muon.append(one)
        else:
            decays = config.decay_embeddings or one not in embeddings if is_matrix else config.decay_norms
            (decayed if decays else others).append(one)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adamw = AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False, fused=False)
    return _Muon(of_muon, config, adamw, getattr(torch, twin.recipe.fsdp.param_dtype)) if of_muon else adamw


class _Muon(Optimizer):
    """Muon by its definition (https://kellerjordan.github.io/posts/muon/), one matrix after the other."""

    def __init__(
        self, matrices: list[nn.Parameter], config: OptimizerConfig, rest: Optimizer, dtype: torch.dtype
    ) -> None:
        super().__init__(matrices, {"lr_share": config.matrix_share, "lr": config.lr})
        self._config, self._rest, self._dtype = config, rest, dtype
        self.param_groups += rest.param_groups
        self.state = rest.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._rest.step()
        config, rate, decay = self._config, self.param_groups[0]["lr"], self._config.momentum
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            momentum.mul_(decay).add_((1 - decay) * parameter.grad)
            mixed = decay * momentum + (1 - decay) * parameter.grad if config.nesterov else momentum
            rows, columns = parameter.shape[-2:]
            matched = config.lr_adjust == "match_rms_adamw"
            scale = 0.2 * math.sqrt(max(rows, columns)) if matched else math.sqrt(max(1, rows / columns))
            whole = [_orthogonal(one.to(self._dtype), config.ns_steps) for one in mixed.view(-1, rows, columns)]
            parameter.mul_(1 - rate * config.weight_decay)
            parameter.sub_(rate * scale * torch.stack(whole).view_as(parameter).float())


def _orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """matrix: (rows, columns). Newton-Schulz on its transpose where that has fewer rows."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
