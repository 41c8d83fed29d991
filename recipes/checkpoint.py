"""Checkpoints through torch.distributed.checkpoint, which reshards them to any mesh on loading.

The only file that knows how a checkpoint stores its numbers. model.json and tokenizer.json (recipes/weights.py) lie
next to them, so that a checkpoint can be used without the recipe and the data it came from.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from models.config import ModelConfig
from models.hf import parameter_shapes
from parallel.errors import UserError
from parallel.float8 import without_wrapper
from recipes.weights import MODEL, checkpoint_steps, step_folder

PARAMETERS = "model."
"""What the names of parameters begin with inside of a checkpoint."""


class Checkpoints:
    """The checkpoints of one run, OUTPUT/NAME/checkpoints/step-00000100 and so on.

    A checkpoint is written under another name and renamed when it is complete, and renamed back before it is deleted,
    so that a name always stands for a whole one; a finished one is never written to again.
    """

    def __init__(self, folder: Path, *, keep: int, files: Mapping[str, str] | None = None) -> None:
        """files: name -> text of what lies next to the numbers of every checkpoint, see checkpoint_files()."""
        self.folder = folder
        self.keep = keep
        self.files = files or {}

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return checkpoint_steps(self.folder)

    def path(self, step: int) -> Path:
        return step_folder(self.folder, step)

    def _partial(self, step: int) -> Path:
        return self.folder / f".partial-{step:08d}"

    def save(self, model: nn.Module, optimizer: Optimizer, *, step: int) -> None:
        """Save the state after `step` steps, then delete what `keep` no longer covers. All processes call it."""
        partial = self._partial(step)
        main = dist.get_rank() == 0
        if main:
            for left_over in self.folder.glob(".partial-*"):  # a kill left it, at this step or another
                shutil.rmtree(left_over)
            partial.mkdir(parents=True)
        dist.barrier()
        dcp.save(_state(model, optimizer), checkpoint_id=partial)
        if main:
            for name, text in self.files.items():
                (partial / name).write_text(text, encoding="utf-8")
            os.rename(partial, self.path(step))
            for old in self.steps()[: -self.keep]:
                os.rename(self.path(old), self._partial(old))
                shutil.rmtree(self._partial(old))
        dist.barrier()

    def load(self, model: nn.Module, optimizer: Optimizer, *, step: int) -> None:
        """Load the checkpoint of `step` into model and optimizer, whatever mesh wrote it. All processes call it.

        Raises UserError where it is damaged in a way that shows.
        """
        state = _state(model, optimizer)
        try:
            dcp.load(state, checkpoint_id=self.path(step))
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            older = [found for found in self.steps() if found < step]
            instead = f"go on from step {older[-1]}" if older else "begin anew"
            raise UserError(
                f"{self.path(step)} cannot be loaded: {_cause(error)}; remove this folder to {instead}"
            ) from error
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class StoredParameters:
    """The parameters of a checkpoint, without optimizer or process group: one at a time, or a model's own shards."""

    def __init__(self, path: Path, model: ModelConfig) -> None:
        """Raises one UserError that lists all parameters of the model that are not there, or not whole."""
        self.path = path
        self._reader = FileSystemReader(path)
        try:
            self._metadata = self._reader.read_metadata()
        except Exception as error:  # a pickle that is missing, cut or foreign
            raise UserError(f"{path} is not a whole checkpoint: {error!r}") from error
        self._stored: dict[str, TensorStorageMetadata] = {
            key.removeprefix(PARAMETERS): about
            for key, about in self._metadata.state_dict_metadata.items()
            if key.startswith(PARAMETERS) and isinstance(about, TensorStorageMetadata)
        }
        if problems := [*self._missing_files(), *self._wrong_shapes(model)]:
            raise UserError("\n  ".join([f"the checkpoint {path} cannot be used:", *problems]))

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a parameter."""
        return self._stored[name].properties.dtype

    def read(self, name: str) -> Tensor:
        """One parameter, whole, on the CPU."""
        values = torch.empty(self._stored[name].size, dtype=self.dtype(name))
        self._read({name: values})
        return values

    def read_into(self, model: nn.Module) -> None:
        """Fill a model, sharded or not, with what belongs to this process."""
        state = _plain(get_model_state_dict(model))
        self._read(state)
        set_model_state_dict(model, state)

    def _read(self, state: dict[str, Any]) -> None:
        """Fill these tensors. What dcp.load() does for one process, with the metadata read once."""
        planner = DefaultLoadPlanner()
        planner.set_up_planner({PARAMETERS + name: value for name, value in state.items()}, self._metadata, True)
        self._reader.set_up_storage_reader(self._metadata, True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a damaged pickle or archive gives
            raise UserError(f"{self.path} is damaged: {type(error).__name__} on reading its parameters") from error

    def _missing_files(self) -> list[str]:
        ends: dict[str, int] = {}
        for index, place in self._metadata.storage_data.items():
            if isinstance(index, MetadataIndex) and index.fqn.startswith(PARAMETERS):
                ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        sizes = {name: (self.path / name).stat().st_size if (self.path / name).is_file() else -1 for name in ends}
        return [f"{name} is missing" for name, size in sorted(sizes.items()) if size < 0] + [
            f"{name} is cut off: {size} bytes of at least {ends[name]}"
            for name, size in sorted(sizes.items())
            if 0 <= size < ends[name]
        ]

    def _wrong_shapes(self, model: ModelConfig) -> list[str]:
        shapes = {name: tuple(about.size) for name, about in self._stored.items()}
        found = {name: f"has shape {list(shape)}" for name, shape in shapes.items()}
        return [
            f"{name} {found.get(name, 'is missing')}; {MODEL} says {list(shape)}"
            for name, shape in parameter_shapes(model)
            if shapes.get(name) != shape
        ]


def write_parameters(
    folder: Path, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], read: Callable[[str], Tensor]
) -> None:
    """Write a checkpoint of parameters alone, without a process group.

    Each is asked for when it is its turn, so that the memory holds one at a time.
    """
    planned = {
        PARAMETERS + name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()
    }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as no_dist=True says
            # One file for each: torch 2.13 keeps what it wrote to a file in memory until the file is done.
            storage = FileSystemWriter(folder, single_file_per_rank=False)
            dcp.save(planned, storage_writer=storage, planner=_LazyPlanner(read), no_dist=True)
    except CheckpointException as error:
        (reason, _), *_ = error.failures.values()
        if isinstance(reason, KeyboardInterrupt):
            raise reason from None
        raise UserError(f"the checkpoint cannot be written: {reason}") from error


class _LazyPlanner(DefaultSavePlanner):
    """Plans with tensors on the meta device; fetches the numbers when one is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._read(index.fqn.removeprefix(PARAMETERS))


def _cause(error: BaseException) -> str:
    """What went wrong on the first rank that says so, on one line."""
    failures = getattr(error, "failures", {})
    cause = next(iter(failures.values()))[0] if failures else error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Parameters and optimizer states by the fully qualified names of the plain model."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": _plain(model_state), "optimizer": optimizer_state}


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Parameters without the class that float8 all-gather wraps them in: a checkpoint must load without torchao."""
    return {name: without_wrapper(value) for name, value in state.items()}
