"""Sources at a server: s3://bucket/corpus/*.parquet, gs://bucket/corpus, https://host/file.jsonl.

Their files are read in place, as local ones are: same order, same rows. Imports no torch.
"""

from collections.abc import Iterable, Sequence

import xxhash

from parallel.errors import UserError
from recipes.files.remote import RemoteFile, find, is_glob, read, state


def remote_problem(source: str, files: Sequence[RemoteFile], *, supported: str) -> str | None:
    """What is wrong with a source at a server, and what to write instead, or None. files: those of supported types."""
    if not files:
        what = "no file matches" if is_glob(source) else "there is no file of a supported type at"
        one = "; of https://, give the address of one file" if source.startswith("http") else ""
        return f"{what} {source!r}; supported are {supported}{one}"
    if all(file.state.st_size == 0 for file in files):
        return f"all {len(files)} files of {source!r} are empty (0 bytes)"
    return None


def found(source: str, suffixes: Iterable[str]) -> list[RemoteFile]:
    """The files of a source that end like this, in reading order. Raises UserError."""
    return [
        file for file in find(source, pattern=True) if file.name.partition("?")[0].lower().endswith(tuple(suffixes))
    ]


def is_prepared_there(source: str) -> bool:
    """Whether the address is that of a folder that scripts/prepare_data.py wrote."""
    if source.startswith("http"):
        return False
    place = source.rstrip("/")
    return state(f"{place}/index.json") is not None and read(f"{place}/owner.txt") is not None


def remote_fingerprint(settings: tuple[object, ...], files: Sequence[RemoteFile]) -> str:
    """The identity of the files of a source: their names below the folder that they share, sizes and versions.

    Raises UserError where a server does not tell one version of a file from the next.
    """
    shared = len(files[0].parts) - 1
    while any(file.parts[:shared] != files[0].parts[:shared] for file in files):
        shared -= 1
    identity = xxhash.xxh3_128(repr(settings).encode())
    for file in files:
        if not file.state.tag:
            raise UserError(
                f"data.source: the server of {file} gives it neither an ETag nor a date, so a change would not be"
                " noticed; download the file and give that"
            )
        identity.update(repr(("/".join(file.parts[shared:]), *file.state)).encode())
    return identity.hexdigest()
