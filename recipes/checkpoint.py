"""Periodic checkpoints through torch.distributed.checkpoint, which reshards them to any mesh on loading."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer


class Checkpoints:
    """The checkpoints of one run, OUTPUT/NAME/checkpoints/step-00000100 and so on.

    A checkpoint is written under another name and renamed when it is complete, and renamed back before it is deleted,
    so that a name always stands for a whole one; a finished one is never written to again.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        found = (re.fullmatch(r"step-(\d{8,})", path.name) for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

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
            os.rename(partial, self.path(step))
            for old in self.steps()[: -self.keep]:
                os.rename(self.path(old), self._partial(old))
                shutil.rmtree(self._partial(old))
        dist.barrier()

    def load(self, model: nn.Module, optimizer: Optimizer, *, step: int) -> None:
        """Load the checkpoint of `step` into model and optimizer, whatever mesh wrote it. All processes call it."""
        state = _state(model, optimizer)
        dcp.load(state, checkpoint_id=self.path(step))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Parameters and optimizer states by the fully qualified names of the plain model."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
