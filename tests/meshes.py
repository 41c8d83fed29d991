"""Tests over meshes of different sizes, which are written as replicate.shard.context.tensor, such as "1.2.1.2".

With five or six numbers, the first is the pipeline degree; a sixth is that of experts, which is borrowed from others.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from parallel.config import MeshConfig, MeshDegrees
from tests.processes import run_processes


def degrees(mesh: str) -> list[int]:
    return [int(degree) for degree in mesh.split(".")]


def mesh_degrees(mesh: str | Sequence[int]) -> MeshDegrees:
    """Missing degrees at the end are 1."""
    numbers = degrees(mesh) if isinstance(mesh, str) else list(mesh)
    axes = ("pipeline", "replicate", "shard", "context", "tensor", "expert")[0 if len(numbers) >= 5 else 1 :]
    return MeshDegrees(**dict(zip(axes, numbers, strict=False)))


def mesh_config(mesh: str) -> MeshConfig:
    return MeshConfig(**vars(mesh_degrees(mesh)))


def on_each_mesh(meshes: Sequence[str], function: Callable[..., Any], *arguments: Any) -> dict[str, list[Any]]:
    """Call `function(mesh, *arguments)` in the processes of one mesh after the other; mesh -> results by rank."""
    return {mesh: run_processes(prod(degrees(mesh)[:5]), function, mesh, *arguments) for mesh in meshes}
