"""The peak memory of a training step on one device, piece by piece, from the dimensions of the model.

A step is fullest at one of a few moments, and each has its pieces (moments.py). A device needs more than that: what its
allocator cannot use again (fragmentation) is not predicted. Imports no torch.
"""

from dataclasses import dataclass

from models.transformers_config import TransformersConfig
from parallel.config import MeshDegrees
from recipes.plan.moments import moments
from recipes.plan.sizes import Pieces, Sizes
from recipes.recipe.schema import Recipe

CUDA, NCCL = 700_000_000, 900_000_000
"""Bytes of a process outside of torch's allocator: its context, and its communicators. Assumed, not measured."""
FULL = 0.94
"""The share of a device's memory that a recipe may be predicted to use: fragmentation is not predicted."""
NOT_COUNTED = (
    f"fragmentation; assumed: {CUDA / 1e9:g} GB for CUDA and, with several processes, {NCCL / 1e9:g} GB for NCCL"
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


def predict(recipe: Recipe, degrees: MeshDegrees, *, context: bool = True) -> Prediction:
    """The memory of one process of a mesh of these degrees. context: with what CUDA itself takes.

    A model of transformers has only the fullest moment: a step is taken on tensors without values, which needs seconds
    and a process without a process group.
    """
    outside = outside_of_torch(degrees) if context else {}
    if isinstance(recipe.model, TransformersConfig):
        from recipes.plan.tracked import fullest_moment  # torch

        moment, pieces = fullest_moment(recipe, degrees)
        return Prediction({moment: pieces | outside}, f"{NOT_COUNTED}; {TRACKED}")
    size = Sizes(recipe, degrees)
    found = moments(size, range(recipe.model.layers))
    return Prediction({name: size.state | pieces | outside for name, pieces in found})


def outside_of_torch(degrees: MeshDegrees) -> Pieces:
    """Bytes that torch's allocator does not know of."""
    return {"CUDA context": CUDA, "buffers of NCCL": NCCL if degrees.processes > 1 else 0}


def summary(prediction: Prediction, capacity: int | None) -> list[str]:
    """Three lines: the peak, and the bytes that the device has; the largest pieces; what is not counted."""
    of = f" of {capacity / 1e9:.1f}" if capacity else ""
    pieces = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in prediction.pieces.items() if size >= 5e7)
    return [
        f"memory {prediction.peak / 1e9:.1f}{of} GB (predicted), fullest at {prediction.fullest}",
        f"  GB: {pieces}",
        f"  not counted: {prediction.not_counted}",
    ]
