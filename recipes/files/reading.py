"""Paths as people write them, and reading from a disk that may fail for a moment, such as a network file system: a
fault is not damage, and a folder that cannot be listed is not empty. Imports no torch."""

import errno
import hashlib
import io
import json
import os
import re
import stat
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from parallel.errors import TemporaryError, UserError
from recipes.files.added import is_added_source
from recipes.files.exit_codes import TEMPORARY, meaning

if TYPE_CHECKING:
    import numpy as np

LARGEST_TEXT = 1_000_000_000
"""Bytes of the largest file that is read as one text."""
PAUSES = (1.0, 4.0)
"""Seconds before each further attempt to read."""
LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Bytes; those of Linux."""
SHOWN = 100
"""Characters of a text in a message."""

Result = TypeVar("Result")


def user_path(text: str | Path) -> Path:
    """The path, with the home folder for ~. Raises UserError if no file or folder can have it."""
    if problem := path_problem(text):
        raise UserError(f"'{shorten(str(text))}' {problem}")
    return Path(text).expanduser()


def path_problem(text: str | Path, *, inside: int = 0) -> str:
    """What is wrong with a path that no file or folder can have, and what to write instead; "" if nothing is.

    inside: bytes that names inside this folder need.
    """
    if is_remote(str(text)):
        return "is an address; write a path on this disk"
    if "\0" in str(text):
        return "has a NUL character in it, which no path can have; remove it"
    try:
        path = os.fsencode(Path(text).expanduser())
    except RuntimeError:  # no such user, or one without a name and HOME
        first = shorten(Path(text).parts[0])
        return f"begins with {first}, but that home folder is not known; set HOME, or write the whole path"
    if (longest := max(map(len, path.split(b"/")))) > LONGEST_NAME:
        return f"has a name of {longest:,} bytes in it, more than {LONGEST_NAME}; write a shorter one"
    if len(path) + inside > LONGEST_PATH:
        room = f", with {inside} for the names inside" if inside else ""
        return f"has {len(path):,} bytes, more than the {LONGEST_PATH:,} of a path{room}; write a shorter one"
    return ""


def path_argument(text: str) -> Path:
    """user_path() for argparse, which exits with 2 and names the option."""
    try:
        return user_path(text)
    except UserError as error:
        raise ArgumentTypeError(str(error)) from None


def shorten(text: str) -> str:
    """The text on a line of a message, without its end if it is long, and without what would change the screen."""
    start = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:SHOWN])
    return start if len(text) <= SHOWN else f"{start}..."


def is_remote(place: str) -> bool:
    """Whether this is the address of something at a server, such as s3://bucket/name, rather than a path.

    The page of a model on the hub is not: messages say how to download the model.
    """
    is_address = re.match(r"(?!https://huggingface\.co/[^/]+/[^/]+/?$)[a-z0-9]+://", place) is not None
    return is_address and not is_added_source(place)


def patiently(read: Callable[[], Result]) -> Result:
    """The result of `read`, which is called again after a fault that may pass. Raises its last TemporaryError."""
    for pause in PAUSES:
        try:
            return read()
        except TemporaryError:
            time.sleep(pause)
    return read()


def may_pass(error: OSError) -> bool:
    """Whether the same call may succeed later, without any change by the user. (A permission only where something is
    read that was readable before: see fault().)"""
    return error.errno != errno.EACCES and meaning(error.errno).code == TEMPORARY


def read_patiently(read: Callable[[], Result], *, what: str) -> Result:
    """What `read` returns, which is called again after a fault that may pass. what: what it reads, with its field.

    Raises TemporaryError after the last time, and at once whatever else `read` raises.
    """

    def named() -> Result:
        try:
            return read()
        except OSError as error:
            if not may_pass(error):
                raise
            raise fault(f"{what} cannot be read now", error) from error

    return patiently(named)


def fault(text: str, error: OSError, remedy: str = "") -> UserError:
    """The error to raise for one of the system: a TemporaryError if it may pass."""
    known = meaning(error.errno)
    remedy = remedy or (f"; {known.remedy}" if known.remedy else "")
    return (TemporaryError if known.code == TEMPORARY else UserError)(f"{text}: {error.strerror}{remedy}")


def cache_fault(folder: Path, error: OSError) -> UserError:
    """The error to raise where what is in data.cache cannot be written."""
    other = "free some space"
    if error.errno in (errno.EACCES, errno.EPERM):
        other = f"chmod -R g+rwX {folder} by the user who made it lets the group write (and umask 002 in what starts)"
    kind = TemporaryError if may_pass(error) else UserError
    return kind(f"data.cache: cannot write below '{folder}': {error}; give another folder, or {other}")


@contextmanager
def named_faults(path: Path) -> Iterator[None]:
    """Inside, errors of the system are raised as UserErrors: TemporaryErrors if they may pass."""
    try:
        yield
    except OSError as error:
        raise fault(f"{error.filename or path} cannot be read", error) from None


def names_in(folder: Path) -> list[str]:
    """The sorted names in a folder; none if it, or what it links to, does not exist. Raises UserError if that cannot be
    determined, or if it is a file."""

    def names() -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno == errno.ENOTDIR and not os.path.exists(folder):  # a file is above it
                return []
            raise fault(f"{folder} cannot be read", error) from None

    return patiently(names)


def is_folder(path: Path) -> bool:
    """Whether this is a folder, or a link to one. Raises UserError if that cannot be determined."""

    def mode() -> int:
        try:
            return os.stat(path).st_mode
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return 0
            raise fault(f"{path} cannot be read", error) from None

    return stat.S_ISDIR(patiently(mode))


def similar(path: Path) -> str:
    """The end of a message that a path does not exist: the most similar name beside it, if there is one."""
    close = get_close_matches(path.name, names_in(path.parent) if path.parent.is_dir() else [], n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def read_whole(file: Path, *, most: int = LARGEST_TEXT) -> bytes:
    """The contents of a file. Raises OSError, also for one of more than `most` bytes, and for a pipe or a device, whose
    contents may never end."""
    # Without O_NONBLOCK, opening a pipe would wait for somebody to write to it.
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as content:
        about = os.fstat(content.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(file))
        if about.st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(file))
        return content.read()


def checksum_of(file: Path) -> str:
    """The xxh3_128 of a file's bytes. Raises OSError."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, xxhash.xxh3_128).hexdigest()


def whole_text(file: Path, *, errors: str = "strict", most: int = LARGEST_TEXT) -> str:
    """The text in a file, in which every line ends with a line feed, as Path.read_text() has it. Raises what
    read_whole() does, and UnicodeDecodeError."""
    return io.TextIOWrapper(io.BytesIO(read_whole(file, most=most)), encoding="utf-8", errors=errors).read()


def read_text(file: Path, *, errors: str = "strict", most: int = LARGEST_TEXT) -> str:
    """The contents of a file of text. Raises UserError if it cannot be read, TemporaryError for a fault that stays.

    errors: as in bytes.decode(), for what is not UTF-8. most: bytes.
    """

    def text() -> str:
        try:
            return whole_text(file, errors=errors, most=most)
        except OSError as error:
            raise fault(f"{file} cannot be read", error) from None
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 text (byte {error.start}); bring it back as it was") from None

    return patiently(text)


def json_object(text: str) -> dict[str, Any]:
    """The JSON object that is this text. Raises ValueError for any other text."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it must contain one JSON object")
    return content


def toml_table(text: str) -> dict[str, Any]:
    """The TOML that is this text. Raises ValueError for any other text."""
    import tomli

    try:
        table = tomli.loads(text)
        repr(table)  # raises ValueError for a hexadecimal integer that is too long for a message
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return table


def memory_map(file: Path) -> "np.ndarray":
    """The array in an .npy file. numpy.load(mmap_mode="r") would open it three times, which a server of files notices
    when thousands of processes map thousands of shards."""
    import numpy as np

    with file.open("rb") as content:
        np.lib.format.read_magic(content)
        shape, _, dtype = np.lib.format.read_array_header_1_0(content)
        return np.memmap(content, dtype, "r", content.tell(), shape)


def logged_rows(path: Path) -> list[dict[str, Any]]:
    """The lines that are rows of a step, which lines from another hand or after a power cut are not."""
    return [row for row in json_lines(path) if isinstance(row, dict) and type(row.get("step")) is int]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; empty if there is no such file."""
    values = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        with suppress(ValueError, RecursionError):  # cut off when the run was killed
            values.append(json.loads(line))
    return values
