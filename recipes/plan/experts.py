"""What routed experts add to the memory and the time of a step, from the dimensions of the model.

Loads are assumed equal, or one process has IMBALANCE times the mean. Imports no torch.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

from models.activations import Kept, Widths, at_swiglu_per_token, saved_per_token
from recipes.plan.sizes import Pieces, Sizes, Unit

IMBALANCE = 1.5
"""Rows of the experts of the fullest process, relative to the mean, beside which a plan shows its numbers. Assumed."""


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
        """The experts of one layer. See _placement_of_experts() of parallel/fsdp.py."""
        model, degrees = self.recipe.model, self.degrees
        shards, own = degrees.stage // degrees.expert, model.experts // degrees.expert
        whole = own % shards == 0 or degrees.expert * degrees.tensor == 1
        size = own * model.expert_width * model.width
        rows = (model.expert_width, model.expert_width, model.width)
        parts = [own if whole or count % shards else count for count in rows]
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
        shapes = [(model.experts, model.width)] * (model.layers - model.dense_layers)
        return Unit.of(*shapes, shards=self.shards)

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
        per_row = element * (model.width + 4 * model.expert_width) + (16 if self.degrees.expert > 1 else 0)
        routed = 4 * model.width + 4 * 2 * model.experts + 12 + chosen * (8 * 3 + 4 + element * (model.width + 1))
        return per_row, own * routed

    def _saved(self, kept: Kept) -> float:
        """Bytes per token that a sparse block saves."""
        if kept.mode == "full":
            return saved_per_token(self.widths, kept)
        per_row, routed = self._of_rows(kept)
        return saved_per_token(self._shared, kept) + self.rows * per_row + routed

    @cached_property
    def saved(self) -> tuple[float, float]:
        plain, recomputing = self.kept
        return self._saved(plain), self._saved(recomputing)
