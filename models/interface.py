"""What parallel/ may know of a model: the names of its repeated blocks, its embedding and its head.

A model says so in its `interface`; everything else about it stays its own business. Names are fully qualified and
hold before and after parallelization. What tensor parallelism needs to know joins here. Imports no torch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelInterface:
    """The parts of a model that are parallelized, by fully qualified name."""

    blocks: tuple[str, ...]
    """The repeated blocks, in the order in which the forward pass calls them."""
    embedding: str
    """The token embedding. Its weight is not decayed."""
    head: str | None
    """The output projection; None where it is tied to the embedding."""
    head_norm: str
    """The norm before the output projection: where the last part of the forward pass begins."""


def interface_of(model: "nn.Module") -> ModelInterface:
    """The interface that the model declares."""
    return cast(ModelInterface, model.interface)


def blocks_of(model: "nn.Module") -> "list[nn.Module]":
    """The repeated blocks, or what wraps them by now, in the order of the forward pass."""
    return [model.get_submodule(name) for name in interface_of(model).blocks]
