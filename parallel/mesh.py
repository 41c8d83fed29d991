"""The DeviceMesh: axes by name, so that tensor and context can join without a change elsewhere."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.config import MeshConfig


def build_mesh(config: MeshConfig, *, world_size: int, device_type: str) -> DeviceMesh:
    """A 2D mesh ("replicate", "shard"). Neighbouring ranks, which share a node, are in the same shard group.

    Raises UserError when the degrees do not multiply to `world_size`.
    """
    fitted = config.fit(world_size)
    return init_device_mesh(device_type, (fitted.replicate, fitted.shard), mesh_dim_names=("replicate", "shard"))
