"""What a recipe may ask of the parallel room. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from parallel.errors import UserError


@dataclass(frozen=True)
class MeshDegrees:
    """The layout of so many processes. Neighbouring ranks are in the same shard group."""

    replicate: int
    shard: int

    @property
    def data_parallel(self) -> int:
        """Number of processes that see different sequences."""
        return self.replicate * self.shard


@dataclass(frozen=True)
class MeshConfig:
    """How the processes are laid out. The product of the degrees is the number of processes."""

    replicate: Annotated[int, Ge(-1)] = 1
    """Copies of the sharded model (hybrid sharding); gradients are all-reduced across them. -1 = the rest."""
    shard: Annotated[int, Ge(-1)] | Literal["node"] = -1
    """Sharding degree of FSDP; 1 = none, -1 = the rest, "node" = the processes of a node, with a copy on each node."""
    tensor: Annotated[int, Ge(1)] = 1
    """Tensor-parallel degree. Not built yet: must be 1."""
    context: Annotated[int, Ge(1)] = 1
    """Context-parallel degree. Not built yet: must be 1."""

    def fit(self, world_size: int, *, nodes: int | None = None) -> MeshDegrees:
        """The degrees with -1 and "node" replaced, so that they multiply to `world_size`.

        nodes: how many these processes are on; shard = "node" needs to know. Raises UserError, with the arithmetic,
        when no layout of that many processes fits; one line for each problem.
        """
        asked = f"replicate {self.replicate} x shard {self.shard} x tensor {self.tensor} x context {self.context}"
        problems = [
            f"mesh.{axis} = {degree}: {axis} parallelism is not built yet; write {axis} = 1"
            for axis in ("tensor", "context")
            if (degree := getattr(self, axis)) > 1
        ] + [
            f"mesh.{axis} = 0: a degree is at least 1; write 1, or -1 for the rest"
            for axis in ("replicate", "shard")
            if getattr(self, axis) == 0
        ]
        if problems:
            raise UserError("\n".join(problems))
        if self.shard == "node":
            assert nodes is not None
            return self._inside_nodes(world_size, nodes)
        if self.replicate == self.shard == -1:
            raise UserError(
                "mesh: replicate and shard are both -1; only one can be the rest, write a degree for the other"
            )
        if -1 in (self.replicate, self.shard):
            fixed = self.shard if self.replicate == -1 else self.replicate
            if world_size % fixed:
                raise UserError(
                    f"mesh: {asked} does not fit {world_size} processes: {world_size} / {fixed} is not a whole number"
                    f"; start a multiple of {fixed} processes (NPROC) or change the degrees"
                )
            rest = world_size // fixed
            return MeshDegrees(rest, self.shard) if self.replicate == -1 else MeshDegrees(self.replicate, rest)
        degrees = MeshDegrees(self.replicate, self.shard)
        if degrees.data_parallel != world_size:
            raise UserError(
                f"mesh: {asked} = {degrees.data_parallel} processes, but {world_size} were started"
                f"; start {degrees.data_parallel} (NPROC) or write shard = -1 to take the rest"
            )
        return degrees

    def _inside_nodes(self, world_size: int, nodes: int) -> MeshDegrees:
        """A replica for each node, whose processes share it. replicate may say so too; 1, its default, is no wish."""
        if self.replicate not in (1, -1, nodes):
            raise UserError(
                f'mesh.replicate = {self.replicate}: shard = "node" makes one copy for each node, and there are {nodes}'
                "; leave replicate out"
            )
        if world_size % nodes:
            raise UserError(
                f'mesh.shard = "node": {world_size} processes on {nodes} nodes are not as many on each'
                "; start as many on each (NPROC), or write a number"
            )
        return MeshDegrees(nodes, world_size // nodes)


@dataclass(frozen=True)
class Float8Config:
    """Matrix multiplications of the blocks' linears in 8-bit floating point, through torchao."""

    recipe: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    """Scaling: one scale per tensor, per row, or per row with the weight gradient in high precision. "none" = off."""
    all_gather: bool = False
    """FSDP all-gathers weights in float8, halving the traffic; tensorwise only, scales computed after each step."""
    exclude: tuple[str, ...] = ("lm_head",)
    """Linears to leave alone: every one whose dotted name contains one of these as a whole component."""
    emulate: bool = False
    """Compute in bf16/fp32 with float8 rounding, for devices without float8 matrix units. Slow; for tests."""
    sample_every: Annotated[int, Ge(0)] = 0
    """Steps between those whose overflow and underflow, cast by cast, go to float8.jsonl; 0 = off. Needs no compile."""


@dataclass(frozen=True)
class AttentionConfig:
    """Kernels of attention without document masks; those have their own, for documents of various lengths."""

    backend: Literal["auto", "flash", "cudnn", "math"] = "auto"
    """What scaled_dot_product_attention may use; "auto" = what torch thinks best. It takes no other than asked for."""


@dataclass(frozen=True)
class ActivationCheckpointingConfig:
    """Trade recomputation in the backward pass for activation memory."""

    mode: Literal["none", "selective", "full"] = "none"
    """"full" recomputes whole blocks; "selective" keeps matmul and attention outputs and recomputes the cheap rest."""


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile, block by block."""

    enabled: bool = False
    """Compile every block in place with fullgraph=True."""
    autotune: bool = False
    """Time several kernels for each product and fused loop in the first step, minutes for a large model; GPUs."""


@dataclass(frozen=True)
class FSDPConfig:
    """Fully sharded data parallelism (FSDP2) and its mixed precision."""

    reshard_after_forward: bool = True
    """Free gathered weights after the forward pass (ZeRO-3); false keeps them for the backward pass (ZeRO-2)."""
    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of gathered weights and of the computation; the sharded master weights are float32."""
    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Precision of the gradient reduction."""
    prefetch: Annotated[int, Ge(1)] = 1
    """Blocks whose weights are gathered ahead of the one that computes; each more holds another block's weights."""
    cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer states in host memory, and step there."""
