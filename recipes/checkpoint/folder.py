"""The folder of a run's checkpoints: which are whole, which one comes into being, which may go. Imports no torch.

step-00000100/          a checkpoint: it got this name by one rename, when all of it was on the disk
.partial-00000200/      one being written, or deleted; what a kill leaves of either is cleared by the next save
damaged-step-00000300/  set aside, for people to look at
"""

import errno
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from parallel.errors import UserError
from recipes.checkpoint.files import check_files, read_manifest, remove, write_file
from recipes.checkpoint.manifest import MANIFEST, Damage, Manifest, OlderFormat, StoredFile, encode
from recipes.files.atomic import sync_folder
from recipes.files.layout import checkpoint_steps, step_folder

FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of the disk is used up",
    errno.EFBIG: "File too large",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "the folder may not be written to",
}
"""Why a save failed, in words; other errors speak for themselves."""
ASIDE = "damaged-"
"""What the names of checkpoints begin with that are set aside."""
PATIENCE = 60.0
"""Seconds until a file of another node must be seen: as long as NFS may keep what it knows of a folder (acdirmax)."""


def partial_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is written before it has its name."""
    return folder / f".partial-{step:08d}"


def left_overs(folder: Path) -> list[Path]:
    """What a kill or a failed save left, or a deletion that broke off; of a save in flight, where it writes."""
    return sorted(folder.glob(".partial-*"))


def begin(folder: Path, step: int, *, log: Callable[[str], None]) -> None:
    """Make room for a new checkpoint: clear what a kill or a failed save left, and open its partial folder.

    A left-over that will not go is told, and stays: this save does not need its place.
    """
    if os.path.lexists(step_folder(folder, step)):
        raise FileExistsError(errno.EEXIST, "a checkpoint is never written over", str(step_folder(folder, step)))
    for left_over in left_overs(folder):
        try:
            remove(left_over)
        except OSError as error:
            if left_over == partial_folder(folder, step):
                raise
            log(f"{left_over}, a left-over, cannot be cleared: {reason(error)}")
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync_folder(folder.parent)
        for above in folder.absolute().parents[1:3]:  # the run's own folder may be new too, and run.output
            with suppress(OSError):  # one that may not be read is older than the run
                sync_folder(above)
    partial_folder(folder, step).mkdir()


def require_shards(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """That what other processes say they wrote is in this process's folder. Raises UserError which files are not."""
    end = time.monotonic() + PATIENCE
    while missing := [name for name, about in files.items() if not _is_there(folder / name, about.bytes)]:
        if time.monotonic() > end:
            names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise UserError(f"{names} did not arrive in {folder}: run.output must be a folder that all nodes share")
        time.sleep(0.1)


def _is_there(path: Path, size: int) -> bool:
    try:
        return os.lstat(path).st_size == size
    except FileNotFoundError:
        return False


def complete(folder: Path, manifest: Manifest, texts: Mapping[str, str]) -> None:
    """Add the small files (name -> text) to a folder that has its shards, the manifest last, and sync its names."""
    files = dict(manifest.files)
    for name, text in texts.items():
        files[name] = write_file(folder / name, text.encode("utf-8"))
    write_file(folder / MANIFEST, encode(replace(manifest, files=files)))
    sync_folder(folder)


def commit(folder: Path, step: int) -> None:
    """Give a complete partial folder its name, which nothing else has. Until sync_folder() a power cut may take it."""
    os.rename(partial_folder(folder, step), step_folder(folder, step))


def delete(folder: Path, step: int) -> None:
    """Delete a checkpoint, which loses its name first: a name always stands for a whole one."""
    os.rename(step_folder(folder, step), partial_folder(folder, step))
    sync_folder(folder)
    remove(partial_folder(folder, step))


def set_aside(folder: Path, step: int) -> Path:
    """Take a damaged checkpoint out of the way, and nothing else. Returns where it is now."""
    old = step_folder(folder, step)
    names = (old.with_name(f"{ASIDE}{old.name}{f'.{number}' if number else ''}") for number in count())
    aside = next(path for path in names if not os.path.lexists(path))
    os.rename(old, aside)
    sync_folder(folder)
    return aside


def dispensable(steps: list[int], *, keep: int, keep_every: int) -> list[int]:
    """Which of these checkpoints, oldest first, are neither among the newest nor at every n-th step (0 = none)."""
    return [step for step in steps[:-keep] if not (keep_every and step % keep_every == 0)]


def check(folder: Path, step: int, *, files: bool = True) -> Manifest:
    """Everything about a run's checkpoint that shows without reading its tensors. Raises Damage or UserError.

    files: look at each of them, which one process can do for all.
    """
    path = step_folder(folder, step)
    if path.is_symlink():
        raise Damage(f"{path} is a link, which a checkpoint never is")
    manifest = read_manifest(path)
    if manifest.step != step:
        raise Damage(f"{path} holds the checkpoint of another step: {manifest.step}")
    if files:
        check_files(path, manifest)
    return manifest


def newest_whole(folder: Path, *, log: Callable[[str], None]) -> int | None:
    """The newest step whose checkpoint shows no damage; None where there are none at all.

    Those that show some are set aside on the way, and told; what looks like one of an older version is, if another is
    whole. Raises UserError where none is left of those there were.
    """
    problem = ""
    older_format: list[tuple[int, OlderFormat]] = []
    for step in reversed(checkpoint_steps(folder)):
        try:
            check(folder, step)
        except OlderFormat as found:
            older_format.append((step, found))
        except Damage as damage:
            problem = str(damage)
            log(put_away(folder, step, problem))
        else:
            for other, error in older_format:  # a run does not go back to an older version: its manifest was lost
                log(put_away(folder, other, str(error)))
            return step
    if older_format:
        raise UserError(str(older_format[0][1]))
    if problem:
        raise UserError(f"{problem}\nno older checkpoint is left; the same command begins the run anew")
    return None


def put_away(folder: Path, step: int, problem: str) -> str:
    """Set a damaged checkpoint aside. Returns what to tell people."""
    try:
        return f"{problem}; it is set aside as {set_aside(folder, step).name}"
    except OSError as error:
        path = step_folder(folder, step)
        raise UserError(f"{problem}; {path} cannot be set aside ({error.strerror}): remove it by hand") from None


def reason(error: BaseException) -> str:
    """Why a save failed, on one line."""
    if isinstance(error, OSError) and error.errno in FULL:
        where = f" ({error.filename})" if error.filename else ""
        return FULL[error.errno] + where
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]
