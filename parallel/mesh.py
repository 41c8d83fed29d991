"""The mesh of processes: the only place that knows what each axis is for.

Axes by name, outermost first: replicate (copies of the sharded model), shard (FSDP), context (parts of every row of
tokens), tensor (parts of every matrix). An axis that is not named in one of the constants below is ignored by data,
sums and sharding: the processes along it hold the same sequences, the same loss and the same shards.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.config import MeshDegrees

AXES = ("replicate", "shard", "context", "tensor")
DATA_AXES = ("replicate", "shard")
"""Processes along these read different sequences."""
LOSS_AXES = ("replicate", "shard", "context")
"""Processes along these compute the loss of different tokens: losses are summed over them."""
FSDP_AXES = ("shard", "context")
"""Parameters, gradients and optimizer states are sharded along these."""


@dataclass(frozen=True)
class Mesh:
    """The layout of all processes, as this one sees it."""

    devices: DeviceMesh
    """All axes."""
    degrees: MeshDegrees
    fsdp: DeviceMesh
    """What fully_shard takes: sharding axes, and the replicate axis before them where there are several copies."""
    data_rank: int
    """Which share of every global batch this process reads."""
    data_ranks: int
    """Into how many shares a global batch is divided."""
    data_group: ProcessGroup
    """The processes that read different sequences, and whose token counts add up to that of the global batch."""
    loss_group: ProcessGroup
    """The processes whose losses add up to that of the global batch."""
    replicate_group: ProcessGroup
    """The processes that hold the same shards in other copies of the model."""
    context: DeviceMesh | None
    """The processes that hold the other parts of the same rows; None without context parallelism."""
    tensor: DeviceMesh | None
    """The processes that hold the other parts of the same matrices; None without tensor parallelism."""


def build_mesh(degrees: MeshDegrees, *, device_type: str) -> Mesh:
    """The mesh of these degrees over all processes. Neighbouring ranks are in the same tensor group.

    A context or tensor axis of one is left out: it would cost process groups, and 2D parameters for nothing.
    """
    sizes = {axis: getattr(degrees, axis) for axis in AXES}
    axes = tuple(axis for axis, size in sizes.items() if size > 1 or axis in DATA_AXES)
    return mesh_over(init_device_mesh(device_type, tuple(sizes[axis] for axis in axes), mesh_dim_names=axes))


def mesh_over(devices: DeviceMesh) -> Mesh:
    """The mesh over a DeviceMesh that has at least the axes replicate and shard."""
    names = devices.mesh_dim_names or ()
    size = {axis: devices[axis].size() if axis in names else 1 for axis in AXES}
    data_rank, data_ranks = 0, 1
    for axis in DATA_AXES:
        data_rank = data_rank * size[axis] + devices[axis].get_local_rank()
        data_ranks *= size[axis]
    return Mesh(
        devices,
        MeshDegrees(**size),
        fsdp=_fsdp_mesh(devices, size),
        data_rank=data_rank,
        data_ranks=data_ranks,
        data_group=_group_of(devices, DATA_AXES),
        loss_group=_group_of(devices, tuple(axis for axis in LOSS_AXES if axis in names)),
        replicate_group=devices.get_group("replicate"),
        context=devices["context"] if size["context"] > 1 else None,
        tensor=devices["tensor"] if size["tensor"] > 1 else None,
    )


def _fsdp_mesh(devices: DeviceMesh, size: Mapping[str, int]) -> DeviceMesh:
    """The axes that FSDP shards over as one, and before it the replicate axis where there are several copies."""
    wide = [axis for axis in FSDP_AXES if size[axis] > 1] or ["shard"]
    sharding = wide[0]
    if len(wide) > 1:
        sharding = "_".join(wide)
        devices[tuple(wide)]._flatten(sharding)
    with warnings.catch_warnings():
        # Of a flattened axis that is sliced: torch 2.11 to 2.13 have no other way to put it beside replicate.
        warnings.filterwarnings("ignore", "Slicing a flattened dim")
        # A replicate axis of one would cost an all-reduce among one process for every block.
        return devices["replicate", sharding] if size["replicate"] > 1 else devices[sharding]


def _group_of(devices: DeviceMesh, axes: tuple[str, ...]) -> ProcessGroup:
    """The process group over several axes; one that exists already where there is one, so no communicator is added."""
    wide = [axis for axis in axes if devices[axis].size() > 1]
    if len(wide) <= 1:
        return devices.get_group(wide[0] if wide else axes[0])
    selected = devices[axes]
    if selected.size() == dist.get_world_size():
        return dist.distributed_c10d._get_default_group()
    return selected._flatten().get_group()
