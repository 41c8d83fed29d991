"""What a search may change about a recipe, and which of it the recipe's rules accept. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import gcd
from typing import Any

from parallel.config import ActivationCheckpointingConfig, MeshConfig, MeshDegrees, PipelineConfig
from parallel.errors import UserError
from recipes.lab.plan.plan import World
from recipes.plan.hardware import Gpu
from recipes.recipe.fields import sections, toml
from recipes.recipe.rules import violations
from recipes.recipe.rules_mesh import mesh_fits
from recipes.recipe.schema import Recipe

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, "all")
"""Shares of the blocks that recompute."""
SEARCHED = (
    *(f"mesh.{name}" for name in ("pipeline", "replicate", "shard", "context", "tensor", "context_by", "expert")),
    *("batch.micro_batch_size", "activation_checkpointing.mode", "activation_checkpointing.blocks"),
    *("fsdp.reshard_after_forward", "batch.loss_chunks", "fsdp.prefetch"),
    *("pipeline.schedule", "pipeline.stages_per_rank"),
)
"""Fields that a search changes."""
PIPELINE = (1, 2, 4, 8, 16)
"""Degrees for models whose parameters and moments do not fit in a node; without replicas, context as in the recipe."""
ORDERS = (
    *(PipelineConfig("1f1b"), PipelineConfig("interleaved"), PipelineConfig("interleaved", 4)),
    *(PipelineConfig("zbv"), PipelineConfig("interleaved_zero_bubble")),
)
"""Orders of passes through a pipeline. GPipe has the bubble of 1F1B, and needs more memory."""
CHUNKS = (1, 2, 4, 8, 16)
PREFETCH = (1, 2, 3)
BATCH, SEQUENCE = "the batch does not divide", "the sequence does not divide"
REASONS = {
    "batch.global_batch_size": BATCH,
    "batch.sequence_length": SEQUENCE,
    **dict.fromkeys(("mesh.pipeline", "pipeline.stages_per_rank"), "the blocks cannot be so many stages"),
    "pipeline.schedule": "too few micro-batches for the stages",
    "mesh.tensor": "the model's matrices do not divide",
    "mesh.context": "the heads do not divide",
    "mesh.expert": "the experts do not divide",
    "float8.all_gather": "rows gathered in float8 do not divide",
    **dict.fromkeys(("mesh", "mesh.shard", "mesh.replicate"), "the degrees do not fit the processes"),
}
"""Key of a broken rule -> what is wrong with the mesh, in a few words."""

Changes = dict[str, dict[str, Any]]
"""Section -> field -> value."""
Tuning = tuple[int, int]
"""batch.loss_chunks, fsdp.prefetch."""


@dataclass(frozen=True)
class Meshed:
    """A recipe with a mesh and a micro-batch."""

    recipe: Recipe
    degrees: MeshDegrees


@dataclass(frozen=True)
class Candidate(Meshed):
    """A recipe that may be the fastest, or lie on the front."""

    peak: int
    """Bytes."""
    seconds: float
    """Seconds of a step."""


@dataclass(frozen=True)
class Space:
    """All that a search tries for one recipe on some GPUs."""

    recipe: Recipe
    world: World
    fixed: frozenset[str] = frozenset()
    """Dotted keys that stay as they are in the recipe."""

    def layouts(self) -> Iterator[Meshed | str]:
        """Every mesh with every micro-batch that the rules accept; for each mesh that they refuse, why."""
        for mesh, order in ((each, order) for each in self._meshes() for order in self._orders(each)):
            float8 = self.recipe.float8
            if mesh.tensor == 1:
                float8 = replace(float8, gather_activations=False)  # no group gathers any
            meshed = replace(self.recipe, mesh=mesh, float8=float8, pipeline=order)
            if mesh.pipeline > 1 and order.splits_backward:
                meshed = self._with_split_backward(meshed)
            size_is_free = "batch.micro_batch_size" not in self.fixed
            refused = self.refusal(self._with_micro_batch(meshed, 1) if size_is_free else meshed)
            if refused and not (size_is_free and refused == SEQUENCE):  # more rows may divide
                yield refused
                continue
            degrees = mesh.fit(self.world.processes, nodes=self.world.nodes)
            meshed = replace(meshed, mesh=self._as_written(mesh, degrees))
            share = max(1, self.recipe.batch.global_batch_size // degrees.data_parallel)
            sizes = divisors(share)[: None if degrees.pipeline == 1 else 2]  # larger ones leave fewer for the stages
            for micro in self._values("batch.micro_batch_size", sizes):
                candidate = self._with_micro_batch(meshed, micro)
                yield self.refusal(candidate) or Meshed(candidate, degrees)

    def refusal(self, recipe: Recipe) -> str | None:
        """Why train.py --check would refuse this candidate, in a few words; None if it would not."""
        broken = violations(recipe, None, processes=self.world.processes, nodes=self.world.nodes, elsewhere=True)
        key = next((key for key, _ in broken), None)
        return key and REASONS.get(key, f"a rule about {key}")

    def settings(self, layout: Meshed) -> Iterator[list[Recipe]]:
        """Recipes with ever more blocks that recompute, for each mode of checkpointing and each ZeRO stage.

        Those in which fewer than half of the blocks do come apart from the others, which are of another kind.
        """
        stages = self._values("fsdp.reshard_after_forward", (True, False))
        for checkpointing in self._checkpointing:
            for reshard in stages:
                splits = layout.degrees.pipeline > 1 and layout.recipe.pipeline.splits_backward
                if splits and (reshard or checkpointing[0].mode == "selective"):
                    continue  # rules
                fsdp = replace(layout.recipe.fsdp, reshard_after_forward=reshard)
                yield [replace(layout.recipe, fsdp=fsdp, activation_checkpointing=way) for way in checkpointing]

    def finer(self, settings: list[Recipe], first: int) -> list[Recipe]:
        """Settings between the first that fits and the one before, with every number of blocks."""
        if "activation_checkpointing.blocks" in self.fixed:
            return []
        layers = self.recipe.model.layers
        near = settings[max(0, first - 1) : first + 1]
        counts = [len(setting.activation_checkpointing.recomputed(layers)) for setting in near]
        below = counts[0] if first else 0 if 2 * counts[0] < layers else counts[0] - 1
        way = settings[first].activation_checkpointing
        ways = [replace(way, blocks=count) for count in range(below + 1, counts[-1])]
        return [replace(settings[first], activation_checkpointing=way) for way in ways]

    @cached_property
    def tunings(self) -> list[Tuning]:
        """Tunings from the fastest, which needs the most memory, to the leanest."""
        chunks = self._values("batch.loss_chunks", {*CHUNKS, self.recipe.batch.loss_chunks})
        ahead = self._values("fsdp.prefetch", {*PREFETCH, self.recipe.fsdp.prefetch})
        return [(few, far) for few in sorted(chunks) for far in sorted(ahead, reverse=True)]

    @cached_property
    def own_tuning_first(self) -> list[Tuning]:
        """The tunings by the number of fields that they change."""
        given = self.recipe.batch.loss_chunks, self.recipe.fsdp.prefetch
        return sorted(
            self.tunings, key=lambda tuning: sum(one != other for one, other in zip(tuning, given, strict=True))
        )

    @cached_property
    def own_degrees(self) -> MeshDegrees | None:
        """The degrees of the recipe's own mesh, if it fits the processes."""
        if any(mesh_fits(self.recipe.mesh, processes=self.world.processes, nodes=self.world.nodes)):
            return None
        return self.recipe.mesh.fit(self.world.processes, nodes=self.world.nodes)

    @cached_property
    def _checkpointing(self) -> list[list[ActivationCheckpointingConfig]]:
        """Lists for each mode, of fewer than half of the blocks and of the others, with ever more that recompute."""
        given, layers = self.recipe.activation_checkpointing, self.recipe.model.layers
        ways: list[list[ActivationCheckpointingConfig]] = []
        for mode in self._values("activation_checkpointing.mode", ("none", "selective", "full")):
            if mode == "none":
                if given.blocks == "all" or "activation_checkpointing.blocks" not in self.fixed:
                    ways.append([ActivationCheckpointingConfig()])
                continue
            halves = [count for count in ((layers - 1) // 2, -(-layers // 2)) if count]  # most of few, fewest of many
            blocks = self._values("activation_checkpointing.blocks", (*SHARES, *halves))
            shares = [replace(given, mode=mode, blocks=share) for share in (given.blocks, *blocks)]
            by_count = {len(share.recomputed(layers)): share for share in reversed(shares)}  # the recipe's own wins
            few, many = (
                [by_count[count] for count in sorted(by_count) if (2 * count >= layers) == half]
                for half in (False, True)
            )
            ways += [few, many]
        return [each for each in ways if each]

    def _values(self, key: str, values: Any) -> Any:
        """These values for a field, or the recipe's alone if it is fixed."""
        section, _, name = key.partition(".")
        return (getattr(getattr(self.recipe, section), name),) if key in self.fixed else values

    def _meshes(self) -> Iterator[MeshConfig]:
        """Every way to lay out the processes, with tensor groups inside nodes."""
        given, tensors = self.recipe.mesh, divisors(self.world.processes // self.world.nodes)
        for pipeline, tensor in product(self._pipelines(), self._values("mesh.tensor", tensors)):
            rest = max(1, self.world.processes // (pipeline * tensor))
            free = pipeline == 1 and not self.recipe.model.experts  # else the degrees are too many
            for context in self._values("mesh.context", divisors(rest) if free else [given.context]):
                unread = (given.context_by if given.context == 1 else "heads",)
                for context_by in self._values("mesh.context_by", ("heads", "gather")) if context > 1 else unread:
                    for replicate, shard in self._outer(max(1, rest // context))[: None if pipeline == 1 else 1]:
                        axes = {"replicate": replicate, "shard": shard, "context": context, "tensor": tensor}
                        mesh = MeshConfig(**axes, pipeline=pipeline, context_by=context_by)
                        mesh = replace(mesh, overlap_tensor=given.overlap_tensor and tensor > 1)
                        yield from (replace(mesh, expert=degree) for degree in self._experts(mesh))

    def _experts(self, mesh: MeshConfig) -> Sequence[int]:
        """Degrees of experts that this mesh can lend processes to."""
        try:
            processes = mesh.fit(self.world.processes, nodes=self.world.nodes).per_layer
        except UserError:  # which the rules report
            return (self.recipe.mesh.expert,)
        return self._values("mesh.expert", divisors(gcd(processes, self.recipe.model.experts or 1)))

    def _pipelines(self) -> Sequence[int]:
        """Degrees of a pipeline: 1 and the recipe's own, and further ones where they can pay."""
        given, node = self.recipe.mesh.pipeline, self.world.processes // self.world.nodes
        is_large = self.world.nodes > 1 and 12 * self.recipe.model.num_params() > node * self.world.gpu.memory
        degrees = [degree for degree in (PIPELINE if is_large else (1, given)) if self.world.nodes % degree == 0]
        return self._values("mesh.pipeline", sorted({*degrees, given}))

    def _orders(self, mesh: MeshConfig) -> Sequence[PipelineConfig]:
        """The recipe's own order of passes, and further ones; the default where there is no pipeline to read it."""
        given, fixed = self.recipe.pipeline, {"pipeline.schedule", "pipeline.stages_per_rank", "pipeline.split"}
        if mesh.pipeline == 1:
            return [given if self.recipe.mesh.pipeline == 1 else PipelineConfig()]
        kept = [key.rpartition(".")[2] for key in fixed & self.fixed] + (["split"] if given.split else [])
        orders = (replace(order, **{name: getattr(given, name) for name in kept}) for order in ORDERS)
        same = [order for order in orders if not given.split or order.runs == given.runs]
        return [*dict.fromkeys((given, *(order for order in same if order.runs == 1 or order.schedule != "1f1b")))]

    def _outer(self, rest: int) -> Sequence[tuple[int, Any]]:
        """(replicate, shard) for so many groups of processes."""
        given, fixed = self.recipe.mesh, {"mesh.replicate", "mesh.shard"} & self.fixed
        if len(fixed) == 2:
            return [(given.replicate, given.shard)]
        if "mesh.shard" in fixed and given.shard != -1:
            return [(1 if given.shard == "node" else -1, given.shard)]
        if "mesh.replicate" in fixed:
            return [(-1, degree) for degree in divisors(rest)] if given.replicate == -1 else [(given.replicate, -1)]
        return [(degree, -1) for degree in divisors(rest)]

    def _as_written(self, mesh: MeshConfig, degrees: MeshDegrees) -> MeshConfig:
        """The mesh as one would write it: as in the recipe if the degrees are the same, or with shard = "node"."""
        given = self.recipe.mesh
        if degrees == self.own_degrees and mesh.context_by == given.context_by:
            return given
        nodes = self.world.nodes
        if {"mesh.replicate", "mesh.shard"} & self.fixed or nodes == 1 or degrees.replicate != nodes:
            return mesh
        return replace(mesh, replicate=1, shard="node")

    def _with_split_backward(self, recipe: Recipe) -> Recipe:
        """The recipe with what its schedule needs, where that is searched; settings() has the same rules."""
        way = recipe.activation_checkpointing
        if "fsdp.reshard_after_forward" not in self.fixed:
            recipe = replace(recipe, fsdp=replace(recipe.fsdp, reshard_after_forward=False))
        if way.mode == "selective" and "activation_checkpointing.mode" not in self.fixed:
            recipe = replace(recipe, activation_checkpointing=replace(way, mode="full"))
        return recipe

    def _with_micro_batch(self, recipe: Recipe, size: int) -> Recipe:
        return replace(recipe, batch=replace(recipe.batch, micro_batch_size=size))


def divisors(number: int) -> list[int]:
    """The divisors of a number, in order."""
    low = [factor for factor in range(1, int(number**0.5) + 1) if number % factor == 0]
    return sorted({*low, *(number // factor for factor in low)})


def tuned(recipe: Recipe, tuning: Tuning) -> Recipe:
    chunks, prefetch = tuning
    batch, fsdp = replace(recipe.batch, loss_chunks=chunks), replace(recipe.fsdp, prefetch=prefetch)
    return replace(recipe, batch=batch, fsdp=fsdp)


def numerics_of(recipe: Recipe, *, gpu: Gpu, fixed: frozenset[str]) -> Iterator[tuple[str, Recipe]]:
    """(what it is, the recipe with it) for each change of the training's numbers that can be faster, then for several.

    Float8 keeps the recipe's exclusions, and leaves out experts. What is fixed, on already, or against a rule that the
    recipe keeps is left out.
    """
    float8 = recipe.float8
    if recipe.model.experts and "experts" not in float8.exclude and "float8.exclude" not in fixed:
        float8 = replace(float8, exclude=(*float8.exclude, "experts"))
    changed_sections: dict[str, dict[str, Any]] = {}
    if gpu.float8_peak and float8.recipe == "none" and not {"float8.recipe", "float8.all_gather"} & fixed:
        tensorwise = replace(float8, recipe="tensorwise")
        changed_sections["float8"] = {"float8": tensorwise}
        changed_sections["float8, gathered"] = {"float8": replace(tensorwise, all_gather=True)}
        changed_sections["float8 rowwise"] = {"float8": replace(float8, recipe="rowwise")}
    if recipe.optimizer.state_dtype == "float32" and "optimizer.state_dtype" not in fixed:
        changed_sections["bf16 moments"] = {"optimizer": replace(recipe.optimizer, state_dtype="bfloat16")}
    # FSDP of torch 2.13 takes no reduction of our own where experts have another mesh than the rest.
    if recipe.fsdp.reduce_dtype == "float32" and "fsdp.reduce_dtype" not in fixed and not recipe.model.experts:
        changed_sections["bf16 sums"] = {"fsdp": replace(recipe.fsdp, reduce_dtype="bfloat16")}
    together = dict(section for change in reversed(changed_sections.values()) for section in change.items())
    if len(together) > 1:
        changed_sections["all of these" if "float8" in together else "bf16 both"] = together
    broken = {*violations(recipe, None, elsewhere=True)}
    for name, change in changed_sections.items():
        changed = replace(recipe, **change)
        if broken.issuperset(violations(changed, None, elsewhere=True)):
            yield name, changed


def changes(original: Recipe, other: Recipe) -> Changes:
    """Section -> field -> value of the other recipe, where they differ."""
    changed: Changes = {}
    for section in sections(type(other)):
        before, after = vars(getattr(original, section)), vars(getattr(other, section))
        if before != after:
            changed[section] = {name: value for name, value in after.items() if value != before[name]}
    return changed


def as_keys(changed: Changes) -> str:
    """The changed fields on one line, such as "fsdp.prefetch = 2, optimizer.lr = 0.1"."""
    keys = {f"{section}.{name}": value for section, fields in changed.items() for name, value in fields.items()}
    return ", ".join(f"{key} = {toml(value)}" for key, value in keys.items())
