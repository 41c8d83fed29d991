"""The fixed order in which one plain model becomes a parallel one. Read it downwards."""

from torch import nn

from parallel.activation_checkpoint import checkpoint_blocks
from parallel.config import ActivationCheckpointingConfig, CompileConfig, Float8Config, FSDPConfig
from parallel.float8 import convert_linears
from parallel.fsdp import shard_blocks_and_root
from parallel.kernels import compile_blocks
from parallel.mesh import Mesh


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    float8: Float8Config,
    activation_checkpointing: ActivationCheckpointingConfig,
    compile: CompileConfig,
    fsdp: FSDPConfig,
) -> list[str]:
    """Apply every part to `model`, in place, while it is on the meta device. Returns one line per part, for the log.

    The optimizer must be built afterwards: sharding replaces the parameters.
    """
    return [
        # First, while the linears are plain nn.Linear: torchao swaps them by type.
        convert_linears(model, float8, device_type=mesh.devices.device_type),
        # Tensor and context parallelism come here: they re-place the (float8) linears' parameters and inputs.
        # Before compile, so that the recomputation is traced and fused with the rest of the block.
        checkpoint_blocks(model, activation_checkpointing),
        # Each block in place: repeated blocks share one compilation, and fully qualified names stay as they are.
        compile_blocks(model, compile, device_type=mesh.devices.device_type),
        # Last and always, also on one device: its hooks stay outside the compiled graphs, and one GPU and a
        # thousand run the same code under the same mixed-precision policy.
        shard_blocks_and_root(model, mesh, fsdp),
    ]
