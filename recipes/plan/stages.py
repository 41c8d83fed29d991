"""The peak memory of each process of a pipeline.

A process has the blocks of its stages, and activations of all micro-batches whose backward pass is still to come. Its
gradients are added up whole, and reduced after the last pass. What a stage receives lives until its backward pass. NCCL
lets go of what it has sent; gloo keeps it, with several stages on a process. Where gradients of weights come
later, steps held up to 7% more than is counted here, and up to half as much again with recomputation.
Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from models.activations import norm_per_token
from parallel.config import MeshDegrees, PipelineConfig
from recipes.plan import moments as at
from recipes.plan.sizes import Pieces, Sizes, Unit
from recipes.recipe.schema import Recipe


def in_flight(config: PipelineConfig, *, degree: int, rank: int, count: int) -> int:
    """Passes through a stage of this process whose activations live at once, when there are gradients of another one.

    count: micro-batches. In the order of torch 2.13.
    """
    after, runs = degree - 1 - rank, config.runs
    before = (runs - 1) * (count // max(1, count // degree))  # a round of each stage but the last
    most = {"gpipe": count, "1f1b": after + 1, "interleaved": before + 2 * after + 1, "zbv": 2 * degree}
    others = before + degree  # with those whose gradients of weights are still to come
    return min(count * runs - int(not config.splits_backward), most.get(config.schedule, others))


@dataclass(frozen=True)
class Part(Sizes):
    """Sizes of one process: the model of its recipe has only its blocks, and its degrees are those of a stage."""

    layers: tuple[range, ...]
    """The layers of each of its stages."""
    whole: Recipe
    degree: int
    rank: int

    @cached_property
    def begins(self) -> bool:
        """Whether it has the embedding."""
        return self.layers[0].start == 0

    @cached_property
    def ends(self) -> bool:
        """Whether it has the last norm and the output projection."""
        return self.layers[-1].stop == self.whole.model.layers

    @cached_property
    def tied(self) -> bool:
        return self.recipe.model.tied_embeddings and self.ends

    @cached_property
    def tables(self) -> int:
        return int(self.ends) + int(self.begins and not self.tied)

    @cached_property
    def norm(self) -> Unit:
        return super().norm if self.ends else Unit(0, 0, 0)

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """Positions among its own blocks."""
        again = {*self.whole.activation_checkpointing.recomputed(self.whole.model.layers)}
        own = [layer for run in self.layers for layer in run]
        return tuple(position for position, layer in enumerate(own) if layer in again)

    @cached_property
    def of_blocks(self) -> float:
        """Bytes that a pass through one of its stages keeps on average, without what is received."""
        kept, runs = self.kept[bool(self.recomputed)], len(self.layers)
        copied = kept.mode == "none" and not kept.compiled and not kept.fused_norms and kept.element == 2
        streams = (runs - int(self.ends)) - (0 if copied else runs - int(self.begins))  # returned, and read
        saved = (self.tokens * self.saved_before(self.recipe.model.layers) + streams * self.stream) / runs
        return saved + 4 * self.positions * self.recipe.model.rope_of(0).head_width

    @cached_property
    def returned(self) -> float:
        """Elements per token that the linears of a block return."""
        widths = self.widths
        return widths.own[0] + widths.query + 2 * widths.key + 2 * widths.inner + 2 * widths.stream

    @cached_property
    def of_head(self) -> int:
        """Bytes that the last norm keeps of a micro-batch, and the loss before its backward pass."""
        rows = -(-self.tokens // self.recipe.batch.loss_chunks)
        softmax = rows == self.tokens and self.degrees.tensor == 1 and not self.recipe.compile.enabled
        logits = (4 if softmax else self.element) * self.vocabulary
        return round(self.tokens * (logits + norm_per_token(self.widths, self.kept[0])))

    def living(self, *, minus: int = 0, blocks: int = 1, tables: int = 0) -> Pieces:
        """What lives at every moment. minus: passes that are gone; blocks, tables: that are gathered with ZeRO-3."""
        config, count = self.whole.pipeline, self.recipe.model.layers
        passes = in_flight(config, degree=self.degree, rank=self.rank, count=self.micro_batches)
        head = (passes - 1) * self.of_head if self.ends and config.schedule == "gpipe" else 0
        sent = int(config.runs == 1 and not self.begins)  # the last gradient, until the next one
        embeddings = self.degrees.tensor if self.begins and not self.tied else 0  # if cut, it adds up all parts
        whole = count * self.block.whole + (embeddings + int(self.ends)) * self.table.whole + self.norm.whole
        blocks, tables = (count, self.tables) if self.keeps_blocks else (blocks, tables + int(self.tied))
        ahead = self.recipe.fsdp.prefetch if self.shards > 1 else 0
        waiting = self.rank + 1 if config.schedule == "interleaved_zero_bubble" else int(config.splits_backward)
        later = waiting * count / config.runs * self.element * self.tokens * self.returned
        return {
            "accumulated gradients": 4 * whole,
            "reduced gradients": 0,
            "gathered weights": self.gathered * (tables * self.table.whole + self.norm.whole)
            + blocks * self.gathered_block,
            "gathering": ahead * self.gathered_block if blocks < count else 0,
            "activations": round((passes - minus) * self.of_blocks + head + 16 * self.degrees.context * self.tokens),
            "gradients before those of weights": round(later),
            "received": round((self._received(passes - minus, waiting) + sent) * self.stream),
            "reduction": 0,
        }

    def _received(self, passes: int, waiting: int) -> float:
        """Hidden states and gradients that others have sent and that live.

        passes: whose hidden states are kept; waiting: whose gradients are, for those of weights. With several stages,
        the next ones arrive before they are needed; with one, the last gradient is kept until the next one is there.
        """
        runs = len(self.layers)
        states = (passes + int(runs > 1)) * (runs - int(self.begins)) / runs
        return states + (2 + waiting) * (runs - int(self.ends)) / runs

    def moments(self) -> Iterator[tuple[str, Pieces]]:
        """The moments that can be the fullest."""
        if self.ends:
            new = self.living(blocks=0, tables=int(not self.tied))
            new |= {"last norm": round(self.tokens * norm_per_token(self.widths, self.kept[0]))}
            yield "the loss", at.loss(self, backward=False) | new
            yield "the gradient of the logits", at.loss(self, backward=True) | new
            yield "the gradient of the head", at.head(self) | new
        last = self.recipe.model.layers - 1
        for position in {last, *self.recomputed[-1:]}:
            inside = at.inside(self, position)
            if not self.ends:
                inside["block"] -= self.stream  # the gradient of what it has returned is received
            yield f"the backward pass of block {self.layers[-1][-1] - last + position}", self.living() | inside
        if self.begins:
            yield "the gradient of the embedding", at.embedding(self) | self.living(minus=1)
        unit = self.table if self.begins or self.tied else self.block
        gone = {"received": 0, "activations": 0, "gradients before those of weights": 0, "gathering": 0}
        yield "the reduction of the gradients", self.living(blocks=0) | gone | {"reduction": self.reduction(unit)}
        share = 0 if self.recipe.fsdp.cpu_offload else self.state["parameters"]  # as many bytes
        done = {"accumulated gradients": 0, "reduced gradients": share, "activations": 0, "received": 0}
        yield "the optimizer", at.optimizer(self) | done


def parts(recipe: Recipe, degrees: MeshDegrees, *, imbalance: float = 1.0) -> Iterator[tuple[str, Part]]:
    """(such as "stage 0 of 8", sizes) of each process of a pipeline."""
    found = recipe.pipeline_stages(degrees.pipeline)
    for rank in range(degrees.pipeline):
        numbers, own = found.of(rank), replace(recipe.model, layers=len(found.layers_of(rank)))
        name = f"stage{'s' if len(numbers) > 1 else ''} {'+'.join(map(str, numbers))} of {len(found.layers)}"
        layers, alone = tuple(found.layers[stage] for stage in numbers), replace(degrees, pipeline=1)
        arguments = alone, layers, recipe, degrees.pipeline, rank
        if recipe.model.experts:
            dense = tuple(n for n, layer in enumerate(found.layers_of(rank)) if not recipe.model.is_sparse(layer))
            own = replace(own, dense_layers=0, sparse_every=0, further_dense_layers=dense)
            yield name, _sparse_part()(replace(recipe, model=own), *arguments, imbalance=imbalance)
        else:
            yield name, Part(replace(recipe, model=own), *arguments)


@cache
def _sparse_part() -> Any:
    """Part of a model with experts. Most have none."""
    from recipes.plan.experts import SparseSizes

    @dataclass(frozen=True)
    class SparsePart(SparseSizes, Part):
        @cached_property
        def returned(self) -> float:
            model = self.recipe.model
            return super().returned - 2 * self.widths.inner + self.rows * (2 * model.expert_width + model.width)

    return SparsePart
