"""Brings the newest checkpoint of a run back from checkpoint.remote, to a machine that lacks it."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from parallel.dist import World, on_all, on_main
from parallel.errors import UserError
from recipes.checkpoint import folder as folders
from recipes.checkpoint.files import decode, read_manifest, verify_shards
from recipes.checkpoint.manifest import MANIFEST, Damage
from recipes.checkpoint.remote_folder import RemoteFolder
from recipes.files import remote
from recipes.files.atomic import sync_folder, write_whole
from recipes.files.layout import CHECKPOINTS, RECIPE, SAVED, checkpoint_steps
from recipes.files.lock import FolderLock, begun_meanwhile
from recipes.files.reading import named_faults
from recipes.recipe.fields import with_values
from recipes.recipe.load import LoadedRecipe, kept_values
from recipes.recipe.schema import Recipe
from recipes.training.same_run import require_resumes


def remote_folder(recipe: Recipe) -> RemoteFolder:
    """The folder at the server that the run's checkpoints are copied to."""
    return RemoteFolder(f"{recipe.checkpoint.remote.rstrip('/')}/{recipe.run.name}", recipe.checkpoint)


def fetch_newest(loaded: LoadedRecipe, world: World, *, log: Callable[[str], None]) -> LoadedRecipe:
    """Copy the newest whole checkpoint, and the run's small files, to the run's folder unless it has as new a one.

    Each process fetches and verifies its part of the files. A damaged checkpoint is passed over. Returns the recipe as
    that run goes on with it. Raises UserError, on all processes, if the place belongs to another run, cannot be reached
    or not be written.
    """
    there, folder, lock = remote_folder(loaded.recipe), loaded.recipe.run.folder, FolderLock()
    on_main(world, lambda: lock.take(folder, log=log))
    steps, kept = on_main(world, partial(_newer, loaded, there))
    for step in steps:
        names = on_main(world, partial(_begin, there, folder, step, lock, log))
        mine = on_all(world, partial(_fetch, there, folder, step, names[world.rank :: world.size]))
        if damage := next(filter(None, world.messages.from_all(mine)), ""):
            log(f"{damage}; it was copied so to {there.address(step)}, and an older one is fetched")
            continue
        on_main(world, partial(_complete, folder, step))
        log(f"fetched {there.address(step)}")
        break
    lock.release()  # the run takes it again
    if steps and not on_main(world, partial(checkpoint_steps, folder / CHECKPOINTS)):
        raise UserError(
            f"checkpoint.remote: no checkpoint in {there.place} is intact; bring one back, or give this run another"
            " name (--run.name OTHER)"
        )
    return replace(loaded, recipe=with_values(loaded.recipe, kept))


def _newer(loaded: LoadedRecipe, there: RemoteFolder) -> tuple[list[int], dict[str, Any]]:
    """The steps of the checkpoints there that are newer than those here, newest first; see kept_values()."""
    folder, kept = loaded.recipe.run.folder, dict[str, Any]()
    there.require_own(folder)
    there.require_writable()
    newest = max(checkpoint_steps(folder / CHECKPOINTS), default=-1)
    steps = [step for step in reversed(there.steps()) if step > newest]
    if steps:
        with tempfile.TemporaryDirectory() as folder_of_copy:
            file = Path(folder_of_copy, RECIPE)
            if text := remote.read(f"{there.place}/{RECIPE}"):
                file.write_bytes(text)
                with suppress(UserError):  # refused below
                    kept = kept_values(file, loaded.origins or {})
            require_resumes(with_values(loaded.recipe, kept), file if text else None, where=there.place)
    return steps, kept


def _begin(there: RemoteFolder, folder: Path, step: int, lock: FolderLock, log: Callable[[str], None]) -> list[str]:
    """Fetch the small files and the manifest. Returns the names of the checkpoint's other files."""
    with named_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if lock.take(folder, log=log) and checkpoint_steps(folder / CHECKPOINTS):
            raise begun_meanwhile(folder)
        folders.begin(folder / CHECKPOINTS, step, log=log)
        there.fetch_small_files(folder, log=log)
        path = folders.partial_folder(folder / CHECKPOINTS, step) / MANIFEST
        try:
            content = remote.read(there.address(step, MANIFEST)) or b""
            path.write_bytes(content)
            return sorted(decode(content, where=path).files)
        except (Damage, remote.Altered) as damage:
            path.write_bytes(b"")
            log(str(damage))
            return []


def _fetch(there: RemoteFolder, folder: Path, step: int, names: Sequence[str]) -> str:
    """Fetch and verify these files of a checkpoint. Returns what is damaged, or ""."""
    part = folders.partial_folder(folder / CHECKPOINTS, step)
    try:
        manifest = read_manifest(part)
        with named_faults(folder):
            for name in names:
                files = remote.find(there.address(step, name))
                if len(files) != 1:
                    raise Damage(f"{there.address(step, name)} is missing")
                (part / name).parent.mkdir(exist_ok=True)
                remote.download(files[0], part / name)
        verify_shards(part, manifest, names)
    except (Damage, remote.Altered) as damage:
        return str(damage)
    return ""


def _complete(folder: Path, step: int) -> None:
    """Give the checkpoint its name, as a save does."""
    with named_faults(folder):
        part = folders.partial_folder(folder / CHECKPOINTS, step)
        for written in [*part.glob("shards-*/"), part]:
            sync_folder(written)
        folders.commit(folder / CHECKPOINTS, step)
        sync_folder(folder / CHECKPOINTS)
        write_whole(folder / SAVED, str(step))
