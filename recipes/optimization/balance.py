"""Balances the loads of routed experts, and tells of them."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from models.experts import Routers
from models.interface import interface_of
from parallel.mesh import Mesh
from parallel.passes import sum_over_group
from recipes.optimization.config import ExpertsConfig


class Balance:
    """Of the sparse layers that this process has."""

    def __init__(self, model: nn.Module, mesh: Mesh, config: ExpertsConfig) -> None:
        assert mesh.experts is not None
        self._routers = cast(Routers, model.get_submodule(cast(str, interface_of(model).routers)))
        self._group, self._config = mesh.experts.tokens, config
        self._routers.balance_weight = config.loss_weight if config.balance == "loss" else 0.0
        self._routers.z_weight = config.z_loss

    @torch.no_grad()
    def move(self, skip: Tensor, target_tokens: Tensor, *, is_logged: bool) -> Mapping[str, Tensor]:
        """After a step: move biases, unless it was skipped. Returns columns of metrics.jsonl if it is logged.

        skip: 1.0 if the step changes nothing; target_tokens: of the step.
        """
        if self._config.balance != "bias" and not is_logged:
            return {}
        # Loads are whole numbers: their sums are exact, and the same on any mesh.
        found = sum_over_group(self._routers.found.to(torch.float64), self._group)
        loads = found[:, :-2]  # (layers, E)
        if self._config.balance == "bias":
            steps = (loads.mean(1, keepdim=True) - loads).sign() * self._config.bias_rate * (1 - skip)
            for layer, place in self._routers.places.items():
                bias = self._routers.bias_of(layer)
                assert bias is not None, "recipes/recipe/rules_experts.py asks for model.router_bias"
                bias += steps[place].to(bias.dtype)
        return {}
