"""Whether the disk has room for checkpoints, told before the first step. Imports no torch."""

import shutil
from pathlib import Path

from parallel.errors import UserError
from recipes.weights import checkpoint_steps


def room(folder: Path, *, checkpoint_bytes: int, keep: int) -> str:
    """A line about the size of a checkpoint and how many fit on the disk of `folder`, which need not exist yet.

    Raises UserError where not even one does.
    """
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(place).free
    fit = free // checkpoint_bytes
    if not fit:
        raise UserError(
            f"a checkpoint takes {size(checkpoint_bytes)}, but the disk of {place} has {size(free)} free; make room,"
            " write another run.output, or checkpoint.every = 0 to save nothing"
        )
    wanted = max(1, keep + 1 - len(checkpoint_steps(folder)))  # an old one goes when the new one is whole
    tight = f"; checkpoint.keep = {keep} needs {wanted}" if fit < wanted else ""
    return f"checkpoints: {size(checkpoint_bytes)} each, the disk has room for {fit:,}{tight}"


def size(count: int) -> str:
    """Bytes, for people."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"
