"""The folder of a run's checkpoints: which are complete, which is being written, which may be deleted.

step-00000100/          a checkpoint; it was renamed to this when all of it was on the disk
.partial-00000200/      one being written or deleted; the next save deletes what a kill left
damaged-step-00000300/  set aside for the user to look at

Imports no torch.
"""

import errno
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from parallel.errors import UserError
from recipes.checkpoint.config import CheckpointConfig
from recipes.checkpoint.files import check_files, read_manifest
from recipes.checkpoint.manifest import Damage, Manifest
from recipes.files.atomic import free_bytes, sync_folder
from recipes.files.layout import checkpoint_steps, step_folder
from recipes.files.reading import fault, is_folder, named_faults, names_in
from recipes.files.units import size

FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is exceeded",
    errno.EFBIG: "File too large",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "the folder is not writable",
}
"""Reasons why a save failed; other errors are reported as they are."""
ASIDE = "damaged-"
"""Prefix of the names of checkpoints that are set aside."""
PATIENCE = 60.0
"""Seconds until another node's file must be visible: the longest that NFS caches a folder's contents (acdirmax)."""

FEW = 64
"""Most shards that one process looks at."""


def partial_folder(folder: Path, step: int) -> Path:
    """The folder that the checkpoint of a step is written to until it is complete."""
    return folder / f".partial-{step:08d}"


def left_overs(folder: Path) -> list[Path]:
    """What a kill, a failed save or a failed deletion left behind; also where a save in flight writes."""
    return [folder / name for name in names_in(folder) if name.startswith(".partial-")]


def disk_space(folder: Path, *, checkpoint_bytes: int, keep: int) -> str:
    """A line that says how large a checkpoint is and how many fit on the disk of `folder`, which need not exist yet.

    What a kill left counts as free space, because the next save deletes it. It is not deleted here, because it may
    still belong to another process. Raises UserError if not even one checkpoint fits.
    """
    place = next(parent for parent in (folder, *folder.absolute().parents) if is_folder(parent))
    with named_faults(place):
        if (free := free_bytes(place)) is None:
            return f"checkpoints: {size(checkpoint_bytes)} each; the disk does not say how much space it has"
        free += sum(map(taken_by, left_overs(folder)))
    fit = free // checkpoint_bytes
    if not fit:
        raise UserError(
            f"a checkpoint needs {size(checkpoint_bytes)}, but the disk of {place} has {size(free)} free; free some"
            " space, write another run.output, or write checkpoint.every = 0 to save nothing"
        )
    wanted = max(1, keep + 1 - len(checkpoint_steps(folder)))  # an old one is deleted when the new one is complete
    tight = f"; checkpoint.keep = {keep} needs {wanted}" if fit < wanted else ""
    return f"checkpoints: {size(checkpoint_bytes)} each, the disk has space for {fit:,}{tight}"


def taken_by(folder: Path) -> int:
    """How many bytes of the disk deleting this folder would free."""
    taken = 0
    for place, _, names in os.walk(folder) if not folder.is_symlink() else ():
        for name in names:
            with suppress(FileNotFoundError):  # deleted in the meantime
                about = os.lstat(os.path.join(place, name))
                taken += about.st_blocks * 512 if about.st_nlink == 1 else 0
    return taken


def begin(folder: Path, step: int, *, log: Callable[[str], None]) -> None:
    """Delete all left-overs, and create the partial folder of a new checkpoint.

    A left-over that cannot be deleted is logged and stays, unless it is in the way of this save.
    """
    if os.path.lexists(step_folder(folder, step)):
        raise FileExistsError(errno.EEXIST, "a checkpoint is never overwritten", str(step_folder(folder, step)))
    for left_over in left_overs(folder):
        try:
            remove(left_over)
        except OSError as error:
            if left_over == partial_folder(folder, step):
                raise
            log(f"the left-over {left_over} cannot be deleted: {reason(error)}")
    if not is_folder(folder):
        folder.mkdir(parents=True)
        sync_folder(folder.parent)
        for above in folder.absolute().parents[1:3]:  # the run folder may be new too, and run.output
            with suppress(OSError):  # a folder that cannot be read is older than the run
                sync_folder(above)
    partial_folder(folder, step).mkdir()


def require_shard(folder: Path, name: str, length: int) -> None:
    """Wait until this process sees a file that another one wrote. Raises UserError if it does not."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() <= end:
        with suppress(OSError):  # such as ESTALE: it is looked at again
            if os.lstat(folder / name).st_size == length:
                return
        time.sleep(0.1)
    raise UserError(f"{name} did not arrive in {folder}: run.output must be a folder that all nodes share")


def commit(folder: Path, step: int) -> None:
    """Rename a complete partial folder. Until sync_folder(folder) a power cut may undo this."""
    os.rename(partial_folder(folder, step), step_folder(folder, step))


def delete(folder: Path, step: int) -> None:
    """Delete a checkpoint. It is renamed first, so that its name always means a complete one."""
    retire(folder, step)
    remove(partial_folder(folder, step))


def retire(folder: Path, step: int) -> None:
    """Rename a checkpoint to what the next save would delete."""
    os.rename(step_folder(folder, step), partial_folder(folder, step))
    sync_folder(folder)


def remove_own(paths: Iterable[Path], shard: str) -> None:
    """Delete this process's shard from folders that are to be deleted: one process would take long for thousands.

    Never behind a symbolic link. What cannot be deleted is left for remove().
    """
    for path in paths:
        if not path.is_symlink() and not (path / shard).parent.is_symlink():
            with suppress(OSError):
                os.unlink(path / shard)


def remove(path: Path) -> None:
    """Delete a folder (of a symbolic link, only the link) as far as possible, then raise the first OSError, if any."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    errors: list[BaseException] = []
    shutil.rmtree(path, onerror=lambda function, name, error: errors.append(error[1]))
    for error in errors:
        if not isinstance(error, FileNotFoundError):  # another process deleted it first
            raise error


def dispensable(steps: list[int], config: CheckpointConfig, *, best: Collection[int] = ()) -> list[int]:
    """The steps that may be deleted: neither the newest, nor multiples of keep_every (0 = none), nor in best. steps:
    oldest first."""
    every = config.keep_every
    return [step for step in steps[: -config.keep] if not (every and step % every == 0) and step not in best]


def check(folder: Path, step: int, *, most: int = FEW) -> Manifest:
    """Check all but tensors' contents. Raises Damage or UserError.

    most: look at no shards if there are more: the processes that read them share that, see Checkpoints.load().
    """
    path = step_folder(folder, step)
    if path.is_symlink():
        raise Damage(f"{path} is a symbolic link, which a checkpoint must not be")
    manifest = read_manifest(path)
    if manifest.step != step:
        raise Damage(f"{path} holds the checkpoint of another step: {manifest.step}")
    check_parts(path, manifest, most=most)
    return manifest


def check_parts(path: Path, manifest: Manifest, *, most: int = FEW) -> None:
    """Check the small files of a checkpoint, and the sizes of its shards if there are at most `most`. Raises
    Damage."""
    look = len(manifest.shards) <= most
    check_files(path, manifest, [name for name, file in manifest.files.items() if look or not file.header_bytes])


def newest_whole(folder: Path, *, log: Callable[[str], None], known: Mapping[int, str] | None = None) -> int | None:
    """The newest step whose checkpoint shows no damage; None if there are no checkpoints, not even damaged ones.

    Damaged checkpoints that are newer are set aside, and logged. Raises UserError if there were checkpoints, but none
    is intact, and TemporaryError if one cannot be read now; nothing is changed then. known: damage that was found
    already, by step.
    """
    known = known or {}
    damages: list[tuple[int, str]] = []
    for step in reversed(checkpoint_steps(folder)):
        try:
            if step in known:
                raise Damage(known[step])
            check(folder, step)
        except Damage as damage:
            damages.append((step, str(damage)))
        else:
            for other, problem in damages:
                log(put_away(folder, other, problem))
            return step
    aside = [name for name in names_in(folder) if name.startswith(ASIDE)]
    if damages or aside:
        raise UserError("\n".join([*(problem for _, problem in damages), none_left(folder, aside)]))
    if folder.is_symlink() and not is_folder(folder):
        target = os.readlink(folder)
        raise UserError(f"{folder} is a link to {target}, which does not exist: mount it, or mend the link")
    return None


def none_left(folder: Path, names: Sequence[str] = ()) -> str:
    """Why a run that had checkpoints does not begin anew. names: those set aside, or known to be gone."""
    them = f" ({' '.join(names)})" if names else ""
    return (
        f"this run had checkpoints{them}, and {folder} has none that can be loaded; nothing was started. Bring one"
        f" back, or to begin anew remove or rename {folder.parent}, or write another run.name"
    )


def put_away(folder: Path, step: int, problem: str) -> str:
    """Set a damaged checkpoint aside: rename it. Returns the message for the user."""
    path = step_folder(folder, step)
    names = (path.with_name(f"{ASIDE}{path.name}{f'.{number}' if number else ''}") for number in count())
    aside = next(name for name in names if not os.path.lexists(name))
    try:
        os.rename(path, aside)
        sync_folder(folder)
    except OSError as error:
        raise fault(f"{problem}; {path} cannot be set aside", error, "; remove it by hand") from None
    return f"{problem}; it is set aside as {aside.name}"


def reason(error: BaseException) -> str:
    """Why a save failed, on one line."""
    if isinstance(error, OSError) and error.errno in FULL:
        return FULL[error.errno] + (f" ({error.filename})" if error.filename else "")
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".splitlines()[0]
