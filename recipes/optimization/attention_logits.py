"""The largest attention logit of each layer, and QK-clip (Kimi K2, arXiv 2507.20534, section 2.1)."""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.config import ModelConfig
from models.interface import interface_of
from parallel.context import ByHeads
from parallel.matrices import parts_of
from parallel.mesh import Mesh, sharding_group


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
