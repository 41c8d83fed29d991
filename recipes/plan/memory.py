"""The peak memory of a training step on one device, piece by piece, from the dimensions of the model.

A step is fullest at one of a few moments, and each has its pieces. A device needs more than that: its allocator
reserves more than it uses. Imports no torch.
"""

from dataclasses import dataclass

from models.transformers_config import TransformersConfig
from parallel.config import MeshDegrees
from parallel.errors import UserError
from recipes.plan.moments import moments, sizes_of
from recipes.plan.sizes import Pieces
from recipes.recipe.schema import Recipe

CUDA = 700_000_000
"""Bytes of CUDA's context, outside of torch's allocator. Assumed, not measured."""
NCCL_PAIR, NCCL = 544_000_000, 688_000_000
"""Bytes of one communicator of up to two processes, and of more. Each group has one, and splits share nothing (pytorch
#129865). Counted by others on four A100 (nccl #964, and #2363 for one process); up to 2 GB are reported (nccl #864)."""
RESERVED = 0.03
"""The share of the peak that torch's allocator reserves above it, at most, of 0.1B to 8B (docs/benchmarks/null_gpu.md).
From 70B on it was up to 0.09: holes too small for messages of gigabytes, given back before memory runs out."""
FULL = 0.97 / (1 + RESERVED)
"""The share of a device's memory that a recipe may be predicted to use: with what is RESERVED, 97%."""
NOT_COUNTED = (
    f"what the allocator reserves beyond {RESERVED:.0%} of the peak (70B and more: up to 9%); assumed: {CUDA / 1e9:g}"
    f" GB for CUDA and, with several processes, {NCCL_PAIR / 1e9:.1f} to {NCCL / 1e9:.1f} GB for each group of NCCL"
)
"""What a prediction leaves out or assumes, for whoever reads it."""
TRACKED = "counted operator by operator: torch.compile keeps less"
"""The same, in addition, for a model of transformers."""


@dataclass(frozen=True)
class Prediction:
    """Bytes by moment and piece."""

    moments: dict[str, Pieces]
    not_counted: str = NOT_COUNTED
    """What else takes memory, for whoever reads it."""
    where: str = ""
    """The process of a pipeline that is the fullest, such as ", on stage 0 of 8"."""

    @property
    def fullest(self) -> str:
        """The moment with the most bytes, such as "the loss"."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def pieces(self) -> Pieces:
        """The pieces that take memory at that moment, without those of 0 bytes."""
        return {name: size for name, size in self.moments[self.fullest].items() if size}

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment."""
        return sum(self.pieces.values())

    @property
    def reserved(self) -> int:
        """Bytes with what the allocator keeps above the peak."""
        return round(self.peak * (1 + RESERVED))


def predict(recipe: Recipe, degrees: MeshDegrees, *, context: bool = True, imbalance: float = 1.0) -> Prediction:
    """The memory of one process of a mesh of these degrees, or of the fullest. context: with what CUDA itself takes.
    imbalance: as in sizes_of().

    A model of transformers has only the fullest moment: a step is taken on tensors without values, which needs seconds
    and a process without a process group.
    """
    if refused := recipe.model.uncounted(by_plan=True):
        raise UserError(f"model.{refused}: it does not say its costs, or they differ between layers; there is no plan")
    outside = outside_of_torch(recipe, degrees) if context else {}
    if isinstance(recipe.model, TransformersConfig):
        from recipes.plan.tracked import fullest_moment  # torch

        moment, pieces = fullest_moment(recipe, degrees)
        return Prediction({moment: pieces | outside}, f"{NOT_COUNTED}; {TRACKED}")
    if degrees.pipeline > 1:
        from recipes.plan.stages import parts

        processes = (
            Prediction({at: part.state_by_kind | own | outside for at, own in part.moments()}, where=f", on {stages}")
            for stages, part in parts(recipe, degrees, imbalance=imbalance)
        )
        return max(processes, key=lambda prediction: prediction.peak)
    size = sizes_of(recipe, degrees, imbalance=imbalance)
    pieces_at = moments(size, range(recipe.model.layers))
    scores = recipe.model.attention_sinks and recipe.fsdp.param_dtype == "float32"  # models/sinks.py
    left_out = f"{NOT_COUNTED}; scores of attention, which GPUs write in float32" if scores else NOT_COUNTED
    return Prediction({name: size.state_by_kind | pieces | outside for name, pieces in pieces_at}, left_out)


def outside_of_torch(recipe: Recipe, degrees: MeshDegrees) -> Pieces:
    """Bytes that torch's allocator does not know of."""
    split_ends = recipe.model.tied_embeddings and degrees.pipeline > 1
    split_ends = split_ends and recipe.pipeline_stages(degrees.pipeline).splits_ends
    muon, experts = recipe.optimizer.facts.orthogonalizes, recipe.model.experts > 0
    groups = degrees.group_sizes(experts=experts, muon=muon, split_ends=split_ends) if degrees.processes > 1 else []
    return {"CUDA context": CUDA, "buffers of NCCL": sum(NCCL if size > 2 else NCCL_PAIR for size in groups)}


def summary(prediction: Prediction, capacity: int | None) -> list[str]:
    """Three lines: the peak, and the bytes that the device has; the largest pieces; what is not counted."""
    of = f" of {capacity / 1e9:.1f}" if capacity else ""
    pieces = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in prediction.pieces.items() if size >= 5e7)
    return [
        f"memory {prediction.peak / 1e9:.1f}{of} GB (predicted), fullest at {prediction.fullest}{prediction.where}",
        f"  GB: {pieces}",
        f"  reserved: {prediction.reserved / 1e9:.1f} GB; not counted: {prediction.not_counted}",
    ]
