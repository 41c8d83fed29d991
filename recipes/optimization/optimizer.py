"""The optimizer of a recipe: AdamW with two parameter groups, one with weight decay and one without; Muon beside it."""

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.interface import blocks_of
from parallel.mesh import Mesh
from recipes.optimization.config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements whose bfloat16 moments are in float32 at a time, unless one tensor has more: copies take 8 bytes per element.
BATCH = 2**27


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, mesh: Mesh | None = None, *, dtype: torch.dtype = torch.float32
) -> torch.optim.Optimizer:
    """AdamW over the sharded parameters of `model`, with one fused kernel per dtype and device, or Muon beside it.

    Matrices decay. Norms and biases do not. Embeddings, of tokens, positions or distances, and an output projection
    that is tied to one do so only with decay_embeddings. mesh, dtype: for Muon, which shards it, and of its products.
    """
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = _of_blocks(model, embeddings) if config.name == "muon" else {}
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for parameter in model.parameters():
        decays = parameter.dim() >= 2 and (config.decay_embeddings or parameter not in embeddings)
        if parameter not in matrices:
            (decayed if decays else undecayed).append(parameter)
    adamw = ShardedAdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": undecayed, "weight_decay": 0.0}],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        state_dtype=getattr(torch, config.state_dtype),
    )
    if config.name == "adamw":
        return adamw
    from recipes.optimization.muon import Muon

    assert mesh is not None, "Muon without the mesh that shards its matrices"
    return Muon(adamw, [*matrices], config, mesh, dtype=dtype)


def matrices_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that Muon steps, if any."""
    return [parameter for group in optimizer.param_groups if "momentum" in group for parameter in group["params"]]


def _of_blocks(model: nn.Module, embeddings: Collection[Tensor]) -> dict[nn.Parameter, None]:
    """The matrices of the blocks, and those of experts, each once, in the order of the model."""
    found = (parameter for block in blocks_of(model) for parameter in block.parameters())
    return {parameter: None for parameter in found if parameter.dim() >= 2 and parameter not in embeddings}


class ShardedAdamW(torch.optim.AdamW):
    """torch's fused AdamW kernel on the shards themselves, with moments in float32 or bfloat16.

    torch's own step() hands the kernel DTensors, which the host unpacks one by one. Moments in bfloat16 take 4 bytes
    per parameter instead of 8. Parameters, gradients and arithmetic stay float32: such moments are converted batch by
    batch, updated, and rounded back to nearest. Rounding keeps 8 bits, so the second moment does not change when a step
    moves it by less than 2^-9 of its value: recipes/recipe/rules_optimizer.py requires a beta that moves it more.
    """

    def __init__(self, groups: list[dict[str, Any]], *, state_dtype: torch.dtype, **options: Any) -> None:
        super().__init__(groups, fused=True, **options)
        self._state_dtype = state_dtype
        self.found_inf: Tensor | None = None
        """A tensor of 1.0 on the device makes the step change nothing, as in torch's own fused optimizers."""
        self.grad_scale: Tensor | None = None
        """What the kernel divides gradients by, in place, on the device; the same in torch's own fused optimizers."""
        # Loading casts moments to the parameter's dtype, float32; rounding restores the original bfloat16 values.
        self.register_load_state_dict_post_hook(_round_moments)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step, as torch.optim.AdamW does, without closure."""
        assert closure is None
        at_a_time = BATCH if self._state_dtype != torch.float32 else math.inf
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for batch in _batches(parameters, elements=at_a_time):
                self._step_batch(batch, group)

    def _step_batch(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        kept = [[_local(state[name]) for state in states] for name in MOMENTS]
        first, second = ([moment.to(torch.float32) for moment in moments] for moments in kept)
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            [_local(parameter) for parameter in parameters],
            [_local(parameter.grad) for parameter in parameters if parameter.grad is not None],
            first,
            second,
            [],  # for AMSGrad
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )
        if self.found_inf is not None:  # where it is 1.0 the kernel changed nothing, so the step does not count
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))
        if self._state_dtype != torch.float32:
            for moments, results in zip(kept, (first, second), strict=True):
                torch._foreach_copy_(moments, results)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            assert parameter.grad is not None
            state["step"] = torch.zeros((), device=_local(parameter.grad).device)
            for name in MOMENTS:  # like the gradient: float8 all-gather wraps the parameter in a torchao class
                state[name] = torch.zeros_like(parameter.grad, dtype=self._state_dtype)
        return state


def _round_moments(optimizer: torch.optim.Optimizer) -> None:
    dtype = cast(ShardedAdamW, optimizer)._state_dtype
    for state in optimizer.state.values():
        for name in MOMENTS:
            state[name] = state[name].to(dtype)


def _batches(parameters: list[nn.Parameter], *, elements: float) -> Iterator[list[nn.Parameter]]:
    """The parameters in order, in lists of at most so many elements or of a single tensor."""
    batch: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        size = _local(parameter).numel()
        if batch and held + size > elements:
            yield batch
            batch, held = [], 0
        batch.append(parameter)
        held += size
    if batch:
        yield batch


def _local(tensor: Tensor) -> Tensor:
    """This process's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
