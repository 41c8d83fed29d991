"""The sizes of a process whose blocks have routed experts. Imports no torch."""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import cached_property

from models.activations import Kept, saved_per_token
from parallel.axes import axis_of_experts
from recipes.plan.sizes import Pieces, Sizes, Unit


@dataclass(frozen=True)
class SparseSizes(Sizes):
    """Sizes of a process with experts. Blocks count as the mean of dense and sparse ones where a step has them all."""

    imbalance: float = field(default=1.0, kw_only=True)
    """Rows of this process's experts, relative to the mean."""

    @cached_property
    def dense(self) -> tuple[int, ...]:
        """Positions of the blocks without experts."""
        return self.recipe.model.dense

    @cached_property
    def dense_again(self) -> tuple[int, ...]:
        """Those of them that recompute."""
        return tuple(layer for layer in self.recomputed if layer in self.dense)

    @cached_property
    def rows(self) -> float:
        """Rows that this process's experts compute, per token of its own; its own alone, if it has all experts."""
        own = self.recipe.model.experts_per_token / self.degrees.tensor
        return own * (self.imbalance if self.degrees.expert > 1 else 1.0)

    @cached_property
    def experts(self) -> Unit:
        model, degrees = self.recipe.model, self.degrees
        shards, own = degrees.per_layer // degrees.expert, model.experts // degrees.expert
        inner, width = model.expert_width, model.width
        shapes = [(inner, width), (inner, width), (width, inner)] + [(inner, 1), (inner, 1), (width, 1)] * model.biases
        cut = [(own, rows)[axis_of_experts(own, rows, shards=shards)] for rows, _ in shapes]
        sizes = [own * rows * columns for rows, columns in shapes]
        return Unit.of(*((count, size // count) for count, size in zip(cut, sizes, strict=True)), shards=shards)

    @cached_property
    def rest(self) -> Unit:
        """A sparse block without its experts."""
        return self.block_of(self.recipe.model.shared_experts * self.recipe.model.expert_width)

    @cached_property
    def block(self) -> Unit:
        rest, experts, dense = self.rest, self.experts, super().block
        layers, few = self.recipe.model.layers, len(self.dense)
        total = (rest + experts) * (layers - few) + dense * few
        return Unit(total.share // layers, total.whole // layers, total.tensors // layers)

    @cached_property
    def routers(self) -> Unit:
        model = self.recipe.model
        router = Unit.of((model.experts, model.width), *[(model.experts, 1)] * model.biases, shards=self.shards)
        return router * (model.layers - len(self.dense))

    @cached_property
    def norm(self) -> Unit:
        """The last norm and the routers, which are gathered as long."""
        return super().norm + self.routers

    def _of_rows(self, kept: Kept) -> tuple[float, float]:
        """Bytes per token that routing and experts save: per row of an expert, and the rest."""
        model, element, own = self.recipe.model, kept.element, 1 / self.degrees.tensor
        chosen = model.experts_per_token
        inner, routing = (3, 4) if kept.compiled else (4, 8)  # without silu(gate), and logits or scores
        if model.activation == "swiglu_clamped" and not kept.compiled:
            inner = 7  # also what is clamped, and another product
        per_row = element * (model.width + inner * model.expert_width) + (16 if self.degrees.expert > 1 else 0)
        # Routers read float32, and nothing else what the norm returns.
        read = (4 - (0 if model.shared_experts else element)) * model.width if element == 2 else 0
        routed = read + routing * model.experts + 12 + chosen * (8 * 3 + 4 + element * (model.width + 1))
        return per_row, own * routed

    def saved_by(self, kept: Kept) -> float:
        """Bytes per token that a sparse block saves."""
        if kept.mode == "full":
            return super().saved_by(kept)
        model = self.recipe.model
        inner = model.shared_experts * model.expert_width / self.degrees.tensor
        dense = saved_per_token(replace(self.widths, inner=inner), kept)  # without its experts
        if kept.mode == "selective":
            last = 0 if model.shared_experts or kept.compiled else kept.element * self.widths.stream
            own = self.rows * kept.element * 2 * model.expert_width + 4 * model.experts / self.degrees.tensor
            return dense - last + own + self._results
        per_row, routed = self._of_rows(kept)
        return dense + self.rows * per_row + routed

    @cached_property
    def _results(self) -> float:
        """Bytes per token that selective checkpointing keeps of what experts return, and of rows that were sent."""
        there = self.rows * self.element * self.recipe.model.width
        return there if self.degrees.expert == 1 else 2 * there + self._choice

    def saved_before(self, layer: int) -> float:
        """Also what routers give to all blocks, in float32, and keep gathered so."""
        few, dense, again = (bisect_left(some, layer) for some in (self.dense, self.dense_again, self.recomputed))
        (plain, recomputing), (sparse, recomputing_sparse) = map(super().saved_by, self.kept), self.saved
        of_dense = (few - dense) * plain + dense * recomputing
        of_sparse = (layer - few - again + dense) * sparse + (again - dense) * recomputing_sparse
        return of_dense + of_sparse + (8 - self.gathered) * self.routers.whole / self.tokens

    @cached_property
    def _choice(self) -> float:
        """Bytes per token of the rows that experts return for it."""
        model = self.recipe.model
        return self.element * model.experts_per_token * model.width / self.degrees.tensor

    def inside(self, layer: int) -> tuple[int, int]:
        if layer in self.dense:
            return super().inside(layer)
        model, (plain, kept), element = self.recipe.model, self.kept, self.element
        whole, before = self.saved[0], 0.0
        if kept.mode != "none" and layer in self.recomputed:
            whole += element * self.widths.stream + (self._results if kept.mode == "selective" else 0)
            # Computed again, a block is left in its middle, and what it has returned to itself is still there.
            before = self._choice + 2 * element * self.widths.stream if kept.mode == "full" else 0
        inner, width = self.rows * element * model.expert_width, self.rows * element * model.width
        weights = element * self.experts.whole // 3
        moments = (
            (whole + before + 2 * self._choice, 0),  # the gradient of what experts have returned, twice
            (whole - self._choice + 2 * inner, weights),  # the derivative of SwiGLU
            # The gradients of what both products have read.
            (whole - self._choice - (2 if plain.compiled else 3) * inner + 3 * width, 3 * weights),
        )
        saved = self.saved[layer in self.recomputed]
        fullest, new = max(moments, key=lambda moment: self.tokens * moment[0] + moment[1])
        return round(self.tokens * (fullest - saved)) + self.stream, new

    @cached_property
    def in_forward(self) -> int:
        if self.recomputed[-1:] == (self.recipe.model.layers - 1,):
            return 0
        return round(2 * self.tokens * self._choice) + (1 if self.kept[0].compiled else 4) * self.stream

    @property
    def state_by_kind(self) -> Pieces:
        """Parameters and moments of experts apart."""
        state = self.state
        elements = (self.recipe.model.layers - len(self.dense)) * self.experts.share if state["parameters"] else 0
        moments = self.recipe.optimizer.state_bytes(elements, 0, matrices=(elements, 0))
        of_experts = {"parameters": 4 * elements, "moments": moments}
        rest = {name: state[name] - size for name, size in of_experts.items()}
        return rest | {f"{name} of experts": size for name, size in of_experts.items()}
