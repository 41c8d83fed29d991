"""From data.source to files: which, in what order, what is wrong with them, how they are recognised again.

Imports no torch.
"""

import difflib
import fnmatch
import glob
import os
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from parallel.errors import UserError
from recipes.data.text import hub

STDLIB = "python-stdlib"
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")

# Below this many bytes a corpus is identified by its contents (a fraction of a second), above it by its files'
# names, sizes and times of change.
HASH_CONTENTS_UP_TO = 1_000_000_000

# Part of every fingerprint: raise it when the same files begin to give other documents.
READER_VERSION = 2

# Tests are left out because they are repetitive and partly not UTF-8 on purpose; installed packages and the build
# configuration (_sysconfigdata*) because they differ from machine to machine.
# encodings: half of it are tables of numbers, in which a model sees nothing but themselves.
STDLIB_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}


def is_prepared(source: str) -> bool:
    """Whether the source is a folder of token shards, as scripts/prepare_data.py makes them."""
    folder = Path(source).expanduser()
    return (folder / "owner.txt").is_file() and (folder / "index.json").is_file()


def source_problem(source: str) -> str | None:
    """What is wrong with data.source and what to write instead, or None. Looks at names and sizes, reads no text."""
    if hub.is_hub(source):
        return hub.hub_problem(source)
    if source == STDLIB:
        if _stdlib_files():
            return None
        return f"this Python has no library sources under {_stdlib_folder()}; give a file, folder or glob of text"
    path = Path(source).expanduser()
    if (path / "owner.txt").is_file() and not is_prepared(source):
        return f"the preparation of {source!r} is not finished; run scripts/prepare_data.py for it again"
    is_glob = glob.has_magic(source) and not path.exists()
    if not is_glob and not path.exists():
        return f"{source!r} does not exist{_did_you_mean(path)}"
    if path.is_file() and _suffix(path) is None:
        return f"{source!r} is of no known kind; known are {', '.join(SUFFIXES)}"
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        return f"the folder {source!r} may not be read by this user; change its permissions or give another one"
    files = find_files(source)
    if not files:
        where = "no file matches" if is_glob else "there is no file of a known kind in the folder"
        return f"{where} {source!r}; known are {', '.join(SUFFIXES)}"
    for file in files:
        if not os.access(file, os.R_OK):
            return f"'{file}' cannot be read by this user; change its permissions or leave it out"
    if all(file.stat().st_size == 0 for file in files):
        return (
            f"{source!r} is empty (0 bytes)" if len(files) == 1 else f"all {len(files)} files of {source!r} are empty"
        )
    return None


def fingerprint(source: str, *, text_field: str) -> str:
    """Identity of a source: equal for equal files at any place, different once a name, a size or a content differs.

    Beyond HASH_CONTENTS_UP_TO bytes the time of change stands for the content: copies must keep it (cp -p, rsync -t).

    A dataset on the hub is identified by its commit. Raises UserError for a source with a problem, and where the hub
    does not answer.
    """
    if problem := source_problem(source):
        raise UserError(f"data.source: {problem}")
    if not hub.is_hub(source):
        files = find_files(source)
        has_rows = any(_suffix(file) not in (".txt", None) for file in files)  # None: Python sources
        root = Path(os.path.commonpath([file.parent for file in files]))
        return _identity((READER_VERSION, text_field if has_rows else None), files, root=root)
    dataset = hub.parse(hub.pinned(source))
    facts = (READER_VERSION, text_field, dataset.config, dataset.split)
    if dataset.folder:
        return _identity(facts, hub.folder_files(dataset.folder), root=dataset.folder)
    return _identity((*facts, dataset.name, dataset.revision), [], root=Path())


def file_states(source: str) -> dict[str, tuple[int, int]]:
    """Size and time of change of each file, as far as they are on this machine, in the order in which they are read.

    Raises UserError for a source with a problem.
    """
    if problem := source_problem(source):
        raise UserError(f"data.source: {problem}")
    folder = hub.parse(source).folder if hub.is_hub(source) else None
    files = [] if hub.is_hub(source) else find_files(source)
    states = {str(file): file_state(file) for file in (hub.folder_files(folder) if folder else files)}
    return {name: state for name, state in states.items() if state is not None}


def file_state(file: str | Path) -> tuple[int, int] | None:
    """Size and time of change; None where there is no such file, or it is out of reach."""
    try:
        state = os.stat(file)
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns


def require_unchanged(files: Sequence[str], states: Mapping[str, tuple[int, int]]) -> None:
    """Raises UserError where one of these files is not what the fingerprint was taken of. states: from before that.

    One that is gone is no matter of this: what is lost with it counts as bad rows.
    """
    for file in files:
        if (state := file_state(file)) is not None and state != states[file]:
            raise UserError(
                f"data.source: '{file}' changed while it was read; when nothing writes to it any more, start again"
            )


def takes_in(source: str, file: Path) -> bool:
    """Whether the source would read this file, of a known kind, if it were there."""
    if source == STDLIB:
        return False
    if hub.is_hub(source):
        folder = hub.parse(source).folder
        if folder is None:
            return False
        fixed, pattern = folder, ["**"]
    elif Path(source).expanduser().exists():
        fixed = Path(source).expanduser()
        pattern = ["**"] if fixed.is_dir() else []
    else:
        parts = Path(source).expanduser().parts
        magic = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        fixed, pattern = Path(*parts[:magic]), list(parts[magic:])
    try:
        names = file.expanduser().resolve().relative_to(fixed.resolve()).parts
    except ValueError:
        return False
    return _matches(names, pattern)


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """As glob does: ** stands for any number of folders, and hidden names must be written out."""
    if not pattern or not names:
        return not names and all(part == "**" for part in pattern)
    hidden = names[0].startswith(".")
    if pattern[0] == "**":
        return _matches(names, pattern[1:]) or (not hidden and _matches(names[1:], pattern))
    fits = fnmatch.fnmatchcase(names[0], pattern[0]) and (not hidden or pattern[0].startswith("."))
    return fits and _matches(names[1:], pattern[1:])


def describe(source: str) -> str:
    """How much is behind a source, for people: its files and bytes, or its commit on the hub."""
    if hub.is_hub(source):
        dataset = hub.parse(source)
        if dataset.folder is None:
            return f"commit {dataset.revision}" if dataset.revision else "its newest commit"
        files = hub.folder_files(dataset.folder)
    else:
        files = find_files(source)
    return f"{len(files):,} files with {sum(file.stat().st_size for file in files):,} bytes"


def _identity(facts: tuple[object, ...], files: list[Path], *, root: Path) -> str:
    identity = xxhash.xxh3_128(repr(facts).encode())
    try:
        total = sum(file.stat().st_size for file in files)
        for file in files:
            state = file.stat()
            identity.update(repr((file.relative_to(root).as_posix(), state.st_size)).encode())
            if total > HASH_CONTENTS_UP_TO:
                identity.update(repr(state.st_mtime_ns).encode())
                continue
            with file.open("rb") as content:
                while block := content.read(1 << 22):
                    identity.update(block)
    except OSError as error:
        raise UserError(
            f"data.source: cannot read '{error.filename}': {error.strerror}; is it being changed?"
        ) from error
    return identity.hexdigest()


def document_hash(text: str) -> int:
    """A number below 2**64 that depends on the text alone."""
    return xxhash.xxh3_64_intdigest(text.encode())


# ---------------------------------------------------------------------------------------------------- finding files


def find_files(source: str) -> list[Path]:
    """The files of a source, sorted by path; other kinds of files beside them are passed over, hidden ones too."""
    if source == STDLIB:
        return _stdlib_files()
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    pattern = os.path.join(glob.escape(str(path)), "**") if path.is_dir() else str(path)
    found = (Path(name) for name in glob.glob(pattern, recursive=True))
    return sorted((file for file in found if _suffix(file) and file.is_file()), key=lambda file: file.parts)


def _stdlib_folder() -> Path:
    # Inside a virtual environment too this is the base interpreter's library.
    return Path(sysconfig.get_path("stdlib"))


def _stdlib_files() -> list[Path]:
    files = []
    for folder, subfolders, names in os.walk(_stdlib_folder()):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED_FOLDERS]
        files += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return sorted(files, key=lambda file: file.parts)


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)


def _did_you_mean(path: Path) -> str:
    """The most similar name beside a path that does not exist, or the nearest folder above it that does."""
    parent = path.parent
    if not parent.is_dir():
        existing = next(folder for folder in parent.absolute().parents if folder.is_dir())
        return f" (there is no folder '{parent}'; the nearest that exists is '{existing}')"
    try:
        siblings = {entry.name: str(parent / entry.name) for entry in os.scandir(parent)}
    except OSError:  # not ours to list
        siblings = {}
    close = difflib.get_close_matches(path.name, [*siblings, STDLIB], n=1)
    if close:
        return f"; did you mean {siblings.get(close[0], STDLIB)!r}?"
    return f"; write {STDLIB!r}, 'hf:ID' for a dataset on the hub, or a file, folder or glob of {', '.join(SUFFIXES)}"
