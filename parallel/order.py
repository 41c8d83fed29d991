"""The fixed order in which one plain model becomes a parallel one. Read it downwards."""

from functools import partial

from torch import nn

from parallel.activation_checkpoint import checkpoint_blocks
from parallel.config import ActivationCheckpointingConfig, CompileConfig, Float8Config, FSDPConfig, MeshConfig
from parallel.fsdp import shard_blocks_and_root
from parallel.kernels import compile_blocks
from parallel.mesh import Mesh


def to_float8(model: nn.Module, config: Float8Config, *, device_type: str, shards: int = 1) -> str:
    """Swap linears for float8 ones, where the recipe asks for it: else nothing of float8 is imported."""
    if config.recipe == "none":
        return "float8: off"
    from parallel.float8 import convert_linears

    return convert_linears(model, config, device_type=device_type, shards=shards)


def split_matrices(model: nn.Module, mesh: Mesh, *, float8_gathers: bool, overlapped: bool) -> list[str]:
    """Tensor parallelism, where the mesh has that axis."""
    if mesh.tensor is None:
        return []
    from parallel.tensor import split_over

    return [split_over(model, mesh.tensor, float8_gathers=float8_gathers, overlapped=overlapped)]


def split_rows(model: nn.Module, mesh: Mesh, *, context_by: str) -> list[str]:
    """Context parallelism, where the mesh has that axis."""
    if mesh.context is None:
        return []
    from parallel.context import split_over

    return [split_over(model, mesh.context, by=context_by)]


def split_experts(model: nn.Module, mesh: Mesh) -> list[str]:
    """Expert parallelism, where the model has experts."""
    if mesh.experts is None:
        return []
    from parallel.experts import split_over

    return [split_over(model, mesh.experts)]


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    float8: Float8Config,
    activation_checkpointing: ActivationCheckpointingConfig,
    compile: CompileConfig,
    fsdp: FSDPConfig,
    layout: MeshConfig,
) -> list[str]:
    """Apply every part to `model`, in place, while it is on the meta device. Returns one line per part, for the log.

    A process of a pipeline has the blocks of its stages only (parallel/stages.py), and the same order holds for these.
    The optimizer must be built afterwards: sharding replaces the parameters. layout: how the axes of the mesh are used.
    """
    checkpointed = partial(checkpoint_blocks, model, activation_checkpointing)
    overlapped = mesh.tensor.get_group() if layout.overlap_tensor and mesh.tensor is not None else None
    compiled = partial(compile_blocks, model, compile, device_type=mesh.devices.device_type, overlapped=overlapped)
    # Before compile, so that the recomputation is traced and fused with the rest of the block. The exception: traced
    # with tensor parallelism, "full" would keep a mesh for the backward pass, which torch 2.13 refuses.
    outside = mesh.tensor is not None and compile.enabled and activation_checkpointing.mode == "full"
    return [
        # First, while the linears are plain nn.Linear: torchao swaps them by type.
        to_float8(model, float8, device_type=mesh.devices.device_type, shards=mesh.degrees.shards),
        # On the (float8) linears: it replaces their parameters by parts, and hooks their inputs and outputs.
        *split_matrices(model, mesh, float8_gathers=float8.gather_activations, overlapped=layout.overlap_tensor),
        # After it, on the heads that it has left each process.
        *split_rows(model, mesh, context_by=layout.context_by),
        # Before FSDP, which shards what is left of them, over other processes than the rest.
        *split_experts(model, mesh),
        # Each block in place: repeated blocks share one compilation, and fully qualified names stay as they are.
        *([compiled(), checkpointed()] if outside else [checkpointed(), compiled()]),
        # Last and always, also on one device: its hooks stay outside the compiled graphs, and one GPU and a
        # thousand run the same code under the same mixed-precision policy.
        shard_blocks_and_root(model, mesh, fsdp),
    ]
