"""Experts that begin as the feed-forwards of a dense model (Komatsuzaki et al. 2022, "Sparse upcycling")."""

import re
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.layout import layout_of
from recipes.checkpoint.parameters import StoredParameters
from recipes.weights.convert import own_box, read_stored
from recipes.weights.locate import Weights


@torch.no_grad()
def start_experts(tensors: Mapping[str, Tensor], weights: Weights) -> None:
    """Fill all tensors but those of routers: each expert with the dense feed-forward, everything else as it is.

    tensors: by their names in the plain model.
    """
    read = StoredParameters(weights.path, weights.model).read if weights.is_checkpoint else None
    read = read or partial(read_stored, weights.stored_tensors, layout_of(weights.model))
    for name, tensor in tensors.items():
        if name.startswith("routers."):
            continue
        dense = re.sub(r"\.experts\.(\w+)$", r".\1.weight", name)
        values, box = read(dense), own_box(tensor)
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        own.copy_(values[box] if dense == name else values[box[1:] or ...].expand_as(own))
