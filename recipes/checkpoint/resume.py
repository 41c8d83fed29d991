"""Loads the checkpoints of a run into a model and its optimizer, on any mesh."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from parallel.errors import UserError
from recipes.checkpoint import folder as folders
from recipes.checkpoint.collective import from_main, run_on_all
from recipes.checkpoint.errors import Damage
from recipes.checkpoint.state import checked, named_tensors, restore
from recipes.checkpoint.storage import read_tensors
from recipes.files.layout import checkpoint_steps, step_folder


def resume(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    step: int,
    check: Callable[[Path], None],
    group: dist.ProcessGroup,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Load the newest checkpoint up to `step` that is not damaged; see Checkpoints.resume()."""

    def check_on_main() -> None:
        if dist.get_rank() == 0:
            check(step_folder(folder, step))

    while True:
        run_on_all(check_on_main, group=group)
        try:
            progress = load(folder, model, optimizer, step=step, group=group)
        except Damage as damage:
            step = _older_step(folder, step, str(damage), group=group, log=log)
        else:
            log(f"resumed from {step_folder(folder, step)}")
            return progress | {"step": step}


def _older_step(folder: Path, step: int, problem: str, *, group: dist.ProcessGroup, log: Callable[[str], None]) -> int:
    """Set a damaged checkpoint aside. Returns the step of the newest intact one; raises UserError if there is none."""
    found = 0

    def look() -> None:
        nonlocal found
        if dist.get_rank() == 0:
            log(folders.put_away(folder, step, problem))
            if not checkpoint_steps(folder):
                raise UserError(f"{problem}\n{folders.NONE_LEFT}")
            newest = folders.newest_whole(folder, log=log)
            assert newest is not None, "newest_whole() raises if all checkpoints are damaged"
            found = newest

    run_on_all(look, group=group)
    return from_main(found, group=group)


def load(
    folder: Path, model: nn.Module, optimizer: Optimizer, *, step: int, group: dist.ProcessGroup
) -> dict[str, Any]:
    """Load one checkpoint; see Checkpoints.load()."""
    state, groups = named_tensors(model, optimizer)
    path = step_folder(folder, step)
    record: dict[str, Any] = {}

    def read() -> None:
        manifest = folders.check(folder, step, files=dist.get_rank() == 0)
        record.update(checked(manifest, groups, path))
        read_tensors(path, manifest, state)

    run_on_all(read, group=group)
    restore(model, optimizer, state, record["optimizer"])
    return record["progress"]
