"""The mesh of processes: the only place that knows what each axis is for.

Axes by name, outermost first: replicate (copies of the sharded model), shard (FSDP). An axis that is not named in one
of the constants below is ignored by data, sums and sharding: the processes along it hold the same sequences, the same
loss and the same shards.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.config import MeshDegrees

AXES = ("replicate", "shard")
DATA_AXES = ("replicate", "shard")
"""Processes along these read different sequences."""
LOSS_AXES = ("replicate", "shard")
"""Processes along these hold different target tokens: losses and token counts are summed over them."""
FSDP_AXES = ("shard",)
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
    """The processes that read different sequences."""
    loss_group: ProcessGroup
    """The processes whose losses and token counts add up to those of the global batch."""
    replicate_group: ProcessGroup
    """The processes that hold the same shards in other copies of the model."""


def build_mesh(degrees: MeshDegrees, *, device_type: str) -> Mesh:
    """The mesh of these degrees over all processes. Neighbouring ranks are in the same shard group."""
    return mesh_over(init_device_mesh(device_type, (degrees.replicate, degrees.shard), mesh_dim_names=AXES))


def mesh_over(devices: DeviceMesh) -> Mesh:
    """The mesh over a DeviceMesh that has at least the axes of AXES."""
    data_rank, data_ranks = 0, 1
    for axis in DATA_AXES:
        data_rank = data_rank * devices[axis].size() + devices[axis].get_local_rank()
        data_ranks *= devices[axis].size()
    # A replicate axis of one would cost an all-reduce among one process for every block.
    fsdp = ("replicate", *FSDP_AXES) if devices["replicate"].size() > 1 else FSDP_AXES
    return Mesh(
        devices,
        MeshDegrees(devices["replicate"].size(), devices["shard"].size()),
        fsdp=devices[fsdp] if len(fsdp) > 1 else devices[fsdp[0]],
        data_rank=data_rank,
        data_ranks=data_ranks,
        data_group=_group_of(devices, DATA_AXES),
        loss_group=_group_of(devices, LOSS_AXES),
        replicate_group=devices.get_group("replicate"),
    )


def _group_of(devices: DeviceMesh, axes: tuple[str, ...]) -> ProcessGroup:
    """The process group over several axes; one that exists already where there is one, so no communicator is added."""
    wide = [axis for axis in axes if devices[axis].size() > 1]
    if len(wide) <= 1:
        return devices.get_group(wide[0] if wide else axes[0])
    selected = devices[axes]
    if selected.size() == dist.get_world_size():
        return dist.distributed_c10d._get_default_group()
    return selected._flatten().get_group()
