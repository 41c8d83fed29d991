"""The mesh of processes, and what each of its axes is for.

Processes along an axis that neither reads other data, nor sums losses, nor shards hold the same sequences, the same
loss and the same shards. **Every reduction names its axes; nothing sums over the world by default.**
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.config import MeshDegrees

Made = TypeVar("Made")


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh."""

    name: str
    reads_data: bool = False
    """Whether processes along it read different sequences."""
    sums_loss: bool = False
    """Whether losses are summed over it: each process has that of other tokens, or has none, before the last stage."""
    shards: bool = False
    """Whether FSDP shards parameters, gradients and optimizer states along it."""


AXES = (
    Axis("pipeline", sums_loss=True),  # parts of the model, one after the other
    Axis("replicate", reads_data=True, sums_loss=True),  # copies of the sharded model
    Axis("shard", reads_data=True, sums_loss=True, shards=True),
    Axis("context", sums_loss=True, shards=True),  # parts of every row of tokens
    Axis("tensor"),  # parts of every matrix
)
"""The axes, outermost first."""
NAMES = tuple(axis.name for axis in AXES)
DATA_AXES = tuple(axis.name for axis in AXES if axis.reads_data)
LOSS_AXES = tuple(axis.name for axis in AXES if axis.sums_loss)
FSDP_AXES = tuple(axis.name for axis in AXES if axis.shards)


@dataclass(frozen=True)
class ExpertMesh:
    """Which processes have which experts, and who has other tokens for them."""

    axis: DeviceMesh | None
    """The processes that hold the other experts, neighbours; None where each process computes all."""
    fsdp: DeviceMesh | None
    """What fully_shard takes for experts; None: what it takes for the rest of the model."""
    tokens: ProcessGroup
    """The processes that hold different tokens of the global batch."""
    rows: ProcessGroup | None
    """The processes that hold other parts of the same rows; None if no other does."""


@dataclass(frozen=True)
class Mesh:
    """The layout of all processes, as this one sees it."""

    devices: DeviceMesh
    """All axes."""
    degrees: MeshDegrees
    fsdp: DeviceMesh
    """What fully_shard takes: sharding axes, and the replicate axis before them where there are several copies."""
    data_rank: int
    """The index of this process's share of every global batch."""
    data_ranks: int
    """Number of shares into which a global batch is divided."""
    data_group: ProcessGroup
    """The processes that read different sequences, and whose token counts add up to that of the global batch."""
    loss_group: ProcessGroup
    """The processes whose losses add up to that of the global batch."""
    replicate_group: ProcessGroup
    """The processes that hold the same shards in other copies of the model."""
    pipeline: DeviceMesh | None
    """The processes that hold the other blocks of the same copy; None without pipeline parallelism."""
    context: DeviceMesh | None
    """The processes that hold the other parts of the same rows; None without context parallelism."""
    tensor: DeviceMesh | None
    """The processes that hold the other parts of the same matrices; None without tensor parallelism."""
    experts: ExpertMesh | None = None
    """Of a model with experts; see parallel/experts.py."""


def build_mesh(degrees: MeshDegrees, *, device_type: str) -> Mesh:
    """The mesh of these degrees over all processes. Neighbouring ranks are in the same tensor group.

    A pipeline, context or tensor axis of one is left out: it would cost process groups, and 2D parameters for nothing.
    """
    sizes = {axis: getattr(degrees, axis) for axis in NAMES}
    axes = tuple(axis for axis, size in sizes.items() if size > 1 or axis in DATA_AXES)
    shape = tuple(sizes[axis] for axis in axes)
    mesh = without_noise_of_splits(lambda: mesh_over(init_device_mesh(device_type, shape, mesh_dim_names=axes)))
    return replace(mesh, degrees=degrees)


def mesh_over(devices: DeviceMesh) -> Mesh:
    """The mesh over a DeviceMesh that has at least the axes replicate and shard.

    Its process groups get the time-out of the default group.
    """
    names = devices.mesh_dim_names or ()
    size = {axis: devices[axis].size() if axis in names else 1 for axis in NAMES}
    data_rank, data_ranks = 0, 1
    for axis in DATA_AXES:
        data_rank = data_rank * size[axis] + devices[axis].get_local_rank()
        data_ranks *= size[axis]
    mesh = Mesh(
        devices,
        MeshDegrees(**size),
        fsdp=_fsdp_mesh(devices, size),
        data_rank=data_rank,
        data_ranks=data_ranks,
        data_group=group_of(devices, DATA_AXES),
        loss_group=group_of(devices, tuple(axis for axis in LOSS_AXES if axis in names)),
        replicate_group=devices.get_group("replicate"),
        pipeline=devices["pipeline"] if size["pipeline"] > 1 else None,
        context=devices["context"] if size["context"] > 1 else None,
        tensor=devices["tensor"] if size["tensor"] > 1 else None,
    )
    share_timeout([*devices.get_all_groups(), *mesh.fsdp.get_all_groups(), mesh.data_group, mesh.loss_group])
    return mesh


def without_noise_of_splits(make: Callable[[], Made]) -> Made:
    """What `make` returns, without a warning on every process's screen.

    On CUDA, torch 2.11 to 2.13 split the default group, and hand NCCL's options to its gloo part, which warns that they
    are not its own (pytorch #182057). The warning goes past Python's, unless the call comes from an operator of torch.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Tried to pass options to ProcessGroupGloo::split")
        made: Made = _AsOperator.apply(make)
    return made


class _AsOperator(torch.autograd.Function):
    """Calls a function as an operator of torch, where warnings of C++ code become Python's and obey its filters."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[], Any]) -> Any:
        return function()


def share_timeout(groups: Iterable[ProcessGroup]) -> None:
    """Give these groups the time-out of the default group. torch gives those of an axis its own default of 30 minutes.

    That is less than the watchdog allows a first step, a validation or a save, and NCCL would end the run.
    """
    world = dist.group.WORLD
    assert world is not None
    options = world._get_backend(world._device_types[0]).options
    if options is None:  # a fake group has none
        return
    for group in groups:
        group.set_timeout(options._timeout)


def _fsdp_mesh(devices: DeviceMesh, size: Mapping[str, int]) -> DeviceMesh:
    """The axes that FSDP shards over as one, and before it the replicate axis where there are several copies."""
    wide = [axis for axis in FSDP_AXES if size[axis] > 1] or ["shard"]
    sharding = wide[0]
    if len(wide) > 1:
        sharding = "_".join(wide)
        devices[tuple(wide)]._flatten(sharding)
    with warnings.catch_warnings():
        # torch warns of slicing a flattened axis; 2.11 to 2.13 have no other way to put it beside replicate.
        warnings.filterwarnings("ignore", "Slicing a flattened dim")
        # A replicate axis of one would cost an all-reduce among one process for every block.
        return devices["replicate", sharding] if size["replicate"] > 1 else devices[sharding]


def sharding_group(mesh: Mesh) -> ProcessGroup:
    """The processes that hold the parts of one copy of the model, cut by FSDP and by tensor parallelism."""
    names = mesh.devices.mesh_dim_names or ()
    group = group_of(mesh.devices, tuple(axis for axis in (*FSDP_AXES, "tensor") if axis in names))
    share_timeout([group])
    return group


def group_of(devices: DeviceMesh, axes: tuple[str, ...]) -> ProcessGroup:
    """The process group over several axes; one that exists already where there is one, so no communicator is added."""
    wide = [axis for axis in axes if devices[axis].size() > 1]
    if len(wide) <= 1:
        return devices.get_group(wide[0] if wide else axes[0])
    selected = devices[tuple(wide)]  # not an axis of one, which would make another group of the same processes
    if selected.size() == dist.get_world_size() and dist.group.WORLD is not None:
        return dist.group.WORLD
    return selected._flatten().get_group()
