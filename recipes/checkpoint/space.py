"""Checks before the first step that the disk has space for checkpoints. Imports no torch."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from parallel.errors import UserError
from recipes.checkpoint.folder import left_overs
from recipes.files.layout import checkpoint_steps
from recipes.files.units import size


def disk_space(folder: Path, *, checkpoint_bytes: int, keep: int) -> str:
    """A line that says how large a checkpoint is and how many fit on the disk of `folder`, which need not exist yet.

    What a kill left counts as free space, because the next save deletes it. It is not deleted here, because it may
    still belong to another process. Raises UserError if not even one checkpoint fits.
    """
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(place).free + sum(map(_taken, left_overs(folder)))
    fit = free // checkpoint_bytes
    if not fit:
        raise UserError(
            f"a checkpoint needs {size(checkpoint_bytes)}, but the disk of {place} has {size(free)} free; free some"
            " space, write another run.output, or write checkpoint.every = 0 to save nothing"
        )
    wanted = max(1, keep + 1 - len(checkpoint_steps(folder)))  # an old one is deleted when the new one is complete
    tight = f"; checkpoint.keep = {keep} needs {wanted}" if fit < wanted else ""
    return f"checkpoints: {size(checkpoint_bytes)} each, the disk has space for {fit:,}{tight}"


def _taken(folder: Path) -> int:
    """How many bytes of the disk deleting this folder would free."""
    taken = 0
    for place, _, names in os.walk(folder) if not folder.is_symlink() else ():
        for name in names:
            with suppress(FileNotFoundError):  # deleted in the meantime
                about = os.lstat(os.path.join(place, name))
                taken += about.st_blocks * 512 if about.st_nlink == 1 else 0
    return taken
