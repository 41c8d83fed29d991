"""The DeviceMesh: axes by name, so that tensor and context can join without a change elsewhere."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.config import MeshDegrees


def build_mesh(degrees: MeshDegrees, *, device_type: str) -> DeviceMesh:
    """A 2D mesh ("replicate", "shard") over all processes. Neighbouring ranks are in the same shard group."""
    return init_device_mesh(device_type, (degrees.replicate, degrees.shard), mesh_dim_names=("replicate", "shard"))
