"""What a plan needs of a machine: the speed of messages along each axis of the mesh, and of one product on each GPU.

Messages of two sizes tell latency and bandwidth apart. environment.json keeps what was measured, and
`--plan --calibrated-by` reads it.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel.dist import World, all_gather_single
from parallel.mesh import Mesh
from recipes.cluster.links import forget_memory, mean_seconds
from recipes.files.units import size

SIZES = {"cuda": (2**20, 2**26), "cpu": (2**16, 2**21)}
"""Bytes that all members of a group have together: little, and enough to reach the full speed of a link."""
SIDE = {"cuda": 8192, "cpu": 128}
"""Rows and columns of the matrices that are multiplied: on a GPU more than a millisecond of work."""
SLOW = 0.9
"""Warn of a GPU that multiplies at less than this share of the median speed: all others wait for it."""

Seconds = dict[str, list[float]]
"""Collective -> its seconds at each of SIZES."""


def measure_axes(world: World, mesh: Mesh) -> dict[str, Any]:
    """The measurements for environment.json; those of products on rank 0 alone. Every process must call it; it takes a
    second."""
    links = []
    for axis, (group, stride) in _groups(mesh).items():
        slowest = world.messages.from_main(world.messages.reduce(_messages(world, group), _slower))
        sizes = SIZES[world.device.type]
        links.append(
            {"axis": axis, "processes": group.size(), "stride": stride, "per_node": len(world.nodes[0].ranks)}
            | {name: [list(pair) for pair in zip(sizes, seconds, strict=True)] for name, seconds in slowest.items()}
        )
    side = SIDE[world.device.type]
    products = world.messages.to_main(_product(world, side)) or []
    forget_memory(world.device)
    return {"nodes": len(world.nodes), "links": links, "products": {"flops": 2 * side**3, "seconds": products}}


def summary(found: dict[str, Any], world: World) -> Iterator[str]:
    """Lines for the log: each axis's bandwidth and latency, and on GPUs those that multiply slowly."""
    for link in found["links"]:
        (less, sooner), (more, later) = link["all_gather"]
        share = (link["processes"] - 1) / link["processes"]
        yield (
            f"pre-flight: {link['axis']} axis of {link['processes']}: all-gather {size(int(share * more / later))}/s,"
            f" {1e6 * sooner:.0f} us for {size(less)}"
        )
    if world.device.type == "cuda" and world.is_main:
        yield from slow_products(found["products"]["seconds"], found["products"]["flops"])


def slow_products(seconds: Sequence[float], flops: float) -> Iterator[str]:
    """A line for each rank that multiplies more slowly than the others."""
    usual = median(seconds)
    for rank, own in enumerate(seconds):
        if usual < SLOW * own:
            yield (
                f"  rank {rank} multiplies matrices at {flops / own / 1e12:.0f} TFLOP/s, the median is"
                f" {flops / usual / 1e12:.0f}; all processes wait for it: nvidia-smi -q -d PERFORMANCE says why"
            )


def _groups(mesh: Mesh) -> dict[str, tuple[ProcessGroup, int]]:
    """Axes with several processes: their groups, and how far apart neighbours in them are."""
    degrees = mesh.degrees
    inner = degrees.tensor * degrees.context * degrees.shard
    found = {
        "shard": (mesh.fsdp.get_group(mesh.fsdp.ndim - 1), degrees.tensor),
        "replicate": (mesh.replicate_group, inner),
    }
    if mesh.context is not None:
        found["context"] = (mesh.context.get_group(), degrees.tensor)
    if mesh.tensor is not None:
        found["tensor"] = (mesh.tensor.get_group(), 1)
    return {axis: (group, stride) for axis, (group, stride) in found.items() if group.size() > 1}


def _messages(world: World, group: ProcessGroup) -> Seconds:
    """Seconds of both collectives, by size."""
    found: Seconds = {"all_gather": [], "reduce_scatter": []}
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name from torch 2.13 on
    for amount in SIZES[world.device.type]:
        part = torch.zeros(amount // 4 // group.size(), device=world.device)
        whole = torch.zeros(len(part) * group.size(), device=world.device)
        found["all_gather"].append(mean_seconds(world, partial(all_gather_single, whole, part, group=group)))
        found["reduce_scatter"].append(mean_seconds(world, partial(reduce_scatter, part, whole, group=group)))
    return found


def _slower(one: Seconds, other: Seconds) -> Seconds:
    """The longer time of each message."""
    return {name: list(map(max, one[name], other[name])) for name in one}


def _product(world: World, side: int) -> float:
    """Seconds of one product of square matrices."""
    kind = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    left, right = (torch.ones(side, side, dtype=kind, device=world.device) for _ in range(2))
    return mean_seconds(world, partial(torch.matmul, left, right))
