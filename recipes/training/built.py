"""What a step works on, and what it finds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from parallel.mesh import Mesh


@dataclass(frozen=True)
class Built:
    """A parallel model, its optimizer, and how they are stepped."""

    mesh: Mesh
    model: nn.Module
    units: tuple[FSDPModule, ...]
    """The modules whose weights FSDP gathers together: the model itself, its blocks, perhaps embedding and head."""
    optimizer: Optimizer
    parameters: tuple[nn.Parameter, ...]
    """The parameters of the model, as sharding left them."""
    roles: Mapping[str, tuple[nn.Parameter, ...]]
    """Role -> the parameters that have it; empty unless the recipe asks for their gradient norms."""
    # The next four are as in the recipe, but nothing is resharded where that frees nothing.
    z_loss: float
    grad_clip: float
    reshard_after_forward: bool
    float8_all_gather: bool
    dropout_seed: int | None
    """Seed of the random numbers that the model draws in a step; None if it draws none."""
    report: tuple[str, ...]
    """What each part of the parallelization did, one line per part."""


class Found(NamedTuple):
    """What a step found, on the device: the host does not wait for it."""

    loss: Tensor
    """This process's part of the mean cross-entropy."""
    norm: Tensor
    """The gradient norm before clipping."""
    columns: Mapping[str, Tensor]
    """Further columns of metrics.jsonl, which a step measures only if it is to be logged, and the recipe asks."""
