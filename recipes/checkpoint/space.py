"""Whether the disk has room for checkpoints, told before the first step. Imports no torch."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from parallel.errors import UserError
from recipes.checkpoint.folder import left_overs
from recipes.files.layout import checkpoint_steps
from recipes.files.units import size


def room(folder: Path, *, checkpoint_bytes: int, keep: int) -> str:
    """A line about the size of a checkpoint and how many fit on the disk of `folder`, which need not exist yet.

    What a kill left counts as free, because the next save begins with clearing it. Nothing is cleared here: until then
    it may be another process's. Raises UserError where not even one fits.
    """
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(place).free + sum(map(_taken, left_overs(folder)))
    fit = free // checkpoint_bytes
    if not fit:
        raise UserError(
            f"a checkpoint takes {size(checkpoint_bytes)}, but the disk of {place} has {size(free)} free; make room,"
            " write another run.output, or checkpoint.every = 0 to save nothing"
        )
    wanted = max(1, keep + 1 - len(checkpoint_steps(folder)))  # an old one goes when the new one is whole
    tight = f"; checkpoint.keep = {keep} needs {wanted}" if fit < wanted else ""
    return f"checkpoints: {size(checkpoint_bytes)} each, the disk has room for {fit:,}{tight}"


def _taken(folder: Path) -> int:
    """Bytes of the disk that deleting a folder sets free."""
    taken = 0
    for place, _, names in os.walk(folder) if not folder.is_symlink() else ():
        for name in names:
            with suppress(FileNotFoundError):  # deleted meanwhile
                about = os.lstat(os.path.join(place, name))
                taken += about.st_blocks * 512 if about.st_nlink == 1 else 0
    return taken
