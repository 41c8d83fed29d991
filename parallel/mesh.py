"""The mesh of processes, with the process groups over its axes. parallel/axes.py says what each axis is for."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from parallel.axes import DATA_AXES, FSDP_AXES, LAYER_AXES, LOSS_AXES, NAMES
from parallel.config import MeshDegrees

Made = TypeVar("Made")


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
    """The mesh of these degrees over all processes; the same one, with its groups, for as long as these are joined."""
    return _built(dist.group.WORLD, degrees, device_type)


@lru_cache(maxsize=16)
def _built(world: ProcessGroup, degrees: MeshDegrees, device_type: str) -> Mesh:
    return replace(mesh_over(device_mesh(degrees.dimensions, device_type=device_type)), degrees=degrees)


def device_mesh(dimensions: Mapping[str, int], *, device_type: str) -> DeviceMesh:
    """The DeviceMesh of all processes with these dimensions, outermost first."""
    sizes, names = tuple(dimensions.values()), tuple(dimensions)
    devices = without_noise_of_splits(lambda: init_device_mesh(device_type, sizes, mesh_dim_names=names))
    share_timeout(devices.get_all_groups())
    return devices


def mesh_over(devices: DeviceMesh) -> Mesh:
    """The mesh over a DeviceMesh that has at least the axes replicate and shard."""
    names = devices.mesh_dim_names or ()
    degrees = MeshDegrees(**{axis: devices[axis].size() if axis in names else 1 for axis in NAMES})
    data_rank = 0
    for axis in DATA_AXES:
        data_rank = data_rank * devices[axis].size() + devices[axis].get_local_rank()

    def along(axis: str) -> DeviceMesh | None:
        return devices[axis] if degrees.wide([axis]) else None

    return Mesh(
        devices,
        degrees,
        fsdp=_fsdp_mesh(devices, degrees),
        data_rank=data_rank,
        data_ranks=degrees.data_parallel,
        data_group=group_of(devices, DATA_AXES),
        loss_group=group_of(devices, LOSS_AXES),
        replicate_group=devices.get_group("replicate"),
        pipeline=along("pipeline"),
        context=along("context"),
        tensor=along("tensor"),
    )


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


def _fsdp_mesh(devices: DeviceMesh, degrees: MeshDegrees) -> DeviceMesh:
    """The axes that FSDP shards over as one, and before it the replicate axis where there are several copies."""
    wide = degrees.wide(FSDP_AXES) or ("shard",)
    if len(wide) > 1:
        _flattened(devices, wide)
    sharding = "_".join(wide)
    with warnings.catch_warnings():
        # torch warns of slicing a flattened axis; 2.11 to 2.13 have no other way to put it beside replicate.
        warnings.filterwarnings("ignore", "Slicing a flattened dim")
        # A replicate axis of one would cost an all-reduce among one process for every block.
        return devices["replicate", sharding] if degrees.replicate > 1 else devices[sharding]


def group_of(devices: DeviceMesh, axes: Sequence[str]) -> ProcessGroup:
    """The process group over several axes; one that exists already where there is one, so no communicator is added."""
    names = [axis for axis in axes if axis in (devices.mesh_dim_names or ())]
    wide = tuple(axis for axis in names if devices[axis].size() > 1)
    if len(wide) <= 1:
        return devices.get_group(wide[0] if wide else names[0])
    # Not an axis of one, which would make another group of the same processes.
    if devices[wide].size() == dist.get_world_size() and dist.group.WORLD is not None:
        return dist.group.WORLD
    return _flattened(devices, wide)


def _flattened(devices: DeviceMesh, axes: tuple[str, ...]) -> ProcessGroup:
    """The process group over axes that devices[] knows as one from now on, by their names joined by "_"."""
    group = without_noise_of_splits(lambda: devices[axes]._flatten("_".join(axes)).get_group())
    share_timeout([group])
    return group


def is_whole_along(tensor: DTensor, axis: DeviceMesh) -> bool:
    """Whether all processes along this axis hold the tensor alike. Experts, which have another mesh, are not."""
    [name] = axis.mesh_dim_names or ("",)
    names = tensor.device_mesh.mesh_dim_names or ()
    return name in names and tensor.placements[names.index(name)].is_replicate()


def sharding_group(mesh: Mesh) -> ProcessGroup:
    """The processes that hold the parts of one copy of a layer, cut by FSDP and by tensor parallelism."""
    return group_of(mesh.devices, LAYER_AXES)
