"""AdamW on shards: torch's fused kernel, or compiled ones that read and write each state once."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.fsdp import without_wrapper
from parallel.kernels import UNTIMED
from recipes.optimization.config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements whose bfloat16 moments are in float32 at a time, unless one tensor has more: copies take 8 bytes per element.
BATCH = 2**27


class ShardedAdamW(torch.optim.AdamW):
    """AdamW on the shards themselves, with moments in float32 or bfloat16, by torch's fused kernel or compiled ones.

    torch's own step() hands the kernel DTensors, which the host unpacks one by one. Moments in bfloat16 take 4 bytes
    per parameter instead of 8. Parameters, gradients and arithmetic stay float32: compiled kernels convert such moments
    themselves, for torch's they are converted batch by batch. They are rounded to nearest, which keeps 8 bits, so the
    second moment does not change when a step moves it by less than 2^-9 of its value: recipes/recipe/rules.py
    requires a beta that moves it more.
    """

    def __init__(
        self, groups: list[dict[str, Any]], config: OptimizerConfig, *, blocks: list[nn.Module] | None, **_: Any
    ) -> None:
        """blocks: of each, compiled kernels update all parameters in one call; None = torch's kernel."""
        super().__init__(groups, fused=True, lr=config.lr, betas=config.betas, eps=config.eps)
        self._state_dtype = getattr(torch, config.state_dtype)
        # Blocks have equal lists of shapes, for which code is compiled once.
        self._units = {member: number for number, block in enumerate(blocks or ()) for member in block.parameters()}
        self._update = None if blocks is None else _compiled_update()
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None  # torch's fused kernel writes the quotients, too
        # All at once: made in the first step, moments would lie between gradients and the memory of messages.
        for parameter in (member for group in self.param_groups for member in group["params"]):
            moments = {name: empty_state(parameter, self._state_dtype) for name in MOMENTS}
            self.state[parameter] = {"step": torch.zeros((), device=local_of(parameter).device), **moments}
        # Loading casts moments to the parameter's dtype, float32; rounding restores the original bfloat16 values.
        self.register_load_state_dict_post_hook(round_states)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step, as torch.optim.AdamW does, without closure."""
        assert closure is None
        if self._update is not None:
            return self._step_units(self._update)
        at_a_time = BATCH if self._state_dtype != torch.float32 else math.inf
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for batch in _batches(parameters, elements=at_a_time):
                self._step_batch(batch, group)

    def _step_batch(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        kept = [[local_of(state[name]) for state in states] for name in MOMENTS]
        first, second = ([moment.to(torch.float32) for moment in moments] for moments in kept)
        torch._fused_adamw_(
            [local_of(parameter) for parameter in parameters],
            [local_of(parameter.grad) for parameter in parameters if parameter.grad is not None],
            first,
            second,
            [],  # for AMSGrad
            self._counted(states),
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
        if self._state_dtype != torch.float32:
            for moments, results in zip(kept, (first, second), strict=True):
                torch._foreach_copy_(moments, results)

    def _step_units(self, update: Callable[..., None]) -> None:
        calls: defaultdict[int | None, list[tuple[Any, ...]]] = defaultdict(list)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in parameters]
            rows = _numbers(self._counted(states), group) if states else ()
            for parameter, state, numbers in zip(parameters, states, rows, strict=True):
                shards = [
                    local_of(tensor) for tensor in (parameter, parameter.grad, *(state[name] for name in MOMENTS))
                ]
                if shards[0].numel():
                    calls[self._units.get(parameter)].append((*shards, numbers, group["betas"]))
        for unit in calls.values():
            update(unit, self.grad_scale, self.found_inf)

    def _counted(self, states: list[dict[str, Tensor]]) -> list[Tensor]:
        """The counters of steps, one higher; but a step that found_inf makes change nothing does not count."""
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        if self.found_inf is not None:
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))
        return steps


def round_states(optimizer: torch.optim.Optimizer) -> None:
    """Give moments the dtype that the recipe asks for."""
    dtype = cast(Any, optimizer)._state_dtype
    for state in optimizer.state.values():
        state.update({name: value.to(dtype) for name, value in state.items() if name != "step"})


def _batches(parameters: list[nn.Parameter], *, elements: float) -> Iterator[list[nn.Parameter]]:
    """The parameters in order, in lists of at most so many elements or of a single tensor."""
    batch: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        size = local_of(parameter).numel()
        if batch and held + size > elements:
            yield batch
            batch, held = [], 0
        batch.append(parameter)
        held += size
    if batch:
        yield batch


def _numbers(steps: Sequence[Tensor], group: dict[str, Any]) -> Sequence[Tensor]:
    """For each parameter of a group, what _update() reads of it: step size, scale of the second moment, decay, eps.

    They are computed in float64 on the device: only it knows how many steps were skipped. Four numbers take 16 bytes,
    so each list begins where a compiled kernel wants a tensor to begin.
    """
    done = torch.stack([*steps]).double()
    beta1, beta2 = group["betas"]
    size, scale = group["lr"] / (1 - beta1**done), (1 - beta2**done).sqrt()
    decay, eps = (torch.full_like(done, value) for value in (group["lr"] * group["weight_decay"], group["eps"]))
    return torch.stack([size, scale, decay, eps], dim=1).float().unbind()


def _compiled_update() -> Callable[..., None]:
    """_update() as kernels that read and write each state once, compiled for each kind of block."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # from 8
    # Without autotune, because Inductor would time the kernels on copies of what they overwrite.
    return torch.compile(_update, fullgraph=True, dynamic=False, options=UNTIMED)


def _update(unit: list[tuple[Any, ...]], divisor: Tensor | None, found_inf: Tensor | None) -> None:
    """Update each parameter and its moments in place, by torch's formula in float32."""
    for p, gradient, m, v, numbers, (beta1, beta2) in unit:
        size, scale, decay, eps = numbers.unbind()
        g = gradient if divisor is None else gradient / divisor
        first = m.float() + (1 - beta1) * (g - m.float())
        second = v.float() + (1 - beta2) * (g * g - v.float())
        new = p - decay * p - size * first / (second.sqrt() / scale + eps)
        for old, value in ((p, new), (m, first), (v, second)):
            # A select: zero times the NaN of a skipped step would be NaN.
            old.copy_(value if found_inf is None else torch.where(found_inf > 0, old, value.to(old.dtype)))


def local_of(tensor: Tensor) -> Tensor:
    """This process's shard, without the class that float8 all-gather wraps parameters in."""
    return without_wrapper(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def empty_state(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Zeros that are sharded like this parameter."""
    return torch.zeros_like(without_wrapper(parameter), dtype=dtype, requires_grad=False)
