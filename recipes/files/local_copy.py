"""Copies of files of a server on this disk, for what is read from memory maps or many times: tokens and weights.
Imports no torch."""

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

import xxhash

from parallel.errors import UserError
from recipes.files.atomic import write_whole
from recipes.files.lock import alone
from recipes.files.reading import cache_fault, checksum_of, user_path
from recipes.files.remote import download, find

COPIES = Path("~/.cache/shardwright")
"""The folder for copies of files of a server, unless data.cache says otherwise."""
ALWAYS_READ = 100_000_000
"""Bytes of the largest file of a copy that each start compares with its checksum; a larger one if it was touched."""


def local_copy(
    address: str,
    cache: Path = COPIES,
    *,
    only: Collection[str] = ("*",),
    deep: bool = False,
    check: Callable[[Path], None] = lambda folder: None,
    log: Callable[[str], None] = lambda line: None,
) -> Path:
    """A folder on this disk with the files at an address. It is made once; processes that need it wait for it.

    The name of the folder follows from the names, sizes and versions of the files: changed ones are copied anew. What
    a killed process has copied whole is not copied again.

    Args:
        address: that of the folder.
        cache: the copy is in the folder `remote` in there.
        only: patterns of the names of the files that are needed.
        deep: also copy the folders in there.
        check: raises UserError if the copy is not as it must be; it is made anew at the next call then.
        log: receives a line when something is copied.

    Raises: UserError if there are no such files, or they cannot be written here.
    """
    place_there = address.rstrip("/")
    files = [file for file in find(address) if any(fnmatchcase(file.name, pattern) for pattern in only)]
    files = [file for file in files if deep or file.address in (place_there, f"{place_there}/{file.name}")]
    if not files:
        raise UserError(f"{address} does not exist, or has no file {' '.join(only)} in it")
    identity = repr([(file.name, *file.state) for file in files])
    place = user_path(cache) / "remote"
    last = place_there.rpartition("/")[2]
    folder = place / f"{last}-{xxhash.xxh3_128_hexdigest(f'{address} {identity}'.encode())}"
    sums = folder.with_name(f"{folder.name}.xxh3")
    names = {file.address.removeprefix(f"{place_there}/") if deep else file.name: file for file in files}
    sizes = {name: file.state.st_size for name, file in names.items()}
    if folder.is_dir() and not _damaged(folder, sums, sizes):
        return folder
    part = folder.with_name(f".part-{folder.name}")
    try:
        part.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), alone(part.with_name(f"{part.name}.lock")):
            if folder.is_dir() and not _take_back(folder, part, _damaged(folder, sums, sizes), log):
                return folder
            log(f"copying {len(files)} files with {sum(sizes.values()):,} bytes from {address} to {folder}")
            for name, file in names.items():
                here = part / name
                here.parent.mkdir(exist_ok=True)
                if not here.is_file() or here.stat().st_size != file.state.st_size:
                    download(file, here)
            try:
                check(part)
            except UserError:
                shutil.rmtree(part)
                raise
            write_whole(sums, json.dumps(_notes(part)))
            part.rename(folder)
    except OSError as error:
        raise cache_fault(place, error) from None
    return folder


def _damaged(folder: Path, sums: Path, sizes: Mapping[str, int]) -> list[str]:
    """The files of a copy that are not as they were copied. Older versions wrote no checksums, and their copies are
    known by the sizes at the server."""
    known: dict[str, tuple[str, int]] = {}
    with suppress(OSError, ValueError, TypeError, AttributeError):
        known = {name: (checksum, changed) for name, (checksum, changed) in json.loads(sums.read_bytes()).items()}
    if not known:
        here = {name: folder / name for name in sizes}
        return [name for name, file in here.items() if not file.is_file() or file.stat().st_size != sizes[name]]
    return [name for name, noted in known.items() if not _is_as_noted(folder / name, *noted)]


def _is_as_noted(file: Path, checksum: str, changed: int) -> bool:
    try:
        status = file.stat()
        untouched = status.st_size > ALWAYS_READ and status.st_ctime_ns == changed
        return untouched or checksum_of(file) == checksum
    except OSError:
        return False


def _notes(folder: Path) -> dict[str, tuple[str, int]]:
    """Name -> checksum and time of change of each file."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): (checksum_of(file), file.stat().st_ctime_ns) for file in files}


def _take_back(folder: Path, part: Path, bad: Collection[str], log: Callable[[str], None]) -> bool:
    """Make a copy that has bad files unfinished, without them. Returns whether it has any."""
    if not bad:
        return False
    log(f"{folder}: {', '.join(bad)} changed since it was copied; copied anew")
    shutil.rmtree(part)
    folder.rename(part)
    for name in bad:
        (part / name).unlink(missing_ok=True)
    return True
