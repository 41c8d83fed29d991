"""The sizes of a process whose blocks have routed experts. Imports no torch."""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import cached_property

from models.activations import Kept, Widths, saved_per_token
from parallel.axes import axis_of_experts
from recipes.plan.sizes import Pieces, Sizes, Unit


@dataclass(frozen=True)
class SparseSizes(Sizes):
    """Sizes of a process with experts. Blocks count as the mean of dense and sparse ones where a step has them all."""

    imbalance: float = field(default=1.0, kw_only=True)
    """Rows of this process's experts, relative to the mean."""

    @cached_property
    def rows(self) -> float:
        """Rows that this process's experts compute, per token of its own; its own alone, if it has all experts."""
        own = self.recipe.model.experts_per_token / self.degrees.tensor
        return own * (self.imbalance if self.degrees.expert > 1 else 1.0)

    @cached_property
    def experts(self) -> Unit:
        """The experts of one layer."""
        model, degrees = self.recipe.model, self.degrees
        shards, own = degrees.per_layer // degrees.expert, model.experts // degrees.expert
        size = own * model.expert_width * model.width
        rows = (model.expert_width, model.expert_width, model.width)
        parts = [(own, count)[axis_of_experts(own, count, shards=shards)] for count in rows]
        return Unit.of(*((count, size // count) for count in parts), shards=shards)

    @cached_property
    def rest(self) -> Unit:
        """A sparse block without its experts."""
        return self.block_of(self.recipe.model.shared_experts * self.recipe.model.expert_width)

    @cached_property
    def block(self) -> Unit:
        rest, experts, dense = self.rest, self.experts, super().block
        layers, few = self.recipe.model.layers, self.recipe.model.dense_layers
        together = [
            ((layers - few) * (getattr(rest, name) + getattr(experts, name)) + few * getattr(dense, name)) // layers
            for name in ("share", "whole", "tensors")
        ]
        return Unit(*together)

    @cached_property
    def routers(self) -> Unit:
        model = self.recipe.model
        one, layers = Unit.of((model.experts, model.width), shards=self.shards), model.layers - model.dense_layers
        return Unit(layers * one.share, layers * one.whole, layers)

    @cached_property
    def norm(self) -> Unit:
        """The last norm and the routers, which are gathered as long."""
        norm, routers = super().norm, self.routers
        return Unit(norm.share + routers.share, norm.whole + routers.whole, norm.tensors + routers.tensors)

    @cached_property
    def _shared(self) -> Widths:
        """The widths of a sparse block without its experts."""
        inner = self.recipe.model.shared_experts * self.recipe.model.expert_width / self.degrees.tensor
        return replace(self.widths, inner=inner)

    def _of_rows(self, kept: Kept) -> tuple[float, float]:
        """Bytes per token that routing and experts save: per row of an expert, and the rest."""
        model, element, own = self.recipe.model, kept.element, 1 / self.degrees.tensor
        chosen = model.experts_per_token
        inner, routing = (3, 4) if kept.compiled else (4, 8)  # without silu(gate), and logits or scores
        per_row = element * (model.width + inner * model.expert_width) + (16 if self.degrees.expert > 1 else 0)
        # Routers read float32, and nothing else what the norm returns.
        read = (4 - (0 if model.shared_experts else element)) * model.width if element == 2 else 0
        routed = read + routing * model.experts + 12 + chosen * (8 * 3 + 4 + element * (model.width + 1))
        return per_row, own * routed

    def _saved(self, kept: Kept) -> float:
        """Bytes per token that a sparse block saves."""
        if kept.mode == "full":
            return saved_per_token(self.widths, kept)
        dense = saved_per_token(self._shared, kept)
        if kept.mode == "selective":
            model = self.recipe.model
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

    @cached_property
    def saved(self) -> tuple[float, float]:
        plain, recomputing = self.kept
        return self._saved(plain), self._saved(recomputing)

    @cached_property
    def _saved_by_dense(self) -> tuple[float, float]:
        plain, recomputing = self.kept
        return saved_per_token(self.widths, plain), saved_per_token(self.widths, recomputing)

    def saved_before(self, layer: int) -> float:
        """Also what routers give to all blocks, in float32, and keep gathered so."""
        few = min(layer, self.recipe.model.dense_layers)
        dense, again = bisect_left(self.recomputed, few), bisect_left(self.recomputed, layer)
        (plain, recomputing), (sparse, recomputing_sparse) = self._saved_by_dense, self.saved
        of_dense = (few - dense) * plain + dense * recomputing
        of_sparse = (layer - few - again + dense) * sparse + (again - dense) * recomputing_sparse
        return of_dense + of_sparse + (8 - self.gathered) * self.routers.whole / self.tokens

    @cached_property
    def _choice(self) -> float:
        """Bytes per token of the rows that experts return for it."""
        model = self.recipe.model
        return self.element * model.experts_per_token * model.width / self.degrees.tensor

    def inside(self, layer: int) -> tuple[int, int]:
        if layer < self.recipe.model.dense_layers:
            return super().inside(layer)
        model, (plain, kept), element = self.recipe.model, self.kept, self.element
        whole, before = self._saved(plain), 0.0
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
        layers = self.recipe.model.layers - self.recipe.model.dense_layers
        parameters = 4 * layers * self.experts.share if state["parameters"] else 0
        moments = parameters * (1 if self.recipe.optimizer.name == "muon" else 2) // 4
        moments *= 4 if self.recipe.optimizer.state_dtype == "float32" else 2
        of_experts = {"parameters": parameters, "moments": moments}
        rest = {name: state[name] - size for name, size in of_experts.items()}
        return rest | {f"{name} of experts": size for name, size in of_experts.items()}
