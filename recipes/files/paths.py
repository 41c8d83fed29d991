"""Paths as people write them, in a recipe or on a command line. Imports no torch."""

import os
from argparse import ArgumentTypeError
from pathlib import Path

from parallel.errors import UserError

LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Bytes; those of Linux."""
SHOWN = 100


def user_path(text: str | Path) -> Path:
    """The path, with the home folder for ~. Raises UserError if no file or folder can have it."""
    if problem := path_problem(text):
        raise UserError(f"'{shorten(str(text))}' {problem}")
    return Path(text).expanduser()


def path_problem(text: str | Path, *, inside: int = 0) -> str:
    """What is wrong with a path that no file or folder can have, and what to write instead; "" if nothing is.

    inside: bytes that names inside this folder need.
    """
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
