"""The sizes of one process's part of a training step, from the dimensions of the model. Imports no torch."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod

from models.activations import Kept, Widths, at_swiglu_per_token, saved_per_token
from models.hf import inside_block
from models.registry import PLACES, Part
from parallel.config import MeshDegrees
from recipes.recipe.schema import Recipe

Pieces = dict[str, int]
"""What takes memory -> bytes."""


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers and reduces together, as one process has them."""

    share: int
    """Elements that it keeps."""
    whole: int
    """Elements that it gathers: those of all processes, padded to equal shares."""
    tensors: int

    @classmethod
    def of(cls, *shapes: tuple[int, int], shards: int) -> "Unit":
        """shapes: (rows, columns) of each parameter, of which FSDP deals out the rows."""
        share = sum(-(-rows // shards) * columns for rows, columns in shapes)
        return cls(share, share * shards, len(shapes))

    def __add__(self, other: "Unit") -> "Unit":
        return Unit(self.share + other.share, self.whole + other.whole, self.tensors + other.tensors)

    def __mul__(self, count: int) -> "Unit":
        return Unit(self.share * count, self.whole * count, self.tensors * count)


@dataclass(frozen=True)
class Sizes:
    """Sizes in elements or bytes, as each says."""

    recipe: Recipe
    degrees: MeshDegrees

    @cached_property
    def shards(self) -> int:
        """Processes that FSDP deals parameters out to."""
        return self.degrees.shards

    @cached_property
    def tokens(self) -> int:
        """Tokens of one micro-batch, on this process."""
        return self.recipe.batch.micro_batch_size * self.recipe.batch.sequence_length // self.degrees.context

    @cached_property
    def positions(self) -> int:
        """Number of positions of tokens in their texts: each row has its own where documents are masked."""
        rows = self.recipe.batch.micro_batch_size if self.recipe.data.document_mask else 1
        return rows * self.recipe.batch.sequence_length // self.degrees.context

    @cached_property
    def vocabulary(self) -> int:
        """Words of the vocabulary that this process has."""
        return self.recipe.model.vocabulary // self.degrees.tensor

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of a step, on each process."""
        return self.recipe.batch.micro_batches(self.degrees)

    @cached_property
    def accumulates(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.micro_batches > 1

    @cached_property
    def element(self) -> int:
        """Bytes of an element of activations, and of the weights that they are computed with."""
        return 2 if self.recipe.fsdp.param_dtype == "bfloat16" else 4

    @cached_property
    def reduced(self) -> int:
        """Bytes of an element of gradients that processes sum; micro-batches are added up in float32."""
        return 2 if self.recipe.fsdp.reduce_dtype == "bfloat16" else 4

    @cached_property
    def block(self) -> Unit:
        return self.block_of(self.recipe.model.feed_forward_width)

    def block_of(self, inner: int) -> Unit:
        """A block with a feed-forward of this inner width; 0 = none."""
        return Unit.of(*self._tensors(inner), shards=self.shards)

    def _tensors(self, inner: int) -> Iterator[tuple[int, int]]:
        """(rows, columns) that this process has of each tensor of such a block; a vector has one column."""
        model, tensor = replace(self.recipe.model, feed_forward_width=inner, experts=0), self.degrees.tensor
        for name, (rows, *columns) in inside_block(model, 0).items():
            place, _, own = name.removesuffix(".weight").removesuffix(".bias").partition(".")
            part = model.part(place) if place in PLACES else Part("")
            is_cut = own in (part.column or ()) or (own in part.norms and model.qk_norm == "all") or own == "sinks"
            yield rows // (tensor if is_cut else 1), prod(columns) // (tensor if own in part.row and columns else 1)

    @cached_property
    def norms_of_block(self) -> list[int]:
        """The features of each of a block's norms, biases and sinks."""
        return [rows for rows, columns in self._tensors(0) if columns == 1]

    @cached_property
    def table(self) -> Unit:
        """The embedding, and likewise an output projection of its own."""
        return Unit.of((self.vocabulary, self.recipe.model.width), shards=self.shards)

    @cached_property
    def norm(self) -> Unit:
        return Unit.of((self.recipe.model.norm_params(self.recipe.model.width), 1), shards=self.shards)

    @cached_property
    def tied(self) -> bool:
        return self.recipe.model.tied_embeddings

    @cached_property
    def tables(self) -> int:
        """Matrices as large as the vocabulary."""
        return 1 if self.tied else 2

    @cached_property
    def keeps_blocks(self) -> bool:
        """Whether gathered weights stay for the backward pass (ZeRO-2)."""
        return not self.recipe.fsdp.reshard_after_forward

    @cached_property
    def gathered(self) -> int:
        """Bytes of an element of gathered weights; 0 where a shard is whole, and itself what is computed with."""
        whole = self.shards == 1 and self.degrees.tensor == 1 and not self.recipe.fsdp.cpu_offload
        return 0 if whole and self.element == 4 else self.element

    @cached_property
    def gathered_block(self) -> int:
        """Bytes of a block's weights as they arrive."""
        if self.recipe.float8.all_gather and not self.recipe.float8.plain_linears:  # else at most as without
            norms = sum(self.norms_of_block)
            return self.block.whole - norms + self.gathered * norms
        return self.gathered * self.block.whole

    @cached_property
    def widths(self) -> Widths:
        """Widths of a block's activations, per token of this process."""
        mesh, widths = self.recipe.mesh, Widths.of(self.recipe.model).cut(self.degrees.tensor)
        if self.degrees.context == 1:
            return widths
        if mesh.context_by == "gather":
            return replace(widths, seen=widths.key * self.degrees.context)
        heads = self.recipe.model.key_value_heads // self.degrees.tensor
        copies = self.degrees.context // gcd(self.degrees.context, heads)
        return replace(widths, seen=widths.key * copies)

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """The blocks that recompute."""
        return self.recipe.activation_checkpointing.recomputed(self.recipe.model.layers)

    @cached_property
    def kept(self) -> tuple[Kept, Kept]:
        """How a block runs that does not recompute, and one that does."""
        recipe = self.recipe
        plain = Kept(
            float8=recipe.float8.recipe != "none" and not recipe.float8.plain_linears,  # else at most as without
            compiled=recipe.compile.enabled,
            exchanged=self.degrees.context > 1,
            element=self.element,
            fused_norms=recipe.run.device != "cpu",
        )
        return plain, replace(plain, mode=recipe.activation_checkpointing.mode)

    @cached_property
    def saved(self) -> tuple[float, float]:
        """Bytes per token that either saves."""
        plain, recomputing = map(self.saved_by, self.kept)
        return plain, recomputing

    def saved_by(self, kept: Kept) -> float:
        """Bytes per token that a block saves which runs like this."""
        return saved_per_token(self.widths, kept)

    def saved_before(self, layer: int) -> float:
        """Bytes per token that the blocks before this one save."""
        recomputed, (plain, recomputing) = bisect_left(self.recomputed, layer), self.saved
        return (layer - recomputed) * plain + recomputed * recomputing

    @cached_property
    def state(self) -> Pieces:
        """What lives from step to step."""
        layers = self.recipe.model.layers
        total = self.table * self.tables + self.block * layers + self.norm
        norms = Unit.of(*[(rows, 1) for rows in self.norms_of_block], shards=self.shards)
        matrices = layers * (self.block.share - norms.share), layers * (self.block.tensors - norms.tensors)
        moments = self.recipe.optimizer.state_bytes(total.share, total.tensors, matrices=matrices)
        if self.recipe.fsdp.cpu_offload:
            return {"parameters": 0, "moments": 0}
        return {"parameters": 4 * total.share, "moments": moments}

    @property
    def state_by_kind(self) -> Pieces:
        """The same, for people."""
        return self.state

    def inside(self, layer: int) -> tuple[int, int]:
        """Bytes where the backward pass of a block has most: of activations beside the saved ones, of new gradients."""
        model = self.recipe.model
        down = self.element * model.width * model.feed_forward_width // self.degrees.tensor
        return round(self.tokens * at_swiglu_per_token(self.widths, self.kept[layer in self.recomputed])), down

    @cached_property
    def stream(self) -> int:
        """Bytes of a gradient of the residual stream."""
        return round(self.element * self.tokens * self.widths.stream)

    @cached_property
    def read(self) -> int:
        """Bytes of a gradient of what a part of a block, or the head, reads."""
        return round(self.element * self.tokens * self.widths.read)

    def new(self, unit: Unit) -> int:
        """Bytes of gradients that one micro-batch has computed; accumulation has already added them to the others."""
        return 0 if self.accumulates else self.element * unit.whole

    def reduction(self, unit: Unit) -> int:
        """Bytes of what is summed over processes, of the sum, and of that in float32.

        Where nothing is sharded, FSDP has let go of the unit's gradients by then, but divides a copy for replicas.
        (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce)
        """
        message, rounded = self.reduced * unit.whole, self.reduced * unit.share if self.reduced < 4 else 0
        if self.shards > 1:
            return message + 4 * unit.share + rounded
        divided = message if self.degrees.replicate > 1 else 0
        own = rounded if self.recipe.fsdp.cpu_offload else 0
        after = max(divided, 2 * rounded) if not self.sent else 4 * unit.share + max(divided, own)
        return message + max(0, after - (4 if self.accumulates else self.element) * unit.whole)

    @cached_property
    def sent(self) -> int:
        """Bytes per element of a message while the next unit computes; 0 where it is the sum (parallel/fsdp.py)."""
        casts = self.reduced < 4 and self.degrees.replicate == 1
        return 0 if self.shards == 1 and not casts and not self.recipe.fsdp.cpu_offload else self.reduced

    @cached_property
    def held(self) -> int:
        """Bytes per element of sums over replicas that FSDP holds, beside their float32 copies, to the end of a pass.

        (pytorch #180900: else the next unit could write where the last one is still being summed.)
        """
        return self.reduced if self.reduced < 4 and self.degrees.replicate > 1 else 0

    @cached_property
    def in_forward(self) -> int:
        """Bytes that the forward pass of a block needs beside the saved ones; 0 where its backward pass needs more."""
        return 0

    @cached_property
    def new_of_tied_head(self) -> int:
        """Bytes of a tied head's new gradients: they wait for those of the embedding."""
        return self.element * self.table.whole if self.tied else 0
