"""Text on every machine: the sources of Python's standard library, or one of its folders. Imports no torch."""

import os
import sysconfig
from pathlib import Path

# Tests are skipped because they are repetitive and some are deliberately not UTF-8; installed packages and the build
# configuration (_sysconfigdata*) because they differ between machines; encodings because half of it is number tables.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}


def stdlib_problem(package: str) -> str | None:
    """What is wrong with this package of the library, or with all of it (""), and what to write instead, or None."""
    if stdlib_files(package):
        return None
    if package:
        paths = (file.relative_to(stdlib_folder()).parts for file in stdlib_files(""))
        folders = sorted({path[0] for path in paths if len(path) > 1 and path[0].isalpha()})
        return f"Python's library has no such folder with sources; it has {', '.join(folders)}"
    return f"this Python has no library sources under {stdlib_folder()}; give a file, folder or glob of text"


def stdlib_files(package: str) -> list[Path]:
    """The files of this package, or of all of the library (""), sorted by path."""
    files: list[Path] = []
    if ".." in package.split("/"):
        return files
    for folder, subfolders, names in os.walk(stdlib_folder() / package.strip("/")):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        files += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return sorted(files, key=lambda file: file.parts)


def stdlib_folder() -> Path:
    """The folder of the library; in a virtual environment, that of the base interpreter."""
    return Path(sysconfig.get_path("stdlib"))
