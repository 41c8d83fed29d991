"""Muon for the matrices of the blocks, beside AdamW for all other parameters, on any mesh.

The arithmetic is that of torch.optim.Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; the rate of
"match_rms_adamw" is from Liu et al. 2025, arXiv 2502.16982). A packed matrix, such as GPT-2's of queries, keys and
values, is one matrix.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from parallel.errors import UserError
from parallel.matrices import Matrices
from parallel.mesh import Mesh
from parallel.owners import BATCH, Round, Shape
from recipes.optimization.adamw import ShardedAdamW, empty_state, local_of, round_states
from recipes.optimization.config import OptimizerConfig

MOMENTUM = "momentum_buffer"
"""Key of the momentum in a state, as in torch.optim.Muon."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial of a Newton-Schulz step, as in torch."""
SMALLEST_NORM = 1e-7
"""Smallest norm that a momentum is divided by, as in torch: zeros stay zeros."""
Group = dict[str, Any]


class Muon(torch.optim.Optimizer):
    """Orthogonalizes the momentum of matrices; AdamW steps the parameters that are not such matrices.

    Each matrix becomes whole on one process, its owner, which multiplies it there. Momenta are sharded like the
    parameters. While a batch of matrices is multiplied, the parts of the next one arrive.
    """

    def __init__(
        self,
        groups: list[Group],
        config: OptimizerConfig,
        *,
        matrices: list[nn.Parameter],
        mesh: Mesh,
        dtype: torch.dtype,
        blocks: list[nn.Module] | None,
    ) -> None:
        """
        Args:
            groups: of the other parameters, which AdamW steps; they and their states become part of this one's.
            config: the section of the recipe.
            matrices: of two dimensions each, sharded; or of three, those of experts, of which each is on one process.
            mesh: the one that shards them.
            dtype: that of the products; the parts of matrices are sent in it.
            blocks: as of AdamW.
        """
        if any(_is_cut(parameter) for parameter in matrices if parameter.dim() == 3):
            raise UserError(
                'optimizer.name = "muon": processes have parts of single experts, because the number of experts cannot'
                ' be divided among them; write a larger mesh.replicate, or name = "adamw"'
            )
        group = {
            "params": matrices,
            "lr": config.lr * config.matrix_share,
            "lr_share": config.matrix_share,
            "weight_decay": config.weight_decay,
            "momentum": config.momentum,
            "nesterov": config.nesterov,
            "ns_steps": config.ns_steps,
            "lr_adjust": config.lr_adjust,
        }
        rest = ShardedAdamW(groups, config, blocks=blocks)
        super().__init__([*(group for group in rest.param_groups if group["params"]), group], {})
        self._rest, self._mesh, self._dtype = rest, mesh, dtype
        self._state_dtype = getattr(torch, config.state_dtype)
        self.state.update(rest.state)
        for matrix in matrices:
            self.state[matrix] = {MOMENTUM: empty_state(matrix, self._state_dtype)}
        self._matrices: Matrices | None = None
        self._stepped: list[nn.Parameter] = []
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None  # in place
        self.register_load_state_dict_post_hook(round_states)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step as torch.optim.Muon and torch.optim.AdamW do, without closure. All processes call it together."""
        assert closure is None
        *others, group = self.param_groups
        self._rest.state, self._rest.param_groups = self.state, others  # loading has replaced both
        self._rest.found_inf, self._rest.grad_scale = self.found_inf, self.grad_scale
        self._rest.step()
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if shared := [parameter for parameter in parameters if parameter.dim() == 2]:
            self._step_matrices(shared, group)
        for parameter in parameters:
            if parameter.dim() == 3:
                self._step_experts(parameter, group)

    @record_function("Muon")
    def _step_matrices(self, parameters: list[nn.Parameter], group: Group) -> None:
        if self._matrices is None or [*map(id, parameters)] != [*map(id, self._stepped)]:
            sharded = [cast(DTensor, parameter) for parameter in parameters]
            self._matrices, self._stepped = Matrices(sharded, self._mesh, dtype=self._dtype), parameters
        waiting = iter(self._matrices.rounds)
        running: list[Iterator[bool]] = []
        while True:
            # The newest first: its momenta are on their way while the one before it multiplies.
            if (of := next(waiting, None)) is not None:
                running.insert(0, self._run(of, self._matrices, group))
            if not running:
                return
            running = [batch for batch in running if next(batch, False)]

    def _run(self, of: Round, matrices: Matrices, group: Group) -> Iterator[bool]:
        """Run one round. It stops where it would wait for messages, so that others can go on."""
        sent = matrices.send(of, self._momenta(of, matrices, group))
        yield True
        sent = matrices.send_back(of, orthogonalized(matrices.whole(of, sent.received()), steps=group["ns_steps"]))
        yield True
        sent = matrices.share(of, sent.received())
        if matrices.replicas > 1:
            yield True
        for number, update in matrices.shards(of, sent.received()):
            self._update(self._stepped[number], update, group)

    @record_function("Muon")
    def _step_experts(self, parameter: nn.Parameter, group: Group) -> None:
        """Step the experts that are here, (E', rows, columns). They are whole, so nothing is sent."""
        update = self._mixed(parameter, group)
        upright = update.shape[1] <= update.shape[2]
        for some in update.split(max(1, BATCH // max(1, update[0].numel()))) if len(update) else ():
            flat = (some if upright else some.mT).contiguous()
            whole = orthogonalized(flat.clone() if flat is some else flat, steps=group["ns_steps"])
            some.copy_(whole if upright else whole.mT)
        self._update(parameter, update, group)

    def _update(self, parameter: nn.Parameter, update: Tensor, group: Group) -> None:
        """Decay this process's shard, and subtract its update."""
        rate = group["lr"] * adjustment(group["lr_adjust"], (parameter.shape[-2], parameter.shape[-1]))
        shard = local_of(parameter)
        self._change(shard, (shard * (1 - group["lr"] * group["weight_decay"])).add_(update, alpha=-rate))

    def _mixed(self, parameter: nn.Parameter, group: Group) -> Tensor:
        """Mix this process's gradient into its momentum. Returns what is to be orthogonalized."""
        gradient, momentum = local_of(cast(Tensor, parameter.grad)), local_of(self.state[parameter][MOMENTUM])
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale)
        mixed = momentum.to(gradient.dtype).lerp(gradient, 1 - group["momentum"])
        self._change(momentum, mixed)
        return (gradient.lerp(mixed, group["momentum"]) if group["nesterov"] else mixed).to(self._dtype)

    def _momenta(self, of: Round, matrices: Matrices, group: Group) -> dict[int, Tensor]:
        """Mix the gradients of a round's matrices into their momenta. Returns what is to be sent, by number."""
        momenta, sent = {}, {*matrices.gathered(of)}
        for number in (number for batch in of for number in batch):
            update = self._mixed(self._stepped[number], group)
            if number in sent:
                momenta[number] = update
        return momenta

    def _change(self, old: Tensor, new: Tensor) -> None:
        """Replace the values, unless the step is to change nothing. Only the device knows."""
        old.copy_(new if self.found_inf is None else torch.where(self.found_inf > 0, old.to(new.dtype), new))


def orthogonalized(matrices: Tensor, *, steps: int) -> Tensor:
    """Nearly U V^T of each matrix U S V^T, whose singular values become about 0.7 to 1.2, by Newton-Schulz.

    matrices: (number, short side, long side), which are overwritten; the computation is in their type.
    """
    a, b, c = COEFFICIENTS
    matrices.div_(torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM))
    for _ in range(steps):
        gram = matrices @ matrices.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        matrices = torch.baddbmm(matrices, polynomial, matrices, beta=a)
    return matrices


def adjustment(kind: str, shape: Shape) -> float:
    """What the learning rate of a matrix of this shape is multiplied by, as in torch."""
    rows, columns = shape
    return math.sqrt(max(1, rows / columns)) if kind == "original" else 0.2 * math.sqrt(max(rows, columns))


def _is_cut(experts: Tensor) -> bool:
    """Whether a process has parts of experts, (E, rows, columns), and not whole ones."""
    return isinstance(experts, DTensor) and any(placement.is_shard(1) for placement in experts.placements)
