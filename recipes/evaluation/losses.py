"""The loss of a model over rows of tokens."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from models.config import ModelConfig
from models.loss import IGNORED
from parallel.errors import UserError
from parallel.mesh import Mesh
from parallel.passes import sum_over_group
from recipes.data.batches import MicroBatch


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Dropout is for training. A model that has none is left alone: its compiled blocks would be compiled again."""
    drops = cast(ModelConfig, model.config).dropout
    if drops:
        model.eval()
    try:
        yield
    finally:
        if drops:
            model.train()


@torch.no_grad()
def summed_loss(model: nn.Module, micro_batches: Iterable[MicroBatch], *, mesh: Mesh) -> tuple[float, int]:
    """(summed loss in nats, target tokens) over the micro-batches of all data ranks.

    Every process must bring the same number of micro-batches: sharded layers gather their weights together.
    """
    device = torch.device(mesh.devices.device_type)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    tokens = torch.zeros((), dtype=torch.int64, device=device)
    with without_dropout(model):
        for inputs, targets, documents in micro_batches:
            inside = None if documents is None else documents.to(device)
            loss += model(inputs.to(device), targets.to(device), documents=inside)
            tokens += (targets != IGNORED).sum()
    return sum_over_group(loss, mesh.loss_group).item(), int(sum_over_group(tokens, mesh.data_group).item())


def finite_loss(model: nn.Module, micro_batches: Iterable[MicroBatch], *, mesh: Mesh) -> tuple[float, int]:
    """The same for finished weights. Raises UserError if it is NaN or infinite."""
    nats, tokens = summed_loss(model, micro_batches, mesh=mesh)
    if not math.isfinite(nats):
        raise UserError(f"the loss is {nats}: the weights hold NaN or infinities, or overflow in --dtype")
    return nats, tokens


def mean_loss(model: nn.Module, micro_batches: Iterable[MicroBatch], *, mesh: Mesh) -> float:
    """Mean loss per target token, in nats, or NaN of none; arguments as in summed_loss()."""
    loss, tokens = summed_loss(model, micro_batches, mesh=mesh)
    return loss / tokens if tokens else math.nan
