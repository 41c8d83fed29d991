"""Copies at a server, as scripts/checkpoint.py lists, verifies and shows them. Imports no torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from parallel.errors import UserError
from recipes.checkpoint.config import CheckpointConfig
from recipes.checkpoint.files import AtHand
from recipes.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, SHARD_NAME
from recipes.checkpoint.remote_folder import RemoteFolder
from recipes.files import remote
from recipes.files.layout import CHECKPOINTS, checkpoint_step, step_folder


def mirrored(address: str, here: Path) -> tuple[list[Path], AtHand, str]:
    """The checkpoints at an address of a run, of its folder of checkpoints or of one, as folders in `here`: their small
    files, and shards of the right size without their contents.

    Returns the folders, what brings the contents of one shard here for a while, and the address that `here` stands for.
    Raises UserError if there are none.
    """
    place, _, last = address.rstrip("/").rpartition("/")
    only = checkpoint_step(last)
    place = f"{place}/{last}" if only is None else place
    there = RemoteFolder(place.removesuffix(f"/{CHECKPOINTS}"), CheckpointConfig())
    folders: list[Path] = []
    shards: dict[Path, remote.RemoteFile] = {}
    for step, files in there.files().items():
        if MANIFEST not in files or only not in (None, step):  # under way, or left by a killed run: nobody reads that
            continue
        folders.append(step_folder(here, step))
        for name, file in files.items():
            path = folders[-1] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if SHARD_NAME.fullmatch(name) or file.state.st_size > MAX_MANIFEST_BYTES:
                shards[path] = file
                _empty(path, file)
            else:
                with suppress(remote.Altered):  # then it is missing here
                    remote.download(file, path)
                    os.utime(path, (0, 0))  # not when it was written
    if not folders:
        raise UserError(f"{address} holds no whole checkpoint")

    @contextmanager
    def at_hand(path: Path) -> Iterator[None]:
        remote.download(shards[path], path)
        yield
        _empty(path, shards[path])

    return folders, at_hand, f"{there.place}/{CHECKPOINTS}"


def _empty(path: Path, file: remote.RemoteFile) -> None:
    path.write_bytes(b"")
    os.truncate(path, file.state.st_size)
