"""The peak memory of a training step on one device, piece by piece, from the dimensions of the model.

A step is fullest at one of a few moments, and each has its pieces. What lives at once was read off FSDP2, and tests
compare it with real steps whose storages are counted. A device needs more than that: what its allocator cannot use
again (fragmentation) is not predicted. Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import gcd

from models.activations import Kept, Widths, at_swiglu_per_token, final_norm_per_token, saved_per_token
from parallel.config import MeshDegrees
from recipes.schema import Recipe

ALONE, WITH_NCCL = 700_000_000, 1_600_000_000
"""Bytes of a CUDA process outside of torch's allocator, without and with communicators: assumed, not measured."""
MOMENTS_AT_A_TIME = 2**27
"""Elements, as BATCH in recipes/optimization/optimizer.py."""

FULL = 0.94
"""The share of a device's memory that a recipe may be predicted to use: fragmentation is not predicted."""

Pieces = dict[str, int]
"""What takes memory -> bytes."""


@dataclass(frozen=True)
class Prediction:
    """Bytes by moment and piece."""

    moments: dict[str, Pieces]

    @property
    def fullest(self) -> str:
        """The moment with the most bytes, such as "the loss"."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def pieces(self) -> Pieces:
        """What takes memory then; nothing of 0 bytes."""
        return {name: size for name, size in self.moments[self.fullest].items() if size}

    @property
    def peak(self) -> int:
        """Bytes then."""
        return sum(self.pieces.values())


def predict(recipe: Recipe, degrees: MeshDegrees, *, context: bool = True) -> Prediction:
    """The memory of one process of a mesh of these degrees. context: with what CUDA itself takes."""
    step = Step(recipe, degrees)
    outside = {"CUDA context": (WITH_NCCL if degrees.processes > 1 else ALONE) if context else 0}
    return Prediction({name: step.state | pieces | outside for name, pieces in step.moments()})


def summary(prediction: Prediction, capacity: int | None) -> list[str]:
    """One line with the peak, of so many bytes that the device has, and one with what takes them."""
    of = f" of {capacity / 1e9:.1f}" if capacity else ""
    pieces = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in prediction.pieces.items() if size >= 5e7)
    return [
        f"memory {prediction.peak / 1e9:.1f}{of} GB (predicted), fullest at {prediction.fullest}",
        f"  GB: {pieces}",
    ]


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

    def moments(self) -> Iterator[tuple[str, Pieces]]:
        """Those that can be the fullest, in the order of a step's last micro-batch."""
        yield "the loss", self._loss(backward=False)
        yield "the gradient of the logits", self._loss(backward=True)
        yield "the gradient of the head", self._head()
        if not self.tied:
            yield "the reduction of the head", self._reduced_head()
        for layer in reversed(range(self.recipe.model.layers)):
            yield f"the backward pass of block {layer}", self._block(layer)
            yield f"the reduction of block {layer}", self._reduced_block(layer)
        yield "the gradient of the embedding", self._embedding()
        yield "the reduction of the embedding", self._reduced_embedding()
        yield "the optimizer", self._optimizer()

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
    def kept(self) -> list[Kept]:
        """How each block runs."""
        recipe, layers = self.recipe, self.recipe.model.layers
        recomputed = recipe.activation_checkpointing.recomputed(layers)
        plain = Kept(
            float8=recipe.float8.recipe != "none",
            compiled=recipe.compile.enabled,
            exchanged=self.degrees.context > 1 and recipe.mesh.context_by == "heads",
            element=self.element,
        )
        checkpointed = replace(plain, mode=recipe.activation_checkpointing.mode)
        return [checkpointed if layer in recomputed else plain for layer in range(layers)]

    @cached_property
    def saved_before(self) -> list[float]:
        """Bytes per token that the blocks before each one save, and all of them."""
        return [0.0, *accumulate(saved_per_token(self.widths, kept) for kept in self.kept)]

    # What several moments share.

    @cached_property
    def state(self) -> Pieces:
        """What lives from step to step."""
        units = [self.table, *[self.block] * self.recipe.model.layers, self.norm, *[self.table] * (not self.tied)]
        share, tensors = sum(unit.share for unit in units), sum(unit.tensors for unit in units)
        moments = 8 if self.recipe.optimizer.state_dtype == "float32" else 4
        on_device = not self.recipe.fsdp.cpu_offload
        return {"parameters": on_device * 4 * share, "moments": on_device * (moments * share + 4 * tensors)}

    def _gradients(self, layers: int, *, head: bool, rest: bool = True) -> Pieces:
        """Of all parameters, while those of the first so many blocks, of the head and of the rest are not reduced yet.

        A step that accumulates has them whole on each process since its first micro-batch.
        """
        total = self.recipe.model.layers
        units = [(self.block, layers, total - layers), (self.table, rest, not rest), (self.norm, rest, not rest)]
        units += [] if self.tied else [(self.table, head, not head)]
        waiting = sum(unit.whole * count for unit, count, _ in units) * self.accumulates * self.reduced
        done = sum(unit.share * count for unit, _, count in units) * 4 * (not self.recipe.fsdp.cpu_offload)
        return {"accumulated gradients": waiting, "reduced gradients": done}

    def _weights(self, layers: int, *, head: bool, buffers: int) -> Pieces:
        """Gathered ones: of so many blocks, of the head if it is tied or not used yet, and what they arrive in."""
        tables = int(self.tied or head) + int(not self.tied and self.keeps_blocks)
        gathered = self.gathered * (tables * self.table.whole + self.norm.whole) + layers * self.gathered_block
        return {"gathered weights": gathered, "gathering": buffers if self.shards > 1 else 0}

    def _saved(self, layers: int, *, norm: bool = False) -> Pieces:
        """What the first so many blocks, and the final norm, keep for the backward pass; rotations, tokens, targets."""
        model, batch = self.recipe.model, self.recipe.batch
        saved = self.saved_before[layers]
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
            "block": round(self.tokens * at_swiglu_per_token(self.widths, self.kept[layer])),
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
