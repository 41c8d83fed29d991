"""The sections of a recipe that parallel/ reads. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from models.config import LINEARS, LINEARS_IN
from parallel.axes import DATA_AXES, EXPERT, FSDP_AXES, LAYER_AXES, LOSS_AXES, NAMES, ROW_AXES, TOKEN_AXES
from parallel.errors import UserError


@dataclass(frozen=True, kw_only=True)
class MeshDegrees:
    """The mesh degrees for a known number of processes. Neighbouring ranks are in the same tensor group."""

    pipeline: int = 1
    replicate: int
    shard: int
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """Borrowed from the three axes before it: no factor of the number of processes."""

    def size(self, axes: Sequence[str]) -> int:
        """Number of processes along these axes together."""
        return prod(getattr(self, axis) for axis in axes)

    @property
    def data_parallel(self) -> int:
        """Number of shares of a global batch: processes that share a sequence or a matrix count as one."""
        return self.size(DATA_AXES)

    @property
    def shards(self) -> int:
        """Number of processes that FSDP deals parameters out to."""
        return self.size(FSDP_AXES)

    @property
    def per_layer(self) -> int:
        """Number of processes that hold the parts of one copy of a layer."""
        return self.size(LAYER_AXES)

    @property
    def copy(self) -> int:
        """Number of processes that hold one copy of the model together."""
        return self.pipeline * self.per_layer

    @property
    def processes(self) -> int:
        """Number of all processes."""
        return self.size(NAMES)

    def have_copies(self, *, tied: bool) -> bool:
        """Whether processes hold the same tensors: replicas all, a tensor group norms, two stages a tied embedding."""
        return self.replicate > 1 or self.tensor > 1 or (tied and self.pipeline > 1)

    def wide(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of the axes along which there are several processes."""
        return tuple(axis for axis in axes if getattr(self, axis) > 1)

    @property
    def dimensions(self) -> dict[str, int]:
        """The dimensions of the DeviceMesh, outermost first.

        Of the others than DATA_AXES, one of a single process would cost process groups, and 2D parameters for nothing.
        """
        return {axis: getattr(self, axis) for axis in NAMES if axis in (*DATA_AXES, *self.wide(NAMES))}

    @property
    def dimensions_of_experts(self) -> dict[str, int]:
        """The dimensions of the DeviceMesh over which experts are divided and sharded; none where one is enough.

        Tensor groups have all of a row's tokens, but at routers only parts of them: they need it, too.
        """
        if self.expert == self.tensor == 1:
            return {}
        sizes = {axis: getattr(self, axis) for axis in self.wide(NAMES) if axis not in LAYER_AXES}
        sizes["shard"] = self.per_layer // self.expert
        return sizes | ({EXPERT: self.expert} if self.expert > 1 else {})

    def group_sizes(self, *, experts: bool = False, muon: bool = False, split_ends: bool = False) -> list[int]:
        """The sizes of the process groups that each process is in, that of all processes first.

        torch makes one for each dimension of a DeviceMesh; parallel/mesh.py makes those over several together. experts:
        with those of a model with experts. muon: with that of the parts of a matrix. split_ends: with that of a tied
        embedding, where two processes of a pipeline have the first and last stage.
        """
        together = [DATA_AXES, LOSS_AXES, FSDP_AXES, *([LAYER_AXES] if muon else [])]
        together += [TOKEN_AXES, ROW_AXES] if experts else []
        groups = {(axis,) for axis in self.dimensions} | {self.wide(axes) for axes in together} - {()}
        sizes = [self.size(axes) for axes in groups]
        sizes += self.dimensions_of_experts.values() if experts else ()
        sizes += [2] if split_ends and self.pipeline > 2 else []  # of two, the pipeline group has both
        return [self.processes, *sorted(size for size in sizes if size < self.processes)]

    def __str__(self) -> str:
        """Text such as "replicate 2 x shard 4 x tensor 8"."""
        text = " x ".join(f"{axis} {degree}" for axis, degree in self.dimensions.items())
        return f"{text}, of which expert {self.expert}" if self.expert > 1 else text


@dataclass(frozen=True)
class MeshConfig:
    """Layout of the processes. The product of the degrees is the number of processes."""

    replicate: Annotated[int, Ge(-1)] = 1
    """Replicas of the sharded model (hybrid sharding), with gradients all-reduced across them; -1 = the rest."""
    shard: Annotated[int, Ge(-1)] | Literal["node"] = -1
    """Sharding degree of FSDP; 1 = none, -1 = the rest, "node" = the rest of a node, one replica or stage each."""
    context: Annotated[int, Ge(1)] = 1
    """Context-parallel degree: processes that hold parts of the same sequences. For long sequences."""
    tensor: Annotated[int, Ge(1)] = 1
    """Tensor-parallel degree: processes of one node that hold parts of the same matrices. For models from about 30B."""
    pipeline: Annotated[int, Ge(1)] = 1
    """Pipeline-parallel degree: processes that hold some of the blocks each, one after the other. For slow networks."""
    context_by: Literal["heads", "gather"] = "heads"
    """How parts of a sequence see each other: exchange tokens for heads (Ulysses), or gather all keys and values."""
    overlap_tensor: bool = False
    """Exchange tensor-parallel activations during the products beside them (async tensor parallelism); GPUs only."""
    expert: Annotated[int, Ge(1)] = 1
    """Expert-parallel degree: neighbours among shard x context x tensor that hold some of the experts each."""

    @property
    def gathers_tokens(self) -> bool:
        """Whether a part of the tokens attends to gathered keys."""
        return self.context > 1 and self.context_by == "gather"

    def fit(self, processes: int | None, *, nodes: int | None = None) -> MeshDegrees:
        """The degrees with -1 and "node" replaced, so that their product, without `expert`, is the number of processes.

        processes, nodes: None = as few as the degrees allow. Raises UserError, with the arithmetic and one line for
        each problem, if the processes cannot be laid out like that.
        """
        inner = self.context * self.tensor
        rest = self.expert // gcd(self.expert, inner)  # of shard, from which experts are borrowed, too
        if self.shard == "node":
            nodes = nodes or max(1, self.replicate) * self.pipeline
            degrees = self._fit(processes or nodes * inner * rest, nodes)
        else:
            data = abs(self.replicate) * rest if self.shard == -1 else max(1, abs(self.replicate * self.shard))
            degrees = self._fit(processes or data * inner * self.pipeline, nodes)
        if degrees.per_layer % self.expert:
            lent = " x ".join(f"{axis} {getattr(degrees, axis)}" for axis in LAYER_AXES)
            raise UserError(
                f"mesh.expert = {self.expert}: must divide {lent} = {degrees.per_layer}, from which it is borrowed;"
                " write one of its divisors"
            )
        return replace(degrees, expert=self.expert)

    def _fit(self, world_size: int, nodes: int | None) -> MeshDegrees:
        inner = {axis: getattr(self, axis) for axis in NAMES if axis not in DATA_AXES}
        shown = [axis for axis in NAMES if axis != "pipeline" or self.pipeline > 1]
        asked = " x ".join(f"{axis} {getattr(self, axis)}" for axis in shown)
        problems = [
            f"mesh.{axis} = 0: a degree must be at least 1; write 1, or -1 for the rest"
            for axis in DATA_AXES
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
            fixed = (self.shard if self.replicate == -1 else self.replicate) * prod(inner.values())
            if world_size % fixed:
                raise UserError(
                    f"mesh: {asked} does not fit {world_size} processes: {world_size} / {fixed} is not an integer"
                    f"; start a multiple of {fixed} processes (NPROC) or change the degrees"
                )
            rest = world_size // fixed
            replicate, shard = (rest, self.shard) if self.replicate == -1 else (self.replicate, rest)
            return MeshDegrees(replicate=replicate, shard=shard, **inner)
        product = self.replicate * self.shard * prod(inner.values())
        if product != world_size:
            raise UserError(
                f"mesh: {asked} = {product} processes, but {world_size} were started"
                f"; start {product} (NPROC) or write shard = -1 to take the rest"
            )
        return MeshDegrees(replicate=self.replicate, shard=self.shard, **inner)

    def _inside_nodes(self, world_size: int, nodes: int) -> MeshDegrees:
        """One replica per node, or as many nodes as a pipeline has processes, sharded over the processes of a node.

        replicate may be the number of replicas or its default, 1.
        """
        if nodes % self.pipeline:
            raise UserError(
                f'mesh.shard = "node": {nodes} nodes cannot be divided equally among the stages of pipeline'
                f" {self.pipeline}; start a multiple of {self.pipeline}, or write a number"
            )
        replicas = nodes // self.pipeline
        if self.replicate not in (1, -1, replicas):
            what = "replica per node" if self.pipeline == 1 else f"replica per {self.pipeline} nodes"
            raise UserError(
                f'mesh.replicate = {self.replicate}: shard = "node" makes one {what}, and there are {nodes}'
                "; omit replicate"
            )
        if world_size % nodes:
            raise UserError(
                f'mesh.shard = "node": {world_size} processes cannot be divided equally among {nodes} nodes'
                "; start the same number on each (NPROC), or write a number"
            )
        inside, inner = world_size // nodes, self.context * self.tensor
        if inside % inner:
            raise UserError(
                f'mesh.shard = "node": the {inside} processes of a node cannot be divided by context {self.context} x'
                f" tensor {self.tensor} = {inner}; start a multiple of {inner} on each (NPROC), or change the degrees"
            )
        return replace(self, replicate=replicas, shard=inside // inner)._fit(world_size, nodes)


@dataclass(frozen=True)
class PipelineConfig:
    """How micro-batches pass through the stages of a pipeline; without mesh.pipeline, nothing reads it."""

    schedule: Literal["1f1b", "gpipe", "interleaved", "zbv", "interleaved_zero_bubble"] = "1f1b"
    """Order of passes; the last two, from torch 2.12 on, compute gradients of weights when there is nothing else."""
    stages_per_rank: Annotated[int, Ge(0)] = 0
    """Runs of neighbouring blocks that each process has; 0 = 1 for "1f1b" and "gpipe", 2 for the others."""
    split: tuple[int, ...] = ()
    """Number of blocks of each stage, in order; none = balanced by FLOPs, with the output projection counted."""

    @property
    def runs(self) -> int:
        """Stages of each process."""
        return self.stages_per_rank or (1 if self.schedule in ("1f1b", "gpipe") else 2)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of hidden states (zero bubble)."""
        return self.schedule in ("zbv", "interleaved_zero_bubble")


@dataclass(frozen=True)
class Float8Config:
    """8-bit floating-point matrix multiplications in the linears of the blocks, through torchao."""

    recipe: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    """Scales per tensor, per row, or per row with the weight gradient in high precision; "none" = off."""
    all_gather: bool = False
    """All-gather weights in float8, which halves the traffic; tensorwise only, scales are computed after each step."""
    gather_activations: bool = False
    """With tensor parallelism, gather activations and their gradients in float8: half the bytes, the same numbers."""
    exclude: tuple[str, ...] = ("lm_head",)
    """Linears not to convert: those with one of these as a component of their dotted name."""
    emulate: bool = False
    """Compute in bf16 or fp32 with float8 rounding, for devices without float8 matrix units. Slow; for tests."""

    @property
    def plain_linears(self) -> frozenset[str]:
        """The linears that are excluded in every block; those excluded in single blocks, by number, are left out."""
        return frozenset(name for part in self.exclude for name in LINEARS_IN.get(part, (part,)) if name in LINEARS)


@dataclass(frozen=True)
class AttentionConfig:
    """Attention kernels. Document masks have one of their own, which "flash3" replaces, too."""

    backend: Literal["auto", "flash", "flash3", "cudnn", "math"] = "auto"
    """"auto" = torch chooses, on Hopper cuDNN; "flash3" = FlashAttention 3, from its own package. No fall-back."""


@dataclass(frozen=True)
class ActivationCheckpointingConfig:
    """Recompute activations in the backward pass to save memory."""

    mode: Literal["none", "selective", "full"] = "none"
    """"full" recomputes whole blocks; "selective" keeps matmul and attention outputs and recomputes the rest."""
    blocks: Annotated[int, Ge(1)] | Annotated[float, Interval(gt=0, le=1)] | Literal["all"] = "all"
    """How many blocks, evenly spread, recompute: "all", a number, or a share such as 0.5, rounded, but at least one."""

    def recomputed(self, layers: int) -> tuple[int, ...]:
        """The indexes, in the order of the forward pass, of the blocks that recompute. layers: number of all blocks.

        The last block does only if all do: the backward pass starts there, when the others' activations are all still
        in memory, and recomputing would add its own.
        """
        if self.mode == "none":
            return ()
        count = layers if self.blocks == "all" else self.blocks
        if isinstance(count, float):
            count = max(1, round(count * layers))
        assert count <= layers, "recipes/recipe/rules.py refuses more blocks than there are"
        return tuple(index * layers // count for index in range(count))


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile, one block at a time, and for the loss."""

    enabled: bool = False
    """Compile every block and the loss in place with fullgraph=True."""
    autotune: bool = False
    """Time several kernels for each matmul and fused loop in the first step; minutes for a large model. GPUs only."""


@dataclass(frozen=True)
class FSDPConfig:
    """Fully sharded data parallelism (FSDP2) and its mixed precision."""

    reshard_after_forward: bool = True
    """Free gathered weights after the forward pass (ZeRO-3); false keeps them until the step ends (ZeRO-2)."""
    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the gathered weights and the computation; the sharded master weights are float32."""
    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Precision of the messages that sum gradients over processes; micro-batches are added up in float32."""
    prefetch: Annotated[int, Ge(1)] = 1
    """How many blocks ahead to all-gather weights; each adds the memory of one block's weights."""
    symmetric_memory: bool = False
    """Exchange weights and gradients in memory that NCCL's faster kernels use; torch 2.12 or later, on GPUs."""
    cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory, and run the optimizer there."""
