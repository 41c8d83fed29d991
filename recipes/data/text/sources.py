"""The files of data.source: which ones, their order, their problems, and their fingerprint. Imports no torch."""

import fnmatch
import glob
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from parallel.errors import UserError
from recipes.data.text.missing import STDLIB, instead_of
from recipes.data.text.plain_text import PIECES, text_rule, what_a_document_is
from recipes.data.text.readers import PLAIN_TEXT, file_kind
from recipes.files.added import FORMATS, added_to, is_added_source
from recipes.files.border import foreign
from recipes.files.reading import fault, is_remote, may_pass, patiently, read_patiently, user_path

if TYPE_CHECKING:
    from recipes.data.text.hub import HubDataset
    from recipes.data.text.row import Fields, File
    from recipes.files.remote import RemoteFile

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
NAMED = (".csv", ".tsv", ".json", ".md", ".py", ".html")
"""Read where the source names such files, itself or by a glob that ends so: folders of text hold others."""

TOKEN_FILES = (".ds", ".npy", ".bin")
"""Names of files of tokens end so."""
STATED_TYPE = re.compile("(u?int(?:16|32|64)):")
"""Before the name of a file of tokens that does not say it itself."""

# Up to this many bytes a corpus is identified by its contents (a fraction of a second), beyond it by the names, sizes
# and modification times of its files.
HASH_CONTENTS_UP_TO = 1_000_000_000

# Part of every fingerprint: raise it when the same files start to give different documents.
READER_VERSION = 2
# The same for .txt files where data.text_documents is not "pieces", which is what they were before it existed.
TEXT_VERSION = 1


def is_hub(source: str) -> bool:
    """Whether the source is a Hugging Face dataset, on the hub or in a folder."""
    return source.startswith("hf:")


def is_stdlib(source: str) -> bool:
    """Whether the source is Python's standard library, or one of its packages."""
    return source.partition("/")[0] == STDLIB


def is_token_files(source: str) -> bool:
    """Whether the source names files of tokens that other trainers wrote (recipes/data/tokens/token_files.py)."""
    if STATED_TYPE.match(source):
        return True
    named = source.lower().endswith(TOKEN_FILES) and not is_hub(source) and not is_remote(source)
    return named and not user_path(source).is_dir()


def is_prepared(source: str) -> bool:
    """Whether the source holds tokens: files of other trainers, or a folder written by scripts/prepare_data.py."""
    if is_token_files(source):
        return True
    if is_remote(source):
        from recipes.data.text.remote import is_prepared_there

        return is_prepared_there(source)
    folder = user_path(source)
    return read_patiently(
        lambda: (folder / "owner.txt").is_file() and (folder / "index.json").is_file(), what=f"data.source: '{folder}'"
    )


def source_problem(source: str) -> str | None:
    """What is wrong with data.source and what to write instead, or None. Checks names and sizes; reads no text."""
    if is_token_files(source):
        return f"{source!r} holds tokens, not text"
    if is_hub(source):
        from recipes.data.text.hub import hub_problem

        return hub_problem(source)
    if is_added_source(source):
        wrong = [file for file in find_files(source) if file_kind(file) != "file" or not _suffix(file, file.name)]
        hint = f"{source!r} lists '{wrong[0]}', which is" if wrong else f"{source!r} lists"
        return f"{hint} no file of a type that is read: {_supported()}" if wrong or not find_files(source) else None
    if is_remote(source):
        from recipes.data.text.remote import remote_problem

        return remote_problem(source, _remote_files(source), supported=_supported())
    if is_stdlib(source):
        from recipes.data.text.stdlib import stdlib_problem

        return stdlib_problem(source.removeprefix(STDLIB))
    path = user_path(source)
    if (path / "owner.txt").is_file() and not is_prepared(source):
        return f"the preparation of {source!r} is not finished; run scripts/prepare_data.py for it again"
    is_glob = glob.has_magic(source) and not path.exists()
    if not is_glob and not path.exists():
        return f"{source!r} does not exist{instead_of(path, supported=_supported())}"
    if path.exists() and (kind := file_kind(path)) not in ("file", "folder"):
        return f"{source!r} is {kind}, not a file or folder; write what it yields to a file, and give that"
    if path.is_file() and _suffix(path, source) is None:
        return f"{source!r} has an unknown type; supported are {_supported()}"
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        return f"this user may not read the folder {source!r}; change its permissions or give another folder"
    found, closed = _found(source)
    if closed:
        return f"this user may not read the folder {str(closed[0])!r}; change its permissions or leave it out"
    files = find_files(source)
    if not files:
        where = "no file matches" if is_glob else "no file of a supported type is in the folder"
        others = f"there are {_by_kind(found)}; " if found else ""
        return f"{where} {source!r}; {others}supported are {_supported()}{_hint(found, source)}"
    for file in files:
        if not os.access(str(file), os.R_OK):
            return f"this user may not read '{file}'; change its permissions or leave the file out"
    if all(file.stat().st_size == 0 for file in files):
        return (
            f"{source!r} is empty (0 bytes)" if len(files) == 1 else f"all {len(files)} files of {source!r} are empty"
        )
    return None


def fingerprint(source: str, *, text_field: "Fields", text_documents: str = "auto") -> str:
    """The identity of a source: equal files have it wherever they are; another name, size or content changes it. Beyond
    HASH_CONTENTS_UP_TO bytes, modification times replace the contents: copies must keep them (cp -p, rsync -t). A hub
    dataset is identified by its commit. Raises UserError for a bad source, or if the hub does not answer."""
    if problem := source_problem(source):
        raise UserError(f"data.source: {problem}")
    return patiently(lambda: _fingerprint(source, text_field, text_documents))


def _fingerprint(source: str, text_field: "Fields", text_documents: str) -> str:
    files = find_files(source)
    paths = [file for file in files if isinstance(file, Path)]
    added = {one.version for one in map(added_to, (source, *(file.name for file in files))) if one}
    settings: tuple[object, ...]
    if is_hub(source):
        dataset = _dataset(pinned(source))
        settings = (READER_VERSION, text_field, dataset.config, dataset.split)
        if dataset.folder:
            return identity(settings, paths, root=dataset.folder)
        return identity((*settings, dataset.name, dataset.revision), [], root=Path())
    has_rows = any((end := _suffix(file, file.name)) in FORMATS or end not in PLAIN_TEXT for file in files)
    settings = (READER_VERSION, text_field if has_rows else None)
    if text_documents != PIECES and any(_suffix(file) == ".txt" for file in files):
        settings += (TEXT_VERSION, text_documents)
    settings += tuple(sorted(added))
    if is_remote(source):
        from recipes.data.text.remote import remote_fingerprint

        return remote_fingerprint(settings, _remote_files(source))
    return identity(settings, paths)


def file_states(source: str) -> dict[str, tuple[int, int | str]]:
    """Size and modification time (at a server: version) of each file that is not on the hub, in reading order. Raises
    UserError for a bad source."""
    if problem := source_problem(source):
        raise UserError(f"data.source: {problem}")
    if is_remote(source):
        return {str(file): (file.state.st_size, file.state.tag) for file in _remote_files(source)}
    states = {str(file): file_state(file) for file in find_files(source)}
    return {name: state for name, state in states.items() if state is not None}


def file_state(file: "str | File") -> tuple[int, int | str] | None:
    """Size and modification time (at a server: version); None if the file does not exist or cannot be reached."""
    if is_remote(str(file)):
        from recipes.files import remote

        return remote.state(str(file))
    try:
        state = os.stat(str(file))
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns


def file_size(file: "File") -> int:
    """Bytes; 0 if the file does not exist or cannot be reached."""
    if not isinstance(file, Path):
        return file.stat().st_size
    state = file_state(file)
    return state[0] if state else 0


def require_unchanged(files: Sequence[str], states: Mapping[str, tuple[int, int | str]]) -> None:
    """Raises UserError if one of these files changed since `states` was taken, before the fingerprint. A missing file
    does not count as changed: its rows count as bad rows."""
    for file in files:
        if (state := file_state(file)) is not None and state != states[file]:
            raise UserError(
                f"data.source: '{file}' changed while it was read; start again when nothing writes to it any more"
            )


def would_read(source: str, file: Path) -> bool:
    """Whether the source would read this file, of a supported type, if it existed."""
    if is_stdlib(source) or is_remote(source) or is_added_source(source):
        return False
    path = _dataset(source).folder if is_hub(source) else user_path(source)
    if path is None:
        return False
    fixed, pattern = (path, ["**"] * path.is_dir()) if path.exists() else _split_glob(path)
    try:
        names = user_path(file).resolve().relative_to(fixed.resolve()).parts
    except ValueError:
        return False
    return _matches(names, pattern)


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Match as glob does: ** is any number of folders, and only a pattern with a leading dot matches hidden names."""
    if not pattern or not names:
        return not names and all(part == "**" for part in pattern)
    hidden = names[0].startswith(".")
    if pattern[0] == "**":
        return _matches(names, pattern[1:]) or (not hidden and _matches(names[1:], pattern))
    fits = fnmatch.fnmatchcase(names[0], pattern[0]) and (not hidden or pattern[0].startswith("."))
    return fits and _matches(names[1:], pattern[1:])


def describe(source: str) -> str:
    """The size of a source, for messages: its files and bytes, or its commit on the hub."""
    if is_hub(source) and _dataset(source).folder is None:
        revision = _dataset(source).revision
        return f"commit {revision}" if revision else "its newest commit"
    files = find_files(source)
    return f"{len(files):,} files with {sum(file.stat().st_size for file in files):,} bytes"


def identity(settings: tuple[object, ...], files: Sequence[Path], *, root: Path | None = None) -> str:
    """The identity of files and of how they are read. root: folder that all are in; None = the nearest. Raises
    UserError for a file that cannot be read, TemporaryError if that may pass."""
    found = xxhash.xxh3_128(repr(settings).encode())
    file = root = root or Path(os.path.commonpath([path.parent for path in files]))
    try:
        total = sum(file.stat().st_size for file in files)
        for file in files:
            state = file.stat()
            found.update(repr((file.relative_to(root).as_posix(), state.st_size)).encode())
            if total > HASH_CONTENTS_UP_TO:
                found.update(repr(state.st_mtime_ns).encode())
                continue
            with file.open("rb") as content:
                while block := content.read(1 << 22):
                    found.update(block)
    except OSError as error:
        place = f"data.source: cannot read '{error.filename or file}'"
        if may_pass(error):
            raise fault(f"{place} now", error) from error
        raise UserError(f"{place}: {error.strerror}; is it being changed?") from error
    return found.hexdigest()


def document_hash(text: str) -> int:
    """A number below 2**64 that depends only on the text."""
    return xxhash.xxh3_64_intdigest(text.encode())


def find_files(source: str) -> "Sequence[File]":
    """The files of a source, sorted by path; none of a dataset on the hub. Hidden files are ignored, and those of other
    types where the source is not of the hub's layout."""
    if is_hub(source):
        from recipes.data.text.hub import folder_files

        folder = _dataset(source).folder
        return folder_files(folder) if folder else []
    if is_remote(source):
        return _remote_files(source)
    if is_stdlib(source):
        from recipes.data.text.stdlib import stdlib_files

        return stdlib_files(source.removeprefix(STDLIB))
    if is_added_source(source) and (added := added_to(source)):
        with foreign(f"data.source: {source!r}: plug-in {added.version}"):
            return [Path(file) for file in added.work(source)]
    path = user_path(source)
    if path.is_file():
        return [path]
    found = (file for file in _found(source)[0] if _suffix(file, source) and file.is_file())
    return sorted(found, key=lambda file: file.parts)


def notes(source: str, *, text_documents: str) -> list[str]:
    """What is read of a source, for messages: the files by kind, those that are not read, and what a .txt holds."""
    if is_hub(source) or is_stdlib(source) or is_added_source(source):
        return []
    files, lines = find_files(source), []
    others = [] if is_remote(source) else [path for path in _found(source)[0] if path not in set(files)]
    if others:
        lines.append(f"{source!r}: reads {_by_kind(files)}; does not read {_by_kind(others)}{_hint(others, source)}")
    if texts := [file for file in files if _suffix(file) == ".txt"]:
        what = what_a_document_is(texts, text_rule(files, text_documents))
        lines.append(f"{source!r}: {what} ({_by_kind(texts)}, data.text_documents = {text_documents!r})")
    return lines


def _found(source: str) -> tuple[list[Path], list[Path]]:
    """Whatever a folder or glob names except hidden files and folders, and the folders that may not be read."""
    path = user_path(source)
    if path.is_dir():
        return _walked(path, hidden=False)
    fixed, pattern = _split_glob(path)
    if "**" not in pattern:
        return [file for file in map(Path, glob.glob(str(path))) if not file.is_dir()], []
    found, closed = _walked(fixed, hidden=any(part.startswith(".") for part in pattern))
    return [file for file in found if _matches(file.relative_to(fixed).parts, pattern)], closed


def _walked(root: Path, *, hidden: bool) -> tuple[list[Path], list[Path]]:
    """What is in a folder and below. glob would follow a link to a folder above it, again and again."""
    found: list[Path] = []
    closed: list[Path] = []
    for folder, folders, names in os.walk(
        root, followlinks=True, onerror=lambda error: closed.append(Path(error.filename))
    ):
        shown = [name for name in folders if hidden or not name.startswith(".")]
        folders[:] = [name for name in shown if not _is_loop(Path(folder, name))]
        found += [Path(folder, name) for name in names if hidden or not name.startswith(".")]
    return found, closed


def _split_glob(path: Path) -> tuple[Path, list[str]]:
    """The folder before the first part of a glob that is a pattern, and the parts from there on."""
    parts = path.parts
    magic = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return Path(*parts[:magic]), list(parts[magic:])


def _is_loop(folder: Path) -> bool:
    """Whether it is a link to a folder that it lies in: such a folder holds every file again and again."""
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())


def _by_kind(files: "Sequence[File]") -> str:
    """The number of files of each kind, most first."""
    kinds = Counter(
        (file.suffix.lower() or "without a suffix") if (kind := file_kind(file)) == "file" else kind for file in files
    )
    most_first = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {kind.removeprefix('a ')}" for kind, count in most_first)


def _hint(files: Sequence[Path], source: str) -> str:
    """How to name files that are read only by name, if there are some."""
    named = [end for end in (*TOKEN_FILES, *NAMED) if any(file.name.lower().endswith(end) for file in files)]
    folder = path if (path := user_path(source)).is_dir() else _split_glob(path)[0]
    return f'; to read {", ".join(named)}, name them: "{folder}/**/*{named[0]}"' if named else ""


def pinned(source: str) -> str:
    """A hub source at its revision's commit now; others unchanged. Raises UserError if the hub does not answer."""
    if not is_hub(source):
        return source
    from recipes.data.text.hub import pinned_dataset

    return pinned_dataset(source)


def _dataset(source: str) -> "HubDataset":
    from recipes.data.text.hub import parse

    return parse(source)


def _remote_files(source: str) -> "list[RemoteFile]":
    from recipes.data.text.remote import found

    return found(source, (*SUFFIXES, *NAMED) if source.lower().endswith(NAMED) else SUFFIXES)


def _suffix(path: "File", source: str = "") -> str | None:
    suffixes = (*FORMATS, *SUFFIXES, *(end for end in NAMED if source.lower().endswith(end)))
    return next((suffix for suffix in suffixes if path.name.lower().endswith(suffix)), None)


def _supported() -> str:
    return ", ".join(dict.fromkeys((*SUFFIXES, *NAMED, *FORMATS)))
