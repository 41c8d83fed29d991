"""A model as a run builds it, on the CPU mesh of the current process group."""

from typing import Literal, cast

import torch
import torch.distributed as dist

from models import decoder
from models.config import ModelConfig
from models.decoder import Decoder
from parallel.config import ActivationCheckpointingConfig, CompileConfig, Float8Config, FSDPConfig, MeshConfig
from parallel.fsdp import compute_with_whole_shards, materialize
from parallel.mesh import Mesh, build_mesh
from parallel.order import parallelize

SHARD_ALL = MeshConfig()
NO_FLOAT8 = Float8Config()
FLOAT32 = FSDPConfig(param_dtype="float32")


def cpu_mesh(mesh: MeshConfig = SHARD_ALL) -> Mesh:
    """The mesh over all processes of the current process group."""
    return build_mesh(mesh.fit(dist.get_world_size()), device_type="cpu")


def build_model(
    config: ModelConfig,
    *,
    mesh: MeshConfig = SHARD_ALL,
    float8: Float8Config = NO_FLOAT8,
    mode: str = "none",
    blocks: int | float | Literal["all"] = "all",
    compiled: bool = False,
    fsdp: FSDPConfig = FLOAT32,
    seed: int = 0,
    loss_chunks: int = 1,
) -> tuple[Decoder, list[str]]:
    """The model, and the lines that parallelize() returned. mode, blocks: of activation checkpointing."""
    with torch.device("meta"):
        model = cast(Decoder, decoder.build_model(config, loss_chunks=loss_chunks))
    processes = cpu_mesh(mesh)
    report = parallelize(
        model,
        processes,
        float8=float8,
        activation_checkpointing=ActivationCheckpointingConfig(mode, blocks),
        compile=CompileConfig(compiled),
        fsdp=fsdp,
        layout=mesh,
    )
    materialize(model, device=torch.device("cpu"), seed=seed)
    compute_with_whole_shards(model, processes, fsdp)
    return model, report
