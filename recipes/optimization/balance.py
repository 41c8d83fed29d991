"""Balances the loads of routed experts, and tells of them."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.experts import Routers
from models.interface import interface_of
from parallel.errors import some
from parallel.experts import Sum
from parallel.mesh import Mesh
from parallel.passes import sum_over_group
from recipes.optimization.config import ExpertsConfig

LONG = 100
"""Steps without a token after which an expert is dead, and with too many tokens after which it is overloaded."""
OVERLOADED = 4.0
"""Multiple of the mean load, or 3/4 of what an expert with every token has, above which a load is too high."""
BUSY = 1.2
"""Multiple of the mean load that all experts of a slow process together must exceed to be named as the cause."""
QUIET = 20
"""Rows of metrics.jsonl after one with names, in which nothing is named."""
MOST_NAMED = 8


class Balance:
    """Moves the biases of the sparse layers that this process has, and knows the loads of all layers."""

    def __init__(self, model: nn.Module, mesh: Mesh, config: ExpertsConfig, *, whole: ModelConfig) -> None:
        """whole: the model, of which a process of a pipeline has a part."""
        assert mesh.experts is not None
        name = interface_of(model).routers
        self._routers = cast(Routers, model.get_submodule(name)) if name else Routers(whole, [])
        if not name:  # a stage of dense layers, which counts nothing
            self._routers.begin(torch.ones((), device=mesh.devices.device_type))
        self._tokens, self._config = mesh.experts.tokens, config
        self._routers.balance_weight = config.loss_weight if config.adds_loss else 0.0
        if config.loss_over == "batch":
            self._routers.sum_of_batch = Sum(self._tokens)
        self._routers.z_weight = config.z_loss
        self._stages = [mesh.pipeline.get_group()] if mesh.pipeline is not None else []
        self._layers = [layer for layer in range(whole.layers) if whole.is_sparse(layer)]
        self._here = [self._layers.index(layer) for layer in self._routers.places]
        self._degree = mesh.degrees.expert
        self._chosen = whole.experts_per_token
        self._most = min(OVERLOADED, 0.75 * whole.experts / self._chosen)
        # Since the last row: what routers have found, of this process alone, and the number of steps.
        self._counted: Tensor | float = 0.0
        self._steps = self._quiet = 0
        # Of all experts, (layers, E): shares of the mean load, for how many steps they had no token, and too many.
        self._shares = self._idle = self._busy = torch.zeros(len(self._layers), whole.experts)

    @torch.no_grad()
    def move(self, skip: Tensor, *, is_logged: bool) -> Mapping[str, Tensor]:
        """After a step: move biases, unless it was skipped. Returns columns of metrics.jsonl if it is logged.

        skip: 1.0 if the step changes nothing.
        """
        # Loads are whole numbers: their sums are exact, and the same on any mesh.
        counted = self._routers.found.to(torch.float64)
        kept = skip.to(counted.device) == 0
        self._counted = self._counted + counted.where(kept, 0.0)
        self._steps += 1
        if self._config.moves_biases:
            loads = sum_over_group(counted[:, :-2].clone(), self._tokens)  # (layers, E)
            steps = (loads.mean(1, keepdim=True) - loads).sign() * self._config.bias_rate * kept
            for layer, place in self._routers.places.items():
                bias = self._routers.bias_of(layer)
                assert bias is not None, "recipes/recipe/rules_axes.py asks for model.router_bias"
                bias += steps[place].to(bias.dtype)
        return self._columns(self._counted) if is_logged else {}

    def _columns(self, counted: Tensor) -> dict[str, Tensor]:
        """What the steps since the last row have found in all layers, equal on all processes."""
        whole = counted.new_zeros(len(self._layers), counted.shape[1])
        whole[self._here] = counted
        for group in [self._tokens, *self._stages]:
            sum_over_group(whole, group)
        loads, losses = whole[:, :-2], whole[:, -2:]
        shares = loads / loads.sum(1, keepdim=True).clamp(min=1)  # 0 if all steps since the last row were skipped
        self._shares = shares * loads.shape[1]
        self._idle = (self._idle.to(loads.device) + self._steps * loads.any()) * (loads == 0)
        self._busy = (self._busy.to(loads.device) + self._steps) * (self._shares > self._most)
        self._counted, self._steps = 0.0, 0
        balance, squares = losses.sum(0) / (loads.sum() / self._chosen).clamp(min=1)
        return {
            "expert_load/largest": self._shares.max(),
            "expert_load/smallest": self._shares.min(),
            "expert_load/entropy": torch.special.entr(shares).sum(1).min() / math.log(max(2, loads.shape[1])),
            "expert_load/dead": (self._idle >= LONG).sum(),
            "balance_loss": balance,
            "router_z_loss": squares,
        }

    def lines(self) -> list[str]:
        """Dead and overloaded experts, by name; nothing for some rows after a row with names."""
        self._quiet -= 1
        if self._quiet > 0:
            return []
        lines, shares = [], self._shares.tolist()
        if dead := (self._idle >= LONG).nonzero().tolist():
            idle = some([self._name(*place) for place in dead], MOST_NAMED)
            lines.append(f"DEAD EXPERTS: {idle}: no token for {LONG} steps")
        if busy := (self._busy >= LONG).nonzero().tolist():
            loads = [(shares[place][expert], self._name(place, expert)) for place, expert in busy]
            named = [f"{name}: {share:.1f}x the mean" for share, name in sorted(loads, reverse=True)]
            lines.append(f"OVERLOADED EXPERTS: {some(named, MOST_NAMED)}")
        self._quiet = QUIET if lines else 0
        return lines

    def causes(self, stragglers: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """Which of these processes, as in metrics.jsonl, compute more because their experts have more tokens."""
        of_processes = self._shares.unflatten(1, (self._degree, -1)).mean((0, 2)).tolist()  # neighbours, on all meshes
        for straggler in stragglers:
            share = of_processes[straggler["rank"] % self._degree]
            if straggler["phase"] == "compute" and share > BUSY:
                yield f"OVERLOADED EXPERTS: those of rank {straggler['rank']} have {share:.1f}x the mean load"

    def _name(self, place: int, expert: int) -> str:
        return f"layer {self._layers[place]} expert {expert}"
