"""From data.source to documents, one after another, in an order that depends on the files' names alone.

Nothing here holds more than one document (for parquet, one batch of rows) in memory. Imports no torch.
"""

import difflib
import glob
import io
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import xxhash

from parallel.errors import UserError

STDLIB = "python-stdlib"
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")

# Below this many bytes a corpus is identified by its contents (a fraction of a second), above it by its files'
# names, sizes and times of change.
HASH_CONTENTS_UP_TO = 1_000_000_000

# Plain text has no documents of its own, and as one document a whole file would be either training or held-out text.
# So it is cut at the first blank line after this many characters: small enough that one per cent of a 1 MB file is
# several documents, large enough to hold some context. Text without blank lines is cut at the longer length.
CHUNK_CHARACTERS = 2_048
LONGEST_CHUNK_CHARACTERS = 65_536

# Part of every fingerprint: raise it when the same files begin to give other documents.
READER_VERSION = 1

# Tests are left out because they are repetitive and partly not UTF-8 on purpose; installed packages and the build
# configuration (_sysconfigdata*) because they differ from machine to machine.
# encodings: half of it are tables of numbers, in which a model sees nothing but themselves.
STDLIB_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}


def source_problem(source: str) -> str | None:
    """What is wrong with data.source and what to write instead, or None. Looks at names and sizes, reads no text."""
    if source == STDLIB:
        if _stdlib_files():
            return None
        return f"this Python has no library sources under {_stdlib_folder()}; give a file, folder or glob of text"
    path = Path(source).expanduser()
    is_glob = glob.has_magic(source) and not path.exists()
    if not is_glob and not path.exists():
        return f"{source!r} does not exist{_did_you_mean(path)}"
    if path.is_file() and _suffix(path) is None:
        return f"{source!r} is of no known kind; known are {', '.join(SUFFIXES)}"
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        return f"the folder {source!r} may not be read by this user; change its permissions or give another one"
    files = _files(source)
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


def documents(source: str, *, text_field: str) -> Iterator[str]:
    """The documents of a source, always in the same order; empty ones (a null in a row too) are left out.

    Raises UserError for a source with a problem, a file or row that cannot be read, and text that is nowhere.
    """
    if problem := source_problem(source):
        raise UserError(f"data.source: {problem}")
    found = False
    for file in _files(source):
        try:
            for text in _read(file, text_field=text_field):
                if text and not text.isspace():
                    found = True
                    yield text
        except (OSError, ValueError) as error:  # a broken archive, a parquet file that is none, bytes that are no UTF-8
            raise UserError(f"data.source: cannot read '{file}': {error}; repair it or leave it out") from error
    if not found:
        raise UserError(f"data.source: {source!r} holds no text: every document is empty; give another source")


def fingerprint(source: str, *, text_field: str) -> str:
    """Identity of a source: equal for equal files at any place, different once a name, a size or a content differs."""
    if problem := source_problem(source):
        raise UserError(f"data.source: {problem}")
    files = _files(source)
    root = os.path.commonpath([file.parent for file in files])
    total = sum(file.stat().st_size for file in files)
    has_rows = any(_suffix(file) not in (".txt", None) for file in files)  # None: Python sources
    identity = xxhash.xxh3_128(repr((READER_VERSION, text_field if has_rows else None)).encode())
    for file in files:
        state = file.stat()
        identity.update(repr((file.relative_to(root).as_posix(), state.st_size)).encode())
        if total > HASH_CONTENTS_UP_TO:
            identity.update(repr(state.st_mtime_ns).encode())
            continue
        with file.open("rb") as content:
            while block := content.read(1 << 22):
                identity.update(block)
    return identity.hexdigest()


def document_hash(text: str) -> int:
    """A number below 2**64 that depends on the text alone."""
    return xxhash.xxh3_64_intdigest(text.encode())


# ---------------------------------------------------------------------------------------------------- finding files


def _files(source: str) -> list[Path]:
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
    return f"; write {STDLIB!r}, or a file, folder or glob of {', '.join(SUFFIXES)}"


# ---------------------------------------------------------------------------------------------------- reading files


def _read(file: Path, *, text_field: str) -> Iterator[str]:
    suffix = _suffix(file)
    if suffix == ".parquet":
        return _read_parquet(file, text_field=text_field)
    if suffix == ".txt":
        return _read_text(file)
    if suffix is None:
        return _read_python(file)
    return _read_json_lines(file, text_field=text_field)


def _read_python(file: Path) -> Iterator[str]:
    try:
        yield file.read_text(encoding="utf-8")
    except UnicodeDecodeError:  # a few library files declare another encoding; the rest is text enough
        return


def _read_text(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8-sig") as lines:  # -sig: a byte order mark is no text
        chunk: list[str] = []
        size = 0
        while line := lines.readline(LONGEST_CHUNK_CHARACTERS):
            chunk.append(line)
            size += len(line)
            if (size >= CHUNK_CHARACTERS and line.isspace()) or size >= LONGEST_CHUNK_CHARACTERS:
                yield "".join(chunk)
                chunk, size = [], 0
        yield "".join(chunk)


def _read_json_lines(file: Path, *, text_field: str) -> Iterator[str]:
    with _open_lines(file) as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            where = f"'{file}', line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"data.source: {where} is not JSON: {error}; repair or remove the line") from error
            if not isinstance(row, dict):
                raise UserError(f"data.source: {where} is not a JSON object such as {{{json.dumps(text_field)}: ...}}")
            if text_field not in row:
                raise _no_such_field(text_field, where=where, fields=row)
            yield _text(row[text_field], text_field=text_field, where=where)


def _open_lines(file: Path) -> io.BufferedIOBase:
    if file.name.lower().endswith(".jsonl"):
        return file.open("rb")
    import pyarrow  # brings gzip and zstd

    compression = "gzip" if file.name.lower().endswith(".gz") else "zstd"
    return io.BufferedReader(pyarrow.input_stream(str(file), compression=compression))


def _read_parquet(file: Path, *, text_field: str) -> Iterator[str]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        if text_field not in table.schema_arrow.names:
            raise _no_such_field(text_field, where=f"'{file}'", fields=table.schema_arrow.names)
        row = 0
        for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield _text(value, text_field=text_field, where=f"'{file}', row {row}")


def _no_such_field(text_field: str, *, where: str, fields: object) -> UserError:
    names = ", ".join(repr(str(name)) for name in list(fields)[:20]) or "(none)"  # type: ignore[call-overload]
    return UserError(f"data.text_field: {where} has no field {text_field!r}; it has {names}")


def _text(value: object, *, text_field: str, where: str) -> str:
    """The value as text that can be encoded; null counts as an empty document."""
    if value is None:
        return ""
    if not isinstance(value, str):
        kind = type(value).__name__
        raise UserError(f"data.text_field: {where}: field {text_field!r} holds {kind}, not text; name a field of text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can escape one half of a surrogate pair
            raise UserError(f"data.source: {where} is no valid Unicode: {error}; repair or remove the line") from error
    return value
