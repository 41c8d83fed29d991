"""Text on every machine: the sources of Python's standard library, or one of its folders. Imports no torch."""

import os
import sysconfig
from pathlib import Path

STDLIB = "python-stdlib"
"""The whole library; "python-stdlib/asyncio" is one of its packages."""
# Tests are skipped because they are repetitive and some are deliberately not UTF-8; installed packages and the build
# configuration (_sysconfigdata*) because they differ between machines; encodings because half of it is number tables.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}


def is_stdlib(source: str) -> bool:
    """Whether a source is of the standard library."""
    return source == STDLIB or source.startswith(STDLIB + "/")


def stdlib_problem(source: str) -> str | None:
    """What is wrong with such a source and what to write instead, or None."""
    if stdlib_files(source):
        return None
    if source != STDLIB:
        paths = (file.relative_to(stdlib_folder()).parts for file in stdlib_files(STDLIB))
        folders = sorted({path[0] for path in paths if len(path) > 1 and path[0].isalpha()})
        return f"Python's library has no such folder with sources; it has {', '.join(folders)}"
    return f"this Python has no library sources under {stdlib_folder()}; give a file, folder or glob of text"


def stdlib_files(source: str) -> list[Path]:
    """The files of such a source, sorted by path."""
    files: list[Path] = []
    if ".." in source.split("/"):
        return files
    for folder, subfolders, names in os.walk(stdlib_folder() / source.removeprefix(STDLIB).strip("/")):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        files += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return sorted(files, key=lambda file: file.parts)


def stdlib_folder() -> Path:
    """The folder of the library; in a virtual environment, that of the base interpreter."""
    return Path(sysconfig.get_path("stdlib"))
