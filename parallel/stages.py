"""Which blocks each stage of a pipeline has, and which process has each stage. Imports no torch."""

from dataclasses import dataclass
from functools import lru_cache

from models.config import ModelConfig
from parallel.config import PipelineConfig


@dataclass(frozen=True)
class Stages:
    """The stages of a model, in the order of the forward pass."""

    layers: tuple[range, ...]
    """The layers of each stage."""
    owners: tuple[int, ...]
    """The process of a pipeline group that has each stage."""

    def of(self, rank: int) -> tuple[int, ...]:
        """The stages of a process, in the order of the forward pass."""
        return tuple(stage for stage, owner in enumerate(self.owners) if owner == rank)

    def layers_of(self, rank: int) -> tuple[int, ...]:
        """The layers of a process, in the order of the forward pass."""
        return tuple(layer for stage in self.of(rank) for layer in self.layers[stage])

    @property
    def ends(self) -> tuple[int, int]:
        """The processes with the first and the last stage, in "zbv" the same one."""
        return self.owners[0], self.owners[-1]

    @property
    def splits_ends(self) -> bool:
        """Whether the first and the last stage, which both have a tied embedding, are on two processes."""
        return self.owners[0] != self.owners[-1]

    def __str__(self) -> str:
        """The blocks of each process, as in "0-3 | 4-7", joined by "+" where it has several stages."""
        spans = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in self.layers]
        ranks = range(max(self.owners) + 1)
        return "blocks " + " | ".join("+".join(spans[stage] for stage in self.of(rank)) for rank in ranks)


def stages_of(model: ModelConfig, config: PipelineConfig, *, degree: int, sequence_length: int) -> Stages:
    """The stages of a model on `degree` processes; recipes/recipe/rules_axes.py refuses what cannot be."""
    count = degree * config.runs
    lengths = config.split or _balanced(model, count, sequence_length)
    begins = [sum(lengths[:stage]) for stage in range(count)]
    layers = tuple(range(begin, begin + length) for begin, length in zip(begins, lengths, strict=True))
    forth = [stage % degree for stage in range(count)]
    if config.schedule == "zbv":  # there and back: the last stage is where the first one is
        forth = [*range(degree), *reversed(range(degree))]
    return Stages(layers, tuple(forth))


@lru_cache(maxsize=64)
def _balanced(model: ModelConfig, count: int, sequence_length: int) -> tuple[int, ...]:
    """The numbers of layers of so many stages, whose squared costs add up to the least; of ties, the fewest come first.

    The first stages hold the activations of the most micro-batches. A stage has one layer or more. All layers cost the
    same FLOPs, and the output projection is part of the last stage; a look-up in the embedding costs none.
    """
    # FLOPs per token of a step: of the projection, and of a layer, the mean of those with and without a window.
    head = 6 * model.vocabulary * model.width
    layer = (model.flops_per_token(sequence_length, "causal") - head) // model.layers
    costs = [layer * layers for layers in range(model.layers + 1)]
    # Layers of the stages so far -> (their squared costs, the layers of each).
    least: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(count):
        after, last = count - stage - 1, head if stage == count - 1 else 0
        least = {
            total: min(
                (squares + (costs[total - before] + last) ** 2, (*split, total - before))
                for before, (squares, split) in least.items()
                if before < total
            )
            for total in range(stage + 1, model.layers - after + 1)
        }
    return least[model.layers][1]
