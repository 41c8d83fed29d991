"""The average of several checkpoints, tensor by tensor."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from recipes.checkpoint.files import read_manifest
from recipes.checkpoint.manifest import Manifest
from recipes.checkpoint.storage import local, read_tensors


def read_average(
    checkpoints: Sequence[Path],
    state: Mapping[str, Tensor],
    shares: Sequence[float],
    manifests: Sequence[Manifest] = (),
) -> None:
    """Fill these tensors, or this process's shards of them, with the weighted sum of what checkpoints hold.

    Every byte read is verified. Summed in float64, with memory for one more tensor and its sum.

    Args:
        checkpoints: their folders.
        state: name in a checkpoint -> tensor.
        shares: one per checkpoint, and, if there is one more, that of the values that the tensors have now.
        manifests: of the checkpoints, if they are known.
    Raises:
        UserError: one is damaged (Damage), or lacks a tensor of this shape.
    """
    manifests = manifests or [read_manifest(path) for path in checkpoints]
    for name, value in state.items():
        own = len(shares) > len(checkpoints)  # otherwise the values may be NaN, as those of new memory
        total = local(value).double() * shares[-1] if own else torch.zeros_like(local(value), dtype=torch.float64)
        one = torch.empty_like(value)
        for path, manifest, share in zip(checkpoints, manifests, shares, strict=False):
            read_tensors(path, manifest, {name: one})
            total += local(one).double().mul_(share)
        local(value).copy_(total)
