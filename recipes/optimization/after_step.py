"""What follows a step, of what its layers have counted: it balances the loads of routed experts, and tells of them and
of the largest attention logit of each layer, which QK-clip bounds (Kimi K2, arXiv 2507.20534, section 2.1)."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.config import ModelConfig
from models.experts import Routers
from models.interface import interface_of
from parallel.context import ByHeads
from parallel.errors import some
from parallel.experts import Sum
from parallel.matrices import parts_of
from parallel.mesh import Mesh, sharding_group
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


class AttentionLogits:
    """Knows the largest logit of each head, and scales down the queries and keys of heads above a limit."""

    def __init__(self, model: nn.Module, mesh: Mesh, *, whole: ModelConfig, limit: float) -> None:
        """whole: the model, of which a process of a pipeline has a part. limit: 0 = scale nothing."""
        interface, tensor = interface_of(model), mesh.tensor.get_local_rank() if mesh.tensor is not None else 0
        self._config, self._limit, self._group = whole, limit, sharding_group(mesh)
        self._blocks = {layer: model.get_submodule(name) for layer, name in interface.block_at.items()}
        # Since the last row, (layers, N); and of this step, of the heads and tokens that this process attends from.
        self._largest = torch.full((whole.layers, whole.heads), -torch.inf, device=mesh.devices.device_type)
        self._seen: dict[int, Tensor] = {}
        for layer, block in self._blocks.items():
            inner: Any = block.get_submodule(str(interface.inside_block and interface.inside_block.inner_attention))
            shares, share = (inner.degree, inner.group.rank()) if isinstance(inner, ByHeads) else (1, 0)
            count = whole.heads // (mesh.degrees.tensor * shares)
            self._own = slice((tensor * shares + share) * count, (tensor * shares + share + 1) * count)
            inner = getattr(inner, "inner", inner)  # context parallelism has replaced it
            inner.largest = self._seen[layer] = self._largest[layer, self._own].clone()

    @torch.no_grad()
    def after_step(self, skip: Tensor, *, is_logged: bool) -> dict[str, Tensor]:
        """Scale weights, unless the step was skipped. Returns columns of metrics.jsonl if it is logged: the largest
        logits since the last row, the same on all processes. skip: 1.0 if the step changes nothing."""
        if not (self._limit or is_logged):
            return {}
        whole = torch.full_like(self._largest, -torch.inf)
        for layer, seen in self._seen.items():
            whole[layer, self._own] = seen.where(~seen.isnan(), torch.inf)
            seen.fill_(-torch.inf)
        dist.all_reduce(whole, dist.ReduceOp.MAX)
        self._largest = torch.maximum(self._largest, whole)
        if self._limit:
            is_above = (whole > self._limit) & (skip.to(whole.device) == 0)
            self._scale(torch.where(is_above, self._limit / whole, 1.0))
        if not is_logged:
            return {}
        largest, self._largest = self._largest.amax(1), torch.full_like(whole, -torch.inf)
        return {f"attention_logit/{layer}": one for layer, one in enumerate(largest.unbind())}

    def _scale(self, factors: Tensor) -> None:
        """factors: of the logits, (layers, N)."""
        for layer, block in self._blocks.items():
            for name, rows in rows_of(self._config, factors[layer]):
                for parameter in cast(Iterator[DTensor], block.get_submodule(name).parameters()):  # and biases
                    own, _ = parts_of(parameter, self._group.size())[self._group.rank()]
                    local = parameter.to_local()
                    local.mul_(rows[own].to(local).view(-1, *[1] * (local.dim() - 1)))


def rows_of(config: ModelConfig, factors: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name of a linear in a block, factor of each of its rows): queries and keys share the factor of the logits, (N,),
    but a key that several heads read, or its rotated part, stays as it is."""
    root, of_query = factors.sqrt()[:, None], factors[:, None].expand(-1, config.rope_width or config.head_width)
    if config.latent_width:
        plain = root.expand(-1, config.head_width - config.rope_width)
        name = "q_b_proj" if config.query_latent_width else "q_proj"
        yield f"attention.heads.{name}", torch.cat((plain, of_query), 1).flatten()
        values = torch.ones_like(root).expand(-1, config.value_width)
        yield "attention.heads.kv_b_proj", torch.cat((plain, values), 1).flatten()
    elif config.key_value_heads < config.heads:
        yield "attention.q_proj", of_query.flatten()
    else:
        yield from ((f"attention.{name}", root.expand_as(of_query).flatten()) for name in ("q_proj", "k_proj"))
