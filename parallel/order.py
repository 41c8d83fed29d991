"""The fixed order in which one plain model becomes a parallel one. Read it downwards."""

from functools import partial

from torch import nn

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


def recompute_blocks(model: nn.Module, config: ActivationCheckpointingConfig) -> str:
    """Activation checkpointing, where the recipe asks for it."""
    if config.mode == "none":
        return "activation checkpointing: off"
    from parallel.activation_checkpoint import checkpoint_blocks

    return checkpoint_blocks(model, config)


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
    checkpointed = partial(recompute_blocks, model, activation_checkpointing)
    overlapped = mesh.tensor.get_group() if layout.overlap_tensor and mesh.tensor is not None else None
    compiled = partial(compile_blocks, model, compile, device_type=mesh.devices.device_type, overlapped=overlapped)
    # Before compile, so that the recomputation is traced and fused with the rest of the block. The exception: traced
    # with tensor parallelism, "full" would keep a mesh for the backward pass, which torch 2.13 refuses.
    outside = mesh.tensor is not None and compile.enabled and activation_checkpointing.mode == "full"
    # First, while the linears are plain nn.Linear: torchao swaps them by type.
    report = [to_float8(model, float8, device_type=mesh.devices.device_type, shards=mesh.degrees.shards)]
    # On the (float8) linears: it replaces their parameters by parts, and hooks their inputs and outputs.
    if mesh.tensor is not None:
        from parallel.tensor import cut_matrices

        options = {"float8_gathers": float8.gather_activations, "overlapped": layout.overlap_tensor}
        report.append(cut_matrices(model, mesh.tensor, **options))
    # After it, on the heads that it has left each process.
    if mesh.context is not None:
        from parallel.context import cut_rows

        report.append(cut_rows(model, mesh.context, by=layout.context_by))
    # Before FSDP, which shards what is left of them, over other processes than the rest.
    if mesh.experts is not None:
        from parallel.experts import divide_experts

        report.append(divide_experts(model, mesh.experts))
    # Each block in place: repeated blocks share one compilation, and fully qualified names stay as they are.
    report += [compiled(), checkpointed()] if outside else [checkpointed(), compiled()]
    # Last and always, also on one device: its hooks stay outside the compiled graphs, and one GPU and a thousand run
    # the same code under the same mixed-precision policy.
    return [*report, shard_blocks_and_root(model, mesh, fsdp)]
