"""Tests over meshes of different sizes, which are written as replicate.shard.context.tensor, such as "1.2.1.2"."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from parallel.config import MeshConfig
from tests.processes import run_processes


def degrees(mesh: str) -> list[int]:
    return [int(degree) for degree in mesh.split(".")]


def mesh_config(mesh: str) -> MeshConfig:
    replicate, shard, context, tensor = degrees(mesh)
    return MeshConfig(replicate=replicate, shard=shard, context=context, tensor=tensor)


def on_each_mesh(meshes: Sequence[str], function: Callable[..., Any], *arguments: Any) -> dict[str, list[Any]]:
    """Call `function(mesh, *arguments)` in the processes of one mesh after the other; mesh -> results by rank."""
    return {mesh: run_processes(prod(degrees(mesh)), function, mesh, *arguments) for mesh in meshes}
