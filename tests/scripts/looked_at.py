"""Which files and folders the Python processes of a run open and look at."""

from pathlib import Path

HOOK = """
import os
import sys


def watch(folder):
    import posix

    # Not inherited: each program opens its own.
    file = os.open(f"{folder}/{os.environ.get('RANK', 'node')}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(path):
        if isinstance(path, (str, bytes, os.PathLike)):
            os.write(file, os.path.abspath(os.fsencode(path)) + b"\\n")

    def heard(event, arguments):
        if event in ("open", "os.listdir", "os.scandir"):
            note(arguments[0])
        elif event == "import":
            note(arguments[1])  # of an extension; None for all others

    def noting(real):
        def look(path, *arguments, **options):
            note(path)
            return real(path, *arguments, **options)

        return look

    sys.addaudithook(heard)
    for name in ("stat", "lstat", "readlink"):  # no event tells of these
        real, new = getattr(posix, name), noting(getattr(posix, name))
        setattr(posix, name, new)
        setattr(os, name, new)
        for supporting in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if real in supporting:
                supporting.add(new)


if os.environ.get("LOOKED_AT"):
    watch(os.environ["LOOKED_AT"])
"""
"""A sitecustomize.py that notes each path at which a Python looks, in a file of LOOKED_AT. Libraries that libraries
load, and what programs other than Python read, are missing; `strace -f -e trace=%file` shows them."""


def looked_at(folder: Path) -> dict[int, list[str]]:
    """All paths by rank, in order; those of launchers and other processes without a rank are at -1."""
    found: dict[int, list[str]] = {}
    for file in sorted(folder.glob("*-[0-9]*")):
        rank = file.name.partition("-")[0]
        found.setdefault(int(rank) if rank.isdecimal() else -1, []).extend(file.read_text().splitlines())
    return found
