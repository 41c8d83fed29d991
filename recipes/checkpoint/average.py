"""The average of several checkpoints, tensor by tensor."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.errors import UserError
from parallel.float8 import precompute_scales
from parallel.fsdp import reshard
from parallel.messages import Channel
from recipes.checkpoint.files import read_manifest
from recipes.checkpoint.manifest import Manifest
from recipes.checkpoint.state import named_tensors
from recipes.checkpoint.storage import PARAMETERS, local, read_tensors
from recipes.checkpoint.together import Together


def read_average(
    checkpoints: Sequence[Path],
    state: Mapping[str, Tensor],
    shares: Sequence[float],
    manifests: Sequence[Manifest] = (),
) -> None:
    """Fill these tensors, or this process's shards of them, with the weighted sum of what checkpoints hold.

    Every byte read is verified. Summed in float64, with memory for one more tensor and its sum. Raises UserError if one
    is damaged (Damage), or lacks a tensor of this shape. state: name in a checkpoint -> tensor. shares: one per
    checkpoint, and, if there is one more, that of the values that the tensors have now. manifests: if they are known.
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


@contextmanager
def averaged(
    model: nn.Module, optimizer: Optimizer, checkpoints: Sequence[Path], *, float8_all_gather: bool = False
) -> Iterator[str]:
    """Inside, the model has the mean of its weights and those of the checkpoints; afterwards its own, bit for bit.

    All processes call it. It yields why there is no mean, the same on all of them, and "" if there is one.
    """
    state = {name: one for name, one in named_tensors(model, optimizer)[0].items() if name.startswith(PARAMETERS)}
    own = {name: local(value).to("cpu", copy=True) for name, value in state.items()}
    count, problem = len(checkpoints) + 1, ""
    try:
        try:
            Together(Channel.MAIN).on_all(lambda: read_average(checkpoints, state, [1 / count] * count))
        except UserError as error:
            problem = str(error)
        reshard(model)  # what is gathered is of its own weights
        if float8_all_gather:
            precompute_scales(model)
        yield problem
    finally:
        for name, value in own.items():
            local(state[name]).copy_(value)
        reshard(model)
    if float8_all_gather:  # not after an error, which may be this process's alone
        precompute_scales(model)
