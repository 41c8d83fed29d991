"""Reads and writes the parameters of a checkpoint without a process group."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from models.config import ModelConfig
from models.hf import layout_of
from parallel.errors import UserError
from parallel.fsdp import without_wrapper
from parallel.state_check import not_finite
from recipes.checkpoint.files import complete, read_manifest, write_shard
from recipes.checkpoint.folder import check_parts
from recipes.checkpoint.manifest import shard_name
from recipes.checkpoint.plan import Spread, pieces_of, plan
from recipes.checkpoint.state import copies_in
from recipes.checkpoint.storage import CODES, DTYPES, PARAMETERS, assemble, raw, read_tensors
from recipes.files.layout import MODEL


class StoredParameters:
    """The parameters of a checkpoint: read one at a time, or into the shards of a model."""

    def __init__(self, path: Path, model: ModelConfig) -> None:
        """Raises one UserError that lists all missing parameters; Damage if the checkpoint shows any."""
        self.path = path
        self._manifest = read_manifest(path)
        check_parts(path, self._manifest)
        shapes = {name: tensor.shape for name, tensor in self._manifest.tensors.items()}
        stated = {name: f"has shape {list(shape)}" for name, shape in shapes.items()}
        if problems := [
            f"{name} {stated.get(PARAMETERS + name, 'is missing')}; {MODEL} says {list(stored.shape)}"
            for name, stored in layout_of(model).tensors.items()
            if shapes.get(PARAMETERS + name) != stored.shape
        ]:
            raise UserError("\n  ".join([f"the checkpoint {path} cannot be used:", *problems]))

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._manifest.tensors[PARAMETERS + name].dtype]

    def read(self, name: str) -> Tensor:
        """One whole parameter, on the CPU."""
        values = torch.empty(self._manifest.tensors[PARAMETERS + name].shape, dtype=self.dtype(name))
        self._read({name: values})
        if not_finite({name: values}):
            raise UserError(f"{name} in {self.path} has NaN or infinite values: the weights cannot be used")
        return values

    def read_into(self, model: nn.Module) -> None:
        """Fill a model with its parameters; if it is sharded, with the shards of this process."""
        stored, copies = get_model_state_dict(model), copies_in(model)
        state: dict[str, Any] = {
            name: without_wrapper(cast(Tensor, value)) for name, value in stored.items() if name not in copies
        }
        self._read(state)
        set_model_state_dict(model, state | {copy: state[name] for copy, name in copies.items()})

    def _read(self, state: Mapping[str, Any]) -> None:
        read_tensors(self.path, self._manifest, {PARAMETERS + name: value for name, value in state.items()})


def write_parameters(
    folder: Path,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    read: Callable[[str], Tensor],
    *,
    files: Mapping[str, str],
) -> None:
    """Write a checkpoint of parameters alone to an empty folder, with one parameter in memory at a time.

    shapes: name -> shape and dtype. read: returns the parameter of a name. files: name -> text of the small files.
    """
    stored = plan({PARAMETERS + name: Spread(CODES[dtype], shape) for name, (shape, dtype) in shapes.items()}, 1)
    pieces, shard = pieces_of(stored, 0), shard_name(0, 1)
    contents = (raw(read(piece.tensor.removeprefix(PARAMETERS))) for piece in pieces)
    complete(folder, assemble(None, {}, stored, {shard: write_shard(folder / shard, pieces, contents)}), files)
