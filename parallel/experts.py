"""Expert parallelism: each process of a group holds 1 / degree of the experts, and computes everyone's tokens there.

The axis is borrowed from shard x context x tensor, whose processes have different tokens at the routers. Tokens are
sent in the order of their experts, without padding, so that sums have the same order on any mesh.

R degree, E experts, D model width, P rows: one for each token and expert of it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, library, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from models.experts import Compute, inverted, permuted
from models.interface import blocks_of, has_part, interface_of
from parallel.axes import EXPERT, ROW_AXES, TOKEN_AXES, axis_of_experts
from parallel.mesh import ExpertMesh, Mesh, device_mesh, group_of

messages = torch.ops._c10d_functional  # which take names of groups, as our operators must for torch.compile


@lru_cache(maxsize=16)
def with_experts(mesh: Mesh) -> Mesh:
    """The mesh, with the groups of processes that a model with experts needs."""
    degrees, devices = mesh.degrees, mesh.devices
    rows = group_of(devices, ROW_AXES) if degrees.wide(ROW_AXES) else None
    experts = ExpertMesh(None, None, group_of(devices, TOKEN_AXES), rows)
    if dimensions := degrees.dimensions_of_experts:
        others = device_mesh(dimensions, device_type=devices.device_type)
        fsdp = others["replicate", "shard"] if degrees.replicate > 1 else others["shard"]
        experts = replace(experts, axis=others[EXPERT] if degrees.expert > 1 else None, fsdp=fsdp)
    return replace(mesh, experts=experts)


def divide_experts(model: nn.Module, mesh: ExpertMesh) -> str:
    """Divide the experts of every block, in place, on the meta device. Returns a line for the log."""
    interface = interface_of(model)
    inside = interface.inside_block
    if interface.routers is None:
        return "expert parallelism: off, these blocks have no experts"  # a stage whose layers are dense
    assert inside is not None and inside.experts and inside.exchange
    if mesh.rows is not None:
        model.set_submodule(f"{interface.routers}.sum_of_rows", Sum(mesh.rows))
    if mesh.axis is None:
        return "expert parallelism: off, each process computes its own tokens"
    for block in blocks_of(model):
        if not has_part(block, inside.experts):
            continue
        experts = block.get_submodule(inside.experts)
        for name, parameter in list(experts.named_parameters()):
            part = distribute_tensor(parameter.data, mesh.axis, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(part))
        experts.set_submodule("matrices", OwnPart())
        block.set_submodule(inside.exchange, AllToAll(mesh.axis.get_group()))
    return f"expert parallelism: experts divided over {mesh.axis.size()} processes"


def shards_of_experts(model: nn.Module, mesh: Mesh) -> Callable[[nn.Parameter], Any]:
    """What fully_shard asks for each parameter of a block: along which axis it is cut, and over which mesh.

    Experts are no unit of their own: FSDP's hooks inside a block can neither be compiled nor recomputed (torch 2.13).
    """
    assert mesh.experts is not None
    over = mesh.experts.fsdp or mesh.fsdp
    cut: Callable[[int], Any] = Shard if mesh.experts.fsdp is None else _cut_over(mesh.experts.fsdp)
    inside = interface_of(model).inside_block
    assert inside is not None and inside.experts is not None
    sparse = [block.get_submodule(inside.experts) for block in blocks_of(model) if has_part(block, inside.experts)]
    experts = {parameter for module in sparse for parameter in module.parameters()}

    def placement(parameter: nn.Parameter) -> Any:
        if parameter not in experts:
            return None
        count, rows, *_ = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        return cut(axis_of_experts(count, rows, shards=over.size(-1)))

    return placement


def _cut_over(mesh: DeviceMesh) -> Callable[[int], Any]:
    """Axis -> what tells FSDP to cut a parameter along it over another mesh than the rest of its unit."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult  # torch 2.12: rules_axes.py
    from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

    info: Any = _get_mesh_info(mesh)
    return lambda axis: ShardPlacementResult(Shard(axis), info)


class OwnPart(nn.Module):
    """The experts that this process has."""

    def forward(self, whole: DTensor) -> Tensor:
        return whole.to_local()


class Sum(nn.Module):
    """Sums hits over processes that have other tokens: of the same rows, or of the same batch."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, hits: Tensor) -> Tensor:
        whole = hits.detach().clone()
        dist.all_reduce(whole, group=self.group)  # whole numbers, exact in any order
        return whole


class AllToAll(nn.Module):
    """Sends each row to the process of its expert, and what that makes of it back."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.name, self.degree = group.group_name, group.size()

    def forward(self, rows: Tensor, counts: Tensor, compute: Compute) -> Tensor:
        """rows: (P, D), sorted by expert; counts: (E,). Returns what their experts make of them, (P, D)."""
        received, sizes = exchange_counts(counts, self.degree, self.name)  # (R, E / R), (2, R)
        got = exchange(rows, sizes, False, -1, self.name)  # (P', D), by process, then by expert
        experts = torch.arange(received.shape[1], device=rows.device).repeat(self.degree)
        order = experts.repeat_interleave(received.flatten(), output_size=got.shape[0]).argsort(stable=True)
        inverse = inverted(order)
        made = permuted(compute(permuted(got, order, inverse), received.sum(0)), inverse, order)
        return exchange(made, sizes, True, rows.shape[0], self.name)


# Operators, so that a compiled block is one graph: what they return has a size that follows from routing.


@library.custom_op("shardwright::exchange_counts", mutates_args=())
def exchange_counts(counts: Tensor, degree: int, group: str) -> tuple[Tensor, Tensor]:
    """From the rows that this process has for each expert, (E,), those that each process has for this one's experts.

    Returns (R, E / R), and on the host, which waits for it, how many rows to send to each process and to receive,
    (2, R).
    """
    equal = [len(counts) // degree] * degree
    received = messages.wait_tensor(messages.all_to_all_single(counts, equal, equal, group))
    both = torch.stack([counts, received]).unflatten(1, (degree, -1))  # (2, R, E / R)
    return received.view(both.shape[1:]), both.sum(2).cpu()


@exchange_counts.register_fake
def _(counts: Tensor, degree: int, group: str) -> tuple[Tensor, Tensor]:
    return counts.new_empty(degree, counts.shape[0] // degree), counts.new_empty(2, degree, device="cpu")


@library.custom_op("shardwright::exchange", mutates_args=())
def exchange(rows: Tensor, sizes: Tensor, back: bool, count: int, group: str) -> Tensor:
    """Send rows to the processes of their experts, or back again. sizes: as of exchange_counts().

    count: the number of rows that come, if the caller knows it, or -1.
    """
    sent, got = reversed(sizes.tolist()) if back else sizes.tolist()
    return cast(Tensor, messages.wait_tensor(messages.all_to_all_single(rows.contiguous(), got, sent, group)))


@exchange.register_fake
def _(rows: Tensor, sizes: Tensor, back: bool, count: int, group: str) -> Tensor:
    unknown = isinstance(count, int) and count < 0
    return rows.new_empty(library.get_ctx().new_dynamic_size() if unknown else count, rows.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, bool, int, str], output: Tensor) -> None:
    rows, sizes, back, _, group = inputs
    ctx.save_for_backward(sizes)
    ctx.count, ctx.back, ctx.group = rows.shape[0], back, group


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    [sizes] = ctx.saved_tensors
    return exchange(gradient, sizes, not ctx.back, ctx.count, ctx.group), None, None, None, None


exchange.register_autograd(_gradient, setup_context=_keep)
