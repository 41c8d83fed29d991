"""What one process computes for itself: the plain model of a twin, eagerly, one micro-batch after the other.

It shares the model with what is proved, and little else: neither FSDP, checkpointing, compilation nor offloading, and
rules of its own for what decays, how gradients are clipped and which biases move. It never validates what it trains,
is never interrupted and skips nothing: it is told which steps do not count.
"""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW, Optimizer

from models.interface import blocks_of, interface_of
from models.loss import IGNORED
from recipes.data.batches import MicroBatch
from recipes.lab.prove.twin import SAVED, STEPS
from recipes.optimization.config import OptimizerConfig
from recipes.recipe.schema import Recipe
from recipes.training.build import plain_model


@dataclass
class Record:
    """What a training found, by step where there are several. Tensors are whole, and on the host."""

    initial: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers before the first step."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the first step."""
    losses: dict[int, float] = field(default_factory=dict)
    z_losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    """Losses on held-out rows after a step."""
    loads: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> how many tokens of the first step each expert has, (E,)."""
    router_losses: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> balance loss and router z-loss of the first step, summed over tokens, (2,)."""
    state: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Parameters and buffers after a step."""
    guard: dict[int, list[float]] = field(default_factory=dict)
    """After the save, how many steps in a row were skipped; after the last step, the losses that one is judged by."""
    skipped: set[int] = field(default_factory=set)
    """Steps that changed nothing."""


class Alone:
    """A plain model, its optimizer, and a record of its steps."""

    def __init__(self, recipe: Recipe, device: torch.device, *, tokens_in_parts: int = 1) -> None:
        """tokens_in_parts: float8 scales as many parts of each row, as the processes of a context group do."""
        self._recipe, self._device = recipe, device
        self._model = _filled(recipe, device)
        self._dtype = getattr(torch, recipe.fsdp.param_dtype)
        if recipe.float8.recipe != "none" and tokens_in_parts > 1:
            length = recipe.batch.sequence_length
            _scale_in_parts(self._model, tokens_in_parts, length=length, by=recipe.mesh.context_by)
        self._optimizer = _optimizer(self._model, recipe)
        self.record = Record(initial=copied(self._model))

    def step(self, number: int, micro_batches: Sequence[MicroBatch], *, rate: float) -> None:
        """Take a step of the whole global batch."""
        record, clip, model = self.record, self._recipe.optimizer.grad_clip, self._model
        self._add_up(number, micro_batches)
        gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        norm = math.sqrt(sum(one.double().square().sum().item() for one in gradients.values()))
        record.norms[number], record.rates[number] = norm, rate
        if number == 1:
            record.gradients = {
                name: torch.zeros_like(one, device="cpu") if one.grad is None else one.grad.cpu().clone()
                for name, one in model.named_parameters()
            }
        if clip:
            for gradient in gradients.values():
                gradient *= min(1.0, clip / (norm + 1e-6))
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group.get("lr_share", 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for state in self._optimizer.state.values():
            for name, moment in state.items():
                if name != "step" and self._recipe.optimizer.state_dtype == "bfloat16":
                    moment.copy_(moment.bfloat16())
        self._move_biases()
        if number in (SAVED, STEPS):
            record.state[number] = copied(model)

    def skip(self, number: int, *, rate: float) -> None:
        """Record a step that changes nothing."""
        self.record.rates[number] = rate
        self.record.skipped.add(number)

    def validate(self, number: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Record the mean loss of a copy of the model."""
        model, loss, count = copy.deepcopy(self._model), 0.0, 0
        with torch.no_grad():
            for micro_batch in micro_batches:
                loss += self._losses(micro_batch, model).item()
                count += int((micro_batch[1] != IGNORED).sum())
        self.record.validation[number] = loss / count

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """tokens: (B, T), rows of one document. Returns (B, T, V)."""
        logits: Tensor = self._model(tokens)
        return logits

    def _add_up(self, number: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Add up the gradients of a step, and record its losses."""
        targets = [targets for _, targets, _ in micro_batches]
        count = sum(int((of_one != IGNORED).sum()) for of_one in targets)
        routers = self._routers
        if routers is not None:
            experts = self._recipe.experts
            routers.balance_weight = experts.loss_weight if experts.balance == "loss" else 0.0
            routers.z_weight = experts.z_loss
            routers.begin(torch.tensor(float(sum(of_one.numel() for of_one in targets)), device=self._device))
        sums = torch.zeros(2, dtype=torch.float64)
        for micro_batch in micro_batches:
            losses = self._losses(micro_batch, self._model) / count
            losses.sum().backward()
            sums[: losses.numel()] += losses.detach().double().cpu().view(-1)
        self.record.losses[number], self.record.z_losses[number] = sums.tolist()
        if routers is not None and number == 1:
            for layer, index in routers.places.items():
                self.record.loads[layer] = routers.found[index, :-2].cpu()
                self.record.router_losses[layer] = routers.found[index, -2:].cpu()

    def _losses(self, micro_batch: MicroBatch, model: nn.Module) -> Tensor:
        inputs, targets, documents = micro_batch
        given = (inputs.to(self._device), targets.to(self._device))
        options = {"documents": None if documents is None else documents.to(self._device)}
        in_float32 = f"{interface_of(model).routers}."
        weights = {
            name: one if name.startswith(in_float32) else one.to(self._dtype) for name, one in model.named_parameters()
        }
        kernel: AbstractContextManager[Any] = nullcontext()
        if self._dtype == torch.float32:
            kernel = sdpa_kernel(SDPBackend.MATH)
        with kernel:
            losses: Tensor = functional_call(model, weights, given, options)
        return losses

    @property
    def _routers(self) -> Any:
        name = interface_of(self._model).routers
        return self._model.get_submodule(name) if name else None

    @torch.no_grad()
    def _move_biases(self) -> None:
        if self._routers is None or self._recipe.experts.balance != "bias":
            return
        for layer, index in self._routers.places.items():
            loads = self._routers.found[index, :-2].double()
            self._routers.bias_of(layer).add_((loads.mean() - loads).sign() * self._recipe.experts.bias_rate)


def copied(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a plain model, by name, on the host."""
    return {name: one.detach().cpu().clone() for name, one in [*model.named_parameters(), *model.named_buffers()]}


def _filled(recipe: Recipe, device: torch.device) -> nn.Module:
    whole = replace(recipe, batch=replace(recipe.batch, loss_chunks=1))
    model = plain_model(whole, device_type=device.type)
    if recipe.float8.recipe != "none":
        from parallel.float8 import convert_linears

        convert_linears(
            model, replace(recipe.float8, all_gather=False, gather_activations=False), device_type=device.type
        )
    model.to_empty(device=device)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: one.shape for name, one in tensors.items()}
    draw = cast(Callable[..., Any], model.initial_values)
    with torch.no_grad():
        for name, values in draw(shapes, seed=recipe.run.seed, device=device):
            tensors[name].copy_(values)
    return model


def _scale_in_parts(model: nn.Module, parts: int, *, length: int, by: str) -> None:
    """Let every float8 linear scale each part of the tokens by itself."""
    order = torch.arange(length).view(2 * parts, -1)
    if by == "gather":  # a part is one chunk from either end
        order = order[[chunk for part in range(parts) for chunk in (part, 2 * parts - 1 - part)]]
    order = order.flatten()

    def in_parts(whole: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return torch.cat([whole(part) for part in x[:, order].chunk(parts, dim=1)], dim=1)[:, order.argsort()]

    for module in model.modules():
        if type(module).__name__.endswith("Float8Linear"):
            module.forward = partial(in_parts, module.forward)


def _optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """torch's own AdamW, without fused kernels; beside it a plain Muon. Another one is built as the run builds it."""
    config = recipe.optimizer
    if config.name not in ("adamw", "muon"):
        from recipes.optimization.optimizer import build_optimizer

        return build_optimizer(model, config)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    inside = {one for block in blocks_of(model) for one in block.parameters()}
    of_muon, decayed, others = [], [], []
    for parameter in model.parameters():
        is_matrix, is_embedding = parameter.dim() > 1, parameter in embeddings
        if is_matrix and not is_embedding and parameter in inside and config.name == "muon":
            of_muon.append(parameter)
        else:
            (decayed if is_matrix and (config.decay_embeddings or not is_embedding) else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adamw = AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False, fused=False)
    return _Muon(of_muon, config, adamw, getattr(torch, recipe.fsdp.param_dtype)) if of_muon else adamw


class _Muon(Optimizer):
    """Muon by its definition (https://kellerjordan.github.io/posts/muon/), one matrix after the other."""

    def __init__(
        self, matrices: list[nn.Parameter], config: OptimizerConfig, rest: Optimizer, dtype: torch.dtype
    ) -> None:
        super().__init__(matrices, {"lr_share": config.matrix_share, "lr": config.lr})
        self._config, self._rest, self._dtype = config, rest, dtype
        self.param_groups += rest.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._rest.step()
        group, config = self.param_groups[0], self._config
        for parameter in group["params"]:
            state = self.state[parameter]
            momentum = state.setdefault("momentum", torch.zeros_like(parameter))
            mixed = config.momentum * momentum + (1 - config.momentum) * parameter.grad
            momentum.copy_(mixed)
            if config.nesterov:
                mixed = config.momentum * mixed + (1 - config.momentum) * parameter.grad
            rows, columns = parameter.shape[-2:]
            scale = math.sqrt(max(1, rows / columns))
            if config.lr_adjust == "match_rms_adamw":
                scale = 0.2 * math.sqrt(max(rows, columns))
            whole = [_orthogonal(one.to(self._dtype), config.ns_steps) for one in mixed.view(-1, rows, columns)]
            parameter.mul_(1 - group["lr"] * config.weight_decay)
            parameter.sub_(group["lr"] * scale * torch.stack(whole).view_as(parameter).float())


def _orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """matrix: (rows, columns). Newton-Schulz on its transpose where that has fewer rows."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
