"""Whose tokens a folder of shards holds, and who is at work in it just now. Imports no torch.

Every process at work has a folder of its own in there for what is not whole yet, and a lock on it (flock) that ends
with the process, however that ends: process ids and host names say nothing across containers and nodes.
"""

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from parallel.errors import UserError
from recipes.data.tokens.shards import OWNER, PROBLEMS, TOKENIZER
from recipes.files.atomic import PART
from recipes.files.lock import LOCK, is_still

# A text that was being written for so long was left by a killed process.
SECONDS_TO_WRITE_A_TEXT = 3600


@contextmanager
def claimed(folder: Path, *, fingerprint: str, tokenizer: str) -> Iterator[Path]:
    """Have the folder for tokens of this fingerprint, and its tokenizer.json with this text. Yields a folder for
    unfinished files, which is gone afterwards.

    Any number of processes may have it at once for the same tokens. Raises UserError where it holds something else, or
    another process is making something else there; OSError where it cannot be written.
    """
    _require_no_others(folder)  # before anything is written
    with alone(folder):
        _remove_left(folder)
        part = folder / f"{PART}{uuid.uuid4().hex}"
        part.mkdir()
        lock = os.open(part / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _take(folder, part, fingerprint, tokenizer)
        except BaseException:
            _end(part, lock)
            raise
    try:
        yield part
    finally:
        _end(part, lock)


def publish(part: Path, file: Path, text: str) -> None:
    """Give the file this text at once. part: of claimed(), on the same file system."""
    unfinished = part / file.name
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def remove_left(folder: Path) -> None:
    """Take away what killed processes left unfinished."""
    if any(folder.glob(f"{PART}*")):
        with suppress(OSError), alone(folder):  # not ours to write: it disturbs nobody
            _remove_left(folder)


def unclaim(folder: Path, *, remove: bool) -> None:
    """Give up a folder in which nothing was made and nobody is at work. remove: the folder itself, too."""
    if not folder.is_dir() or not _found(folder) <= {OWNER, TOKENIZER}:
        return
    with suppress(OSError), alone(folder):
        _remove_left(folder)
        if {path.name for path in folder.iterdir()} <= {OWNER, TOKENIZER, LOCK}:
            for name in (TOKENIZER, OWNER, LOCK):
                (folder / name).unlink(missing_ok=True)
            if remove:
                folder.rmdir()


def _take(folder: Path, part: Path, fingerprint: str, tokenizer: str) -> None:
    owner = folder / OWNER
    _require_no_others(folder)
    found = _found(folder)
    if OWNER not in found or owner.read_text(encoding="utf-8") != fingerprint:
        if not found <= {OWNER, TOKENIZER}:
            raise UserError(
                f"'{folder}' holds tokens of another source, tokenizer or held-out share; give another folder, or"
                " remove it"
            )
        if any(other != part and _in_use(other) for other in folder.glob(f"{PART}*")):
            raise UserError(
                f"'{folder}': another process is making tokens of another source, tokenizer or held-out share there"
                " just now; give another folder, or wait for its end"
            )
        publish(part, owner, fingerprint)
    if TOKENIZER not in found or (folder / TOKENIZER).read_text(encoding="utf-8") != tokenizer:
        publish(part, folder / TOKENIZER, tokenizer)


def _found(folder: Path) -> set[str]:
    names = {path.name for path in folder.iterdir() if not path.name.startswith(PART) and path.name != LOCK}
    return names - {path.name for path in folder.glob(PROBLEMS)}


def _require_no_others(folder: Path) -> None:
    # Looked at in this order: another process may claim it just now.
    if folder.is_dir() and _found(folder) and not (folder / OWNER).exists():
        raise UserError(f"'{folder}' holds other files; give an empty folder, or one that does not exist")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else is in here for the same folder, as far as its file system has locks. It is made if need be."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / LOCK
        try:
            descriptor = _open(file)
        except FileNotFoundError:  # unclaim() of another process
            continue
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if is_still(file, descriptor):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # in a folder of several users: only NFS asks for more than reading
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)


def _remove_left(folder: Path) -> None:
    for left in folder.glob(f"{PART}*"):
        with suppress(FileNotFoundError):
            if left.is_dir():
                if not _in_use(left):
                    shutil.rmtree(left)
            elif time.time() - left.stat().st_mtime > SECONDS_TO_WRITE_A_TEXT:
                left.unlink()


def _in_use(part: Path) -> bool:
    """Whether the process that made it lives. Where there are no locks it may."""
    try:
        descriptor = os.open(part / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _end(part: Path, lock: int) -> None:
    shutil.rmtree(part, ignore_errors=True)
    os.close(lock)
