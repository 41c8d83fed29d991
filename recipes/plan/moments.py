"""What lives on one process at each moment of a training step, in bytes, from the dimensions of the model.

What lives at once was read off FSDP2, and tests compare it with real steps whose storages are counted.
Imports no torch.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

from models.activations import Kept, Widths, at_swiglu_per_token, final_norm_per_token, saved_per_token
from parallel.config import MeshDegrees
from recipes.schema import Recipe

MOMENTS_AT_A_TIME = 2**27
"""Elements, as BATCH in recipes/optimization/optimizer.py."""

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


@dataclass(frozen=True)
class Step:
    """The sizes of one process's part of a step, and what lives at its moments."""

    recipe: Recipe
    degrees: MeshDegrees

    def moments(self, layers: Collection[int]) -> Iterator[tuple[str, Pieces]]:
        """Those that can be the fullest, in the order of a step's last micro-batch; of blocks, those of these."""
        yield "the loss", self._loss(backward=False)
        yield "the gradient of the logits", self._loss(backward=True)
        yield "the gradient of the head", self._head()
        if not self.tied:
            yield "the reduction of the head", self._reduced_head()
        for layer in sorted(layers, reverse=True):
            yield f"the backward pass of block {layer}", self._block(layer)
            yield f"the reduction of block {layer}", self._reduced_block(layer)
        yield "the gradient of the embedding", self._embedding()
        yield "the reduction of the embedding", self._reduced_embedding()
        yield "the optimizer", self._optimizer()

    def fullest_layers(self) -> set[int]:
        """Those among which are the blocks at which the most lives.

        Between the first ones, which gather less ahead, and the last one, what lives changes by as much from each
        block to the next, as long as they run alike.
        """
        last = self.recipe.model.layers - 1
        ends = {0, min(1, last), min(self.recipe.fsdp.prefetch, last), max(0, last - 1), last}
        if len(self.recomputed) in (0, last + 1):
            return ends
        unit, on_device = self.block, not self.recipe.fsdp.cpu_offload
        gradients = self.accumulates * self.reduced * unit.whole - 4 * on_device * unit.share
        each = gradients + self.keeps_blocks * self.gathered_block
        for kind in (self.recomputed, {*range(last + 1)} - {*self.recomputed}):
            for after in (0, 1):
                bytes_at = {
                    layer: each * layer + self._next_gather(layer) + self.tokens * self._saved_before(layer + after)
                    for layer in kind
                }
                ends.add(max(bytes_at, key=bytes_at.__getitem__))
        return ends

    # Sizes.

    @cached_property
    def shards(self) -> int:
        """Processes that FSDP deals parameters out to."""
        return self.degrees.shard * self.degrees.context

    @cached_property
    def tokens(self) -> int:
        """Of one micro-batch, on this process."""
        return self.recipe.batch.micro_batch_size * self.recipe.batch.sequence_length // self.degrees.context

    @cached_property
    def accumulates(self) -> bool:
        """Whether a step has several micro-batches."""
        batch = self.recipe.batch
        return batch.global_batch_size > batch.micro_batch_size * self.degrees.data_parallel

    @cached_property
    def element(self) -> int:
        """Bytes of an element of activations, and of the weights that they are computed with."""
        return 2 if self.recipe.fsdp.param_dtype == "bfloat16" else 4

    @cached_property
    def reduced(self) -> int:
        """Bytes of an element of gradients that are summed."""
        return 2 if self.recipe.fsdp.reduce_dtype == "bfloat16" else 4

    @cached_property
    def block(self) -> Unit:
        model, tensor = self.recipe.model, self.degrees.tensor
        width, inner = model.width, model.feed_forward_width // tensor
        query, key = (heads * model.head_width // tensor for heads in (model.heads, model.key_value_heads))
        norms = [(width, 1)] * 2
        attention = [(query, width), (key, width), (key, width), (width, query)]
        return Unit.of(*norms, *attention, (inner, width), (inner, width), (width, inner), shards=self.shards)

    @cached_property
    def table(self) -> Unit:
        """The embedding, and likewise an output projection of its own."""
        model = self.recipe.model
        return Unit.of((model.vocabulary // self.degrees.tensor, model.width), shards=self.shards)

    @cached_property
    def norm(self) -> Unit:
        return Unit.of((self.recipe.model.width, 1), shards=self.shards)

    @cached_property
    def tied(self) -> bool:
        return self.recipe.model.tied_embeddings

    @cached_property
    def tables(self) -> int:
        """Matrices as large as the vocabulary."""
        return 1 if self.tied else 2

    @cached_property
    def keeps_blocks(self) -> bool:
        """ZeRO-2: gathered weights stay for the backward pass."""
        return not self.recipe.fsdp.reshard_after_forward

    @cached_property
    def gathered(self) -> int:
        """Bytes of an element of gathered weights: a whole shard in its own type is computed with itself."""
        whole = self.shards == 1 and self.degrees.tensor == 1 and not self.recipe.fsdp.cpu_offload
        return 0 if whole and self.element == 4 else self.element

    @cached_property
    def gathered_block(self) -> int:
        """Bytes of a block's weights as they arrive."""
        if self.recipe.float8.all_gather:
            norms = 2 * self.recipe.model.width
            return self.block.whole - norms + self.gathered * norms
        return self.gathered * self.block.whole

    @cached_property
    def widths(self) -> Widths:
        """Of a block's activations, per token of this process."""
        mesh, widths = self.recipe.mesh, Widths.of(self.recipe.model).cut(self.degrees.tensor)
        if self.degrees.context == 1:
            return widths
        if mesh.context_by == "gather":  # all keys and values, besides the process's own
            return replace(widths, key=widths.key * (1 + self.degrees.context))
        heads = self.recipe.model.key_value_heads // self.degrees.tensor
        copies = self.degrees.context // gcd(self.degrees.context, heads)
        return replace(widths, key=widths.key * copies)

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """The blocks that recompute."""
        return self.recipe.activation_checkpointing.recomputed(self.recipe.model.layers)

    @cached_property
    def kept(self) -> tuple[Kept, Kept]:
        """How a block runs that does not recompute, and one that does."""
        recipe = self.recipe
        plain = Kept(
            float8=recipe.float8.recipe != "none",
            compiled=recipe.compile.enabled,
            exchanged=self.degrees.context > 1 and recipe.mesh.context_by == "heads",
            element=self.element,
        )
        return plain, replace(plain, mode=recipe.activation_checkpointing.mode)

    @cached_property
    def saved(self) -> tuple[float, float]:
        """Bytes per token that either saves."""
        plain, recomputing = self.kept
        return saved_per_token(self.widths, plain), saved_per_token(self.widths, recomputing)

    @cached_property
    def beside_saved(self) -> tuple[float, float]:
        """Bytes per token that the backward pass of either needs besides."""
        plain, recomputing = self.kept
        return at_swiglu_per_token(self.widths, plain), at_swiglu_per_token(self.widths, recomputing)

    def _saved_before(self, layer: int) -> float:
        """Bytes per token that the blocks before this one save."""
        recomputed, (plain, recomputing) = bisect_left(self.recomputed, layer), self.saved
        return (layer - recomputed) * plain + recomputed * recomputing

    # What several moments share.

    @cached_property
    def state(self) -> Pieces:
        """What lives from step to step."""
        layers = self.recipe.model.layers
        share = self.tables * self.table.share + layers * self.block.share + self.norm.share
        tensors = self.tables * self.table.tensors + layers * self.block.tensors + self.norm.tensors
        moments = 8 if self.recipe.optimizer.state_dtype == "float32" else 4
        on_device = not self.recipe.fsdp.cpu_offload
        return {"parameters": on_device * 4 * share, "moments": on_device * (moments * share + 4 * tensors)}

    def _gradients(self, layers: int, *, head: bool, rest: bool = True) -> Pieces:
        """Of all parameters, while those of the first so many blocks, of the head and of the rest are not reduced yet.

        A step that accumulates has them whole on each process since its first micro-batch.
        """
        blocks = self.recipe.model.layers - layers
        tables = rest + head * (not self.tied)
        whole = layers * self.block.whole + tables * self.table.whole + rest * self.norm.whole
        done = blocks * self.block.share + (self.tables - tables) * self.table.share + (not rest) * self.norm.share
        return {
            "accumulated gradients": whole * self.accumulates * self.reduced,
            "reduced gradients": done * 4 * (not self.recipe.fsdp.cpu_offload),
        }

    def _weights(self, layers: int, *, head: bool, buffers: int) -> Pieces:
        """Gathered ones: of so many blocks, of the head if it is tied or not used yet, and what they arrive in."""
        tables = int(self.tied or head) + int(not self.tied and self.keeps_blocks)
        gathered = self.gathered * (tables * self.table.whole + self.norm.whole) + layers * self.gathered_block
        return {"gathered weights": gathered, "gathering": buffers if self.shards > 1 else 0}

    def _saved(self, layers: int, *, norm: bool = False) -> Pieces:
        """What the first so many blocks, and the final norm, keep for the backward pass; rotations, tokens, targets."""
        model, batch = self.recipe.model, self.recipe.batch
        saved = self._saved_before(layers)
        saved += norm * final_norm_per_token(self.widths, self.element)
        rows = batch.micro_batch_size if self.recipe.data.document_mask else 1
        rotations = rows * batch.sequence_length // self.degrees.context * model.head_width * 4
        return {"activations": round(self.tokens * (saved + 16)) + rotations}

    def _next_gather(self, layer: int) -> int:
        """Bytes of what arrives in the backward pass while this block computes: with ZeRO-3, the one before it."""
        if self.keeps_blocks:
            return 0
        if layer == 0:
            return 0 if self.tied else self.element * self.table.whole
        if layer == self.recipe.model.layers:  # after the head
            return self.gathered_block
        return min(layer, self.recipe.fsdp.prefetch) * self.gathered_block

    # The moments.

    def _loss(self, *, backward: bool) -> Pieces:
        """The logits, float32 copies of one chunk of them, and a few numbers per token."""
        model, rows = self.recipe.model, -(-self.tokens // self.recipe.batch.loss_chunks)
        vocabulary = model.vocabulary // self.degrees.tensor
        logits, chunk = self.element * self.tokens * vocabulary, 4 * rows * vocabulary
        copies = 1 if backward or self.element == 4 else 2  # in float32; forward, the logits themselves are another one
        per_token = 37 if backward else 21
        if self.recipe.compile.enabled:  # no kernel writes float32 logits
            copies = 0
        elif rows == self.tokens and self.degrees.tensor == 1:  # torch's own loss keeps its softmax, not the logits
            copies, per_token = (3, 0) if backward else (copies, 4)
            logits *= not backward
        if backward:
            buffers = self._next_gather(model.layers) * self.tied  # a head of its own is there, and asks for no more
        else:  # the last gather's lives until the next one
            last = self.gathered_block if self.tied else self.element * self.table.whole
            buffers = 0 if self.keeps_blocks and self.accumulates else last
        return {
            **self._gradients(model.layers, head=True),
            **self._weights(self.keeps_blocks * model.layers, head=True, buffers=buffers),
            **self._saved(model.layers, norm=True),
            "logits": logits,
            "loss": copies * chunk + per_token * self.tokens,
        }

    def _head(self) -> Pieces:
        """The head's two products with the gradient of the logits."""
        layers = self.recipe.model.layers
        logits = self.element * self.tokens * (self.recipe.model.vocabulary // self.degrees.tensor)
        return {
            **self._gradients(layers, head=True),
            **self._weights(self.keeps_blocks * layers, head=True, buffers=self._next_gather(layers)),
            **self._saved(layers, norm=True),
            "logits": logits,
            "new gradients": self.element * self.table.whole + self._stream(),
        }

    def _reduced_head(self) -> Pieces:
        """The sum over processes of the gradient of a head of its own."""
        layers = self.recipe.model.layers
        return {
            **self._gradients(layers, head=True),
            **self._weights(self.keeps_blocks * layers, head=False, buffers=self._next_gather(layers)),
            **self._saved(layers, norm=True),
            "new gradients": self._new(self.table) + self._stream(),
            "reduction": self._reduction(self.table),
        }

    def _block(self, layer: int) -> Pieces:
        """The backward pass of this block, while the gradients of the one after it are summed over processes."""
        model = self.recipe.model
        last = layer == model.layers - 1
        before = self.table.whole * (not self.tied) if last else self.block.whole
        down = self.element * model.width * model.feed_forward_width // self.degrees.tensor
        return {
            **self._gradients(layer + 1, head=False),
            **self._weights(layer + 1 if self.keeps_blocks else 1, head=False, buffers=self._next_gather(layer)),
            **self._saved(layer + 1),
            "block": round(self.tokens * self.beside_saved[layer in self.recomputed]),
            "new gradients": down + self._new_of_tied_head(),
            "reduction": self._waiting(before),
        }

    def _reduced_block(self, layer: int) -> Pieces:
        """The sum over processes of this block's gradients."""
        return {
            **self._gradients(layer + 1, head=False),
            **self._weights(layer * self.keeps_blocks, head=False, buffers=self._next_gather(layer)),
            **self._saved(layer),
            "new gradients": self._new(self.block) + self._stream() + self._new_of_tied_head(),
            "reduction": self._reduction(self.block),
        }

    def _embedding(self) -> Pieces:
        """The gradient of the embedding: as large as the whole table, and a second one for a tied head, and their sum.

        Of a step that accumulates, in a micro-batch before the last, after which nothing is reduced or resharded.
        """
        table, layers = self.element * self.table.whole, self.recipe.model.layers * self.accumulates
        return {
            **self._gradients(layers, head=self.accumulates),
            **self._weights(layers * self.keeps_blocks, head=not self.keeps_blocks, buffers=0),
            "new gradients": (3 if self.tied else 1) * table,
            "reduction": self._waiting(self.block.whole) * (not self.accumulates),
        }

    def _reduced_embedding(self) -> Pieces:
        """The sum over processes of that."""
        return {
            **self._gradients(0, head=False),
            "new gradients": self._new(self.table),
            "reduction": self._reduction(self.table),
        }

    def _optimizer(self) -> Pieces:
        """All gradients, each a share; bfloat16 moments are updated in float32, some at a time."""
        groups = self.table.share, self.state["parameters"] // 4 - self.table.share  # as good as without and with decay
        at_a_time = max(min(share, max(MOMENTS_AT_A_TIME, self.table.share)) for share in groups)
        copies = 8 * at_a_time * (self.recipe.optimizer.state_dtype == "bfloat16")
        return {**self._gradients(0, head=False, rest=False), "moments in float32": copies}

    def _stream(self) -> int:
        """Bytes of a gradient of the residual stream."""
        return round(self.element * self.tokens * self.widths.stream)

    def _new(self, unit: Unit) -> int:
        """Bytes of gradients that one micro-batch has computed; accumulation has already added them to the others."""
        return 0 if self.accumulates else self.element * unit.whole

    def _reduction(self, unit: Unit) -> int:
        """Bytes of what is summed over processes, and of the sum in float32."""
        return self._waiting(unit.whole) + 4 * unit.share

    def _waiting(self, whole: int) -> int:
        """Bytes of what is being summed, beside the sum, which is the same buffer where nothing is sharded."""
        return self.reduced * whole * (self.shards > 1 or self.reduced != 4)

    def _new_of_tied_head(self) -> int:
        """Bytes: they wait for those of the embedding."""
        return self.element * self.table.whole * self.tied
