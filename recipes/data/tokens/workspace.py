"""The folder of a source's shards: what they are made from, which are there, and which processes work in it. Each has a
subfolder for its unfinished files, with a lock on it that ends with the process, however it ends: process ids and host
names mean nothing across containers and nodes. Imports no torch."""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from parallel.errors import UserError
from recipes.data.text.sources import file_size, file_states, fingerprint, would_read
from recipes.data.text.tokenizer import BATCH_CHARACTERS, Tokenizer
from recipes.data.tokens.shards import (
    ARRAYS,
    INDEX,
    OWNER,
    PARTS,
    PROBLEMS,
    TOKENIZER,
    Shard,
    array_path,
    bad_rows_path,
    read_bad_rows,
    read_index,
    shard_path,
    shards_from,
    tokens_fingerprint,
)
from recipes.files.added import AGAIN
from recipes.files.atomic import PART
from recipes.files.lock import LOCK, NoLocks, open_locked
from recipes.files.reading import read_patiently

if TYPE_CHECKING:
    from recipes.data.text.pair_format import PairFields

NO_LINKS = (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without hard links."""
SECONDS_TO_WRITE_A_TEXT = 3600
"""A killed process left an unfinished text that is older than this."""
# Up to this size, shards are compared with their checksums at every start (a fraction of a second).
VERIFY_UP_TO_BYTES = 1_000_000_000
# Files in a folder of shards that a source would read as text.
TEXTS = ("owner.txt", "problem-of-a-run.txt", "00000-bad.jsonl", "quarantine.jsonl")


@dataclass(frozen=True)
class Pieces:
    """Where shards and batches end. All shards of one folder must use the same values."""

    smallest_shard: int = 2**22
    """Tokens in the first shard, so that training can start early; each further one has twice as many ..."""
    largest_shard: int = 2**26
    """... up to this, so that a trillion tokens fit in some thousand files."""
    shard_rows: int = 2**22
    """Rows that end a shard even if they hold hardly any text."""
    batch_characters: int = BATCH_CHARACTERS
    """Text passed to the tokenizer in one call ..."""
    batch_rows: int = 2**16
    """... or rows, if they hold hardly any."""


USUAL = Pieces()


@dataclass(frozen=True)
class Preparation:
    """A source and how it becomes tokens. Equal fingerprints mean equal shards."""

    source: str
    text_field: "PairFields"
    tokenizer: Tokenizer
    validation_fraction: float
    source_fingerprint: str
    states: dict[str, tuple[int, int | str]]
    """What file_states() returned before the fingerprint was taken; empty for the hub, where the commit is fixed."""
    pieces: Pieces
    text_documents: str = "auto"
    plugins: tuple[Callable[[], None], ...] = field(default_factory=lambda: tuple(AGAIN))
    """Load what the process needs that does this."""

    @property
    def fingerprint(self) -> str:
        """The name of the shards' folder in the cache."""
        return tokens_fingerprint(self.source_fingerprint, self.tokenizer.fingerprint, self.validation_fraction)


def preparation(
    source: str,
    *,
    text_field: "PairFields",
    text_documents: str = "auto",
    tokenizer: Tokenizer,
    validation_fraction: float,
    pieces: Pieces = USUAL,
) -> Preparation:
    """Take the fingerprint of a source's files. Raises UserError if something is wrong with them."""
    states = file_states(source)  # first: then a change while the contents are read is noticed when they are tokenized
    found = fingerprint(source, text_field=text_field, text_documents=text_documents)
    return Preparation(source, text_field, tokenizer, validation_fraction, found, states, pieces, text_documents)


def would_read_itself(source: str, folder: Path) -> bool:
    """Whether the source would read shards in this folder as text."""
    return any(would_read(source, folder / name) for name in TEXTS)


def whole_shards(folder: Path, *, first: int = 0, keep_unread: bool = True) -> list[Shard]:
    """The shards that are there without a gap. Damaged shards, and all after them, are removed and will be made again.
    first: number of the first one. keep_unread: also keep shards that lack an unreadable file, because a run was
    trained on them."""
    remove_left(folder)
    shards: list[Shard] = []
    size = 0
    for shard in shards_from(folder, first):
        size += sum(file_size(array_path(folder, shard.number, kind)) for kind in ARRAYS)
        outdated = shard.unread and not keep_unread
        if outdated or (size <= VERIFY_UP_TO_BYTES and damage(folder, shard)):
            remove_from(folder, shard.number)
            break
        shards.append(shard)
    if read_index(folder) is None or not (shards and shards[-1].last):
        (folder / INDEX).unlink(missing_ok=True)
    return shards


def remove_from(folder: Path, number: int) -> None:
    """Remove a shard and those after it, which will be made again."""
    (folder / INDEX).unlink(missing_ok=True)
    while shard_path(folder, number).exists():
        shard_path(folder, number).unlink()
        number += 1


def _checksum(file: Path) -> str:
    """The checksum of the array in a file. Raises ValueError for a damaged file, and OSError: a fault of the disk would
    kill a process that reads a map."""
    checksum, size = xxhash.xxh3_64(), 0
    with file.open("rb") as content:
        np.lib.format.read_magic(content)
        shape, _, dtype = np.lib.format.read_array_header_1_0(content)
        while block := content.read(1 << 22):
            checksum.update(block)
            size += len(block)
    if size != shape[0] * dtype.itemsize:
        raise ValueError(f"it has {size} bytes after its header, not {shape[0] * dtype.itemsize}")
    return checksum.hexdigest()


def damage(folder: Path, shard: Shard) -> str | None:
    """What is wrong with the files of a shard, or None. Reads all files. Raises TemporaryError."""
    for kind in ARRAYS:
        file = array_path(folder, shard.number, kind)
        try:
            found = read_patiently(partial(_checksum, file), what=f"data.source: '{file}'")
        except (OSError, ValueError) as error:
            return f"{file.name} cannot be read: {error}"
        if found != shard.checksums[kind]:
            return f"{file.name} does not have the checksum in {shard_path(folder, shard.number).name}"
    if shard.bad:
        try:
            read_bad_rows(bad_rows_path(folder, shard.number))
        except (OSError, ValueError, RecursionError) as error:
            return f"{bad_rows_path(folder, shard.number).name} cannot be read: {error}"
    return None


@contextmanager
def claimed(folder: Path, *, fingerprint: str, tokenizer: str) -> Iterator[Path]:
    """Claim the folder for tokens with this fingerprint, and write this text to its tokenizer.json. Yields a folder for
    unfinished files, which is deleted afterwards. Any number of processes may claim the folder for the same tokens.
    Raises UserError if it holds, or another process is making, something else; OSError if it cannot be written."""
    _require_no_others(folder)  # before anything is written
    with ExitStack() as stack:
        with alone(folder):
            _remove_left(folder)
            part = folder / f"{PART}{uuid.uuid4().hex}"
            part.mkdir()
            stack.callback(shutil.rmtree, part, ignore_errors=True)
            with suppress(NoLocks):
                if (lock := open_locked(part / LOCK, owner="descriptor")) is not None:
                    stack.callback(os.close, lock)
            _take(folder, part, fingerprint, tokenizer)
        yield part


def link_shards(old: Path, shards: Sequence[Shard], new: Path, *, fingerprint: str, tokenizer: str) -> None:
    """Start a folder with hard links to these first shards of another one: files of shards are replaced, never changed.

    Without links, where the file system has none: the text is tokenized again. Raises OSError as claimed() does.
    """
    with claimed(new, fingerprint=fingerprint, tokenizer=tokenizer):
        for number, shard in enumerate(shards):
            paths = [*(array_path(old, number, kind) for kind in ARRAYS), shard_path(old, number)]
            for path in [bad_rows_path(old, number), *paths] if shard.bad else paths:
                try:
                    os.link(path, new / path.name)
                except FileExistsError:  # another run links it too
                    continue
                except OSError as error:
                    if error.errno not in NO_LINKS:
                        raise
                    return


def publish(part: Path, file: Path, text: str) -> None:
    """Write this text to the file atomically. part: the folder from claimed(), on the same file system."""
    unfinished = part / file.name
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def remove_left(folder: Path) -> None:
    """Delete the unfinished files of killed processes."""
    if any(folder.glob(f"{PART}*")):
        with suppress(OSError), alone(folder):  # left-overs that may not be deleted do no harm
            _remove_left(folder)


def unclaim(folder: Path, *, remove: bool) -> None:
    """Give up a folder if no tokens were made in it and no process is working there. remove: delete the folder too."""
    names = (TOKENIZER, PARTS, OWNER, LOCK)
    if not folder.is_dir() or not _found(folder) <= {*names}:
        return
    with suppress(OSError), alone(folder):
        _remove_left(folder)
        if {path.name for path in folder.iterdir()} <= {*names}:
            for name in names:
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
                " right now; give another folder, or wait until that process ends"
            )
        publish(part, owner, fingerprint)
    if TOKENIZER not in found or (folder / TOKENIZER).read_text(encoding="utf-8") != tokenizer:
        publish(part, folder / TOKENIZER, tokenizer)


def _found(folder: Path) -> set[str]:
    names = {path.name for path in folder.iterdir() if not path.name.startswith(PART) and path.name != LOCK}
    return names - {path.name for path in folder.glob(PROBLEMS)}


def _require_no_others(folder: Path) -> None:
    # In this order: another process may claim the folder at the same time.
    if folder.is_dir() and _found(folder) and not (folder / OWNER).exists():
        raise UserError(f"'{folder}' holds other files; give an empty folder, or one that does not exist")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Create the folder if needed, and exclude others (processes, threads) that use this for it, if there are locks."""
    descriptor = None
    while descriptor is None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = open_locked(folder / LOCK, owner="descriptor", wait=True)
        except FileNotFoundError:  # another process called unclaim()
            continue
        except NoLocks:
            break
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _remove_left(folder: Path) -> None:
    for left in folder.glob(f"{PART}*"):
        with suppress(FileNotFoundError):
            if left.is_dir():
                if not _in_use(left):
                    shutil.rmtree(left)
            elif time.time() - left.stat().st_mtime > SECONDS_TO_WRITE_A_TEXT:
                left.unlink()


def _in_use(part: Path) -> bool:
    """Whether the process that made this folder is alive. True if the file system has no locks: it may be."""
    try:
        descriptor = open_locked(part / LOCK, owner="descriptor", shared=True)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except NoLocks:
        return True
    if descriptor is None:
        return (part / LOCK).exists()
    os.close(descriptor)
    return False
