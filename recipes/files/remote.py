"""Files at a server, by their addresses: s3://bucket/name, gs://bucket/name, https://host/name.

Every request has a time limit, and is sent again for PATIENCE seconds after a fault that may pass; then a
TemporaryError is raised, or Altered for damage. What the user must mend is a UserError at once. Only this file imports
fsspec, when an address is first used: other runs do without. Imports no torch.
"""

import glob
import hashlib
import io
import os
import re
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from parallel.errors import TemporaryError, UserError
from recipes.files.atomic import replace
from recipes.files.server_faults import Altered, Answer, problem_of

CONNECT_SECONDS, READ_SECONDS = 5, 10
"""Seconds until a server must accept a connection, and send the next bytes."""
PATIENCE = 15.0
"""Seconds from a fault to the last attempt: a server that restarts is back by then."""
ATTEMPTS = 3
"""So many are made in any case: those that transfer much may take longer than PATIENCE."""
LONGEST_PAUSE = 4.0
"""Seconds between two attempts, at most; the first pause is a 16th of it."""
BLOCK = 8 << 20
"""Bytes of one request: at a delay of 30 ms it takes a tenth of the time of 1 Gbit/s."""
AHEAD = 4
"""Blocks that are fetched before they are asked for, while a file is read from one end to the other."""
BLOCKS_KEPT = 3 * AHEAD
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "https": "aiohttp", "http": "aiohttp"}
"""Scheme of an address -> the package that fsspec reads it with."""
PART, MOST_PARTS = 2 * BLOCK, 10_000
"""Bytes that are sent at once, unless a file would have more parts than S3 takes."""
TAGS = ("ETag", "etag", "md5Hash", "Last-Modified", "LastModified", "updated", "mtime")
"""What servers call the version of a file, best first."""
Result = TypeVar("Result")


class RemoteState(NamedTuple):
    """What a server says about a file; the first name is that of os.stat()."""

    st_size: int
    tag: str
    """Differs if the contents do; "" if the server says nothing."""


@dataclass(frozen=True)
class RemoteFile:
    """A file at a server, as it was listed. Has the methods of a pathlib.Path that readers of text use."""

    address: str
    state: RemoteState

    def __str__(self) -> str:
        return self.address

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.address.split("/"))

    @property
    def name(self) -> str:
        return self.parts[-1]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def stat(self) -> RemoteState:
        return self.state

    def open(self, mode: str = "rb", buffering: int = io.DEFAULT_BUFFER_SIZE) -> io.BufferedReader:
        """The contents, read in blocks as they are needed. Reading raises TemporaryError if the server stays away."""
        assert mode == "rb", "files at a server are only read, as bytes"
        return io.BufferedReader(_Blocks(self), max(buffering, io.DEFAULT_BUFFER_SIZE))


class _Blocks(io.RawIOBase):
    """The contents of a file at a server. A fault never moves the position: the same block is asked for again."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._position, self._last = file, 0, -2
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="remote")
        self._system = _system(file.address)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.state.st_size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, target: Any, /) -> int:
        left = self._file.state.st_size - self._position
        if left <= 0 or not len(target):
            return 0
        index, offset = divmod(self._position, BLOCK)
        piece = memoryview(self._block(index))[offset : offset + len(target)]
        memoryview(target).cast("B")[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._blocks.clear()
        super().close()

    def _block(self, index: int) -> bytes:
        ahead = AHEAD if index == self._last + 1 else 0
        if index != self._last:
            for wanted in range(index, min(index + ahead, (self._file.state.st_size - 1) // BLOCK) + 1):
                if wanted not in self._blocks:
                    self._blocks[wanted] = self._pool.submit(self._fetch, wanted)
            self._last = index
            self._blocks.move_to_end(index)
            while len(self._blocks) > BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        block = self._blocks[index]
        if block.done() and block.exception():  # fetched ahead while the server was away; perhaps it is back
            block = self._blocks[index] = self._pool.submit(self._fetch, index)
        return block.result()

    def _fetch(self, index: int) -> bytes:
        file, begin = self._file, index * BLOCK
        end = min(begin + BLOCK, file.state.st_size)

        def fetch() -> bytes:
            content = bytes(self._system.cat_file(file.address, start=begin, end=end))
            if len(content) > end - begin:
                raise UserError(f"{file}: its server cannot send parts of files; download it and give the file")
            if len(content) < end - begin:
                raise ConnectionError(f"{len(content)} of {end - begin} bytes from byte {begin} on arrived")
            return content

        return _patiently(fetch, file.address)


def find(address: str, *, pattern: bool = False) -> list[RemoteFile]:
    """The file at this address, or those in the folder there and below, sorted by address. pattern: those that match
    the address as a glob, if any do.

    Hidden files are left out. None if there are none. Raises UserError, also if the bucket does not exist.
    """
    system, fixed = _system(address), len(address.split("/"))

    def look() -> dict[str, Any]:
        nonlocal fixed
        if pattern and is_glob(address) and (matching := system.glob(address, detail=True)):
            fixed = len(address.split("*")[0].split("/"))
            return dict(matching)
        about = system.info(address)
        return {about["name"]: about} if about["type"] == "file" else dict(system.find(address, detail=True))

    files = _files(_if_there(look, address) or {}, address)
    visible = (file for file in files if not any(part.startswith(".") for part in file.parts[fixed:]))
    return sorted(visible, key=lambda file: file.parts)


def files_in(address: str) -> list[RemoteFile]:
    """The files directly in the folder at this address that may have the same names on a disk."""
    system = _system(address)
    listed = _if_there(lambda: system.ls(address, detail=True), address) or ()
    files = _files({about["name"]: about for about in listed}, address)
    return [file for file in files if re.fullmatch(r"[^.\x00-\x1f][^\x00-\x1f]{0,99}", file.name)]


def _files(listed: Mapping[str, Mapping[str, Any]], address: str) -> list[RemoteFile]:
    return [
        RemoteFile(_system(address).unstrip_protocol(name), _state_of(about, address))
        for name, about in listed.items()
        if about["type"] == "file" and not name.endswith("/")
    ]


def is_glob(address: str) -> bool:
    """Whether an address has a pattern in it. That of a web page may have a ? of its own."""
    return glob.has_magic(address) and not address.startswith("http")


def state(address: str) -> RemoteState | None:
    """What the server says about a file now; None if there is none. Raises UserError."""
    about: dict[str, Any] | None = _if_there(partial(_system(address).info, address), address)
    return _state_of(about, address) if about and about["type"] == "file" else None


def read(address: str) -> bytes | None:
    """The contents of a small file; None if there is none. Raises UserError."""
    return cast("bytes | None", _if_there(partial(_system(address).cat_file, address), address))


def write(address: str, content: bytes) -> None:
    """Create or replace a file. Raises UserError."""
    _send(address, len(content), lambda begin, end: content[begin:end])


def upload(path: Path, address: str) -> None:
    """Copy a file to a server, in parts if it is large; the file appears there when all of it has arrived.

    The server compares each part with a checksum that is sent along. Raises UserError, and OSError for the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if address.startswith("s3:"):
            _send(address, size, lambda begin, end: os.pread(file.fileno(), end - begin, begin))
        else:
            _patiently(lambda: _system(address).put_file(str(path), address), address)
    if (there := state(address)) is None or there.st_size != size:
        raise TemporaryError(f"{address} is not there after it was sent: {size} bytes of {path}")


def _send(address: str, size: int, piece: Callable[[int, int], bytes]) -> None:
    """Create or replace a file of these bytes. Of a large one, a part that fails is sent again by itself; parts that an
    attempt before left there are not if their checksums are those of these bytes."""
    system, part = _system(address), max(PART, -(-size // MOST_PARTS))
    if size <= part or not address.startswith("s3:"):
        content = piece(0, size)
        return _patiently(lambda: system.pipe_file(address, content), address)
    named, upload, there = _named(address), "", dict[int, str]()
    with suppress(UserError):  # not everybody who may write may look
        upload = next((number for file, number in _unfinished(address) if file == address), "")
        listed = _pages(address, "list_parts", "Parts", UploadId=upload, **named) if upload else ()
        there = {about["PartNumber"]: about["ETag"].strip('"') for about in listed}
    if not upload:
        upload = _patiently(lambda: system.call_s3("create_multipart_upload", **named), address)["UploadId"]

    def send(number: int) -> dict[str, Any]:
        content = piece((number - 1) * part, min(number * part, size))
        about = {"PartNumber": number, "UploadId": upload, "Body": content, **named}
        tag = hashlib.md5(content, usedforsecurity=False).hexdigest()  # not so with a key of KMS: then all are sent
        if there.get(number) != tag:
            tag = _patiently(lambda: system.call_s3("upload_part", **about), address)["ETag"]
        return {"PartNumber": number, "ETag": tag}

    with ThreadPoolExecutor(AHEAD, thread_name_prefix="remote") as pool:
        parts = list(pool.map(send, range(1, -(-size // part) + 1)))
    about = {"UploadId": upload, "MultipartUpload": {"Parts": parts}, **named}
    # It is not there any more if an attempt whose answer was lost has completed it; upload() looks at the file.
    _if_there(lambda: system.call_s3("complete_multipart_upload", **about), address)


def abort_uploads(address: str) -> int:
    """Delete the parts of files below an address that were never sent whole, which only S3 keeps. Returns of how many.
    Raises UserError."""
    unfinished = _unfinished(f"{address}/") if address.startswith("s3:") else []
    for file, upload in unfinished:
        about = {"UploadId": upload, **_named(file)}
        _if_there(partial(_system(file).call_s3, "abort_multipart_upload", **about), file)
    return len(unfinished)


def _unfinished(beginning: str) -> list[tuple[str, str]]:
    """Address and number of the uploads in parts that have begun, of addresses that begin so."""
    bucket, key = _named(beginning).values()
    listed = _pages(beginning, "list_multipart_uploads", "Uploads", Bucket=bucket, Prefix=key)
    return [(f"s3://{bucket}/{one['Key']}", one["UploadId"]) for one in listed]


def _pages(address: str, method: str, of: str, **about: Any) -> list[dict[str, Any]]:
    """All entries of a list that S3 gives in pages."""
    entries: list[dict[str, Any]] = []
    while True:
        page = _patiently(partial(_system(address).call_s3, method, **about), address)
        entries += page.get(of) or ()
        if not page.get("IsTruncated"):
            return entries
        about |= {key.removeprefix("Next"): page[key] for key in page if re.fullmatch("Next.*Marker", key)}


def _named(address: str) -> dict[str, str]:
    bucket, _, key = address.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": key}


def delete(addresses: Sequence[str]) -> None:
    """Delete files, in this order; those that do not exist are deleted. Raises UserError."""
    for address in addresses:
        _if_there(partial(_system(address).rm_file, address), address)


def download(file: RemoteFile, path: Path) -> None:
    """Copy a file to this disk, under its name when it is whole. Raises UserError if it changes meanwhile."""

    def copy(target: BinaryIO) -> None:
        with file.open() as source:
            shutil.copyfileobj(source, target, BLOCK)
        if target.tell() != file.state.st_size or state(file.address) != file.state:
            raise UserError(f"{file} changed while it was read; start again when nothing writes to it any more")

    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, copy, sync=True)


def _system(address: str) -> Any:
    """What fsspec reads the address with."""
    scheme = address.partition("://")[0]
    if scheme not in PACKAGES:
        raise UserError(f"{address} cannot be read: addresses begin with s3://, gs:// or https://")
    try:
        import fsspec

        # It keeps one object of equal options per thread, and makes new ones after a fork.
        new = partial(fsspec.filesystem, scheme, use_listings_cache=False)
        if scheme == "s3":
            limits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, "retries": {"max_attempts": 0}}
            system = new(config_kwargs=limits)
            system.retries = 1  # those of _patiently() are enough
            return system
        if scheme.startswith("http"):
            import aiohttp

            limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
            return new(client_kwargs={"timeout": limit, "headers": {"Accept-Encoding": "identity"}})
        return new()
    except ImportError:
        package = PACKAGES[scheme]
        raise UserError(
            f"{address} is read with the package {package}, which is not installed; install it:"
            f" pip install {package}, or pip install -e '.[remote]'"
        ) from None


def _require_answer(error: FileNotFoundError) -> None:
    """Raise what fsspec takes for a file that does not exist, but is a fault, or a bucket that does not exist."""
    if error.__cause__ is not None and Answer(error).status not in (404, 410):
        raise error.__cause__
    if Answer(error).code == "NoSuchBucket":
        raise error


def _state_of(about: Mapping[str, Any], address: str) -> RemoteState:
    size = about.get("size", about.get("Size"))
    if size is None:
        raise UserError(f"{address}: its server does not say how many bytes it has; download it and give the file")
    return RemoteState(int(size), next((str(about[tag]) for tag in TAGS if about.get(tag)), ""))


def _if_there(look: Callable[[], Result], address: str) -> Result | None:
    """The result of `look`, as _patiently() has it; None if the server says that there is no such file."""

    def look_once() -> Result | None:
        try:
            return look()
        except FileNotFoundError as error:
            _require_answer(error)
            return None

    return _patiently(look_once, address)


def _patiently(work: Callable[[], Result], address: str) -> Result:
    """The result of `work`, which is called again after a fault that may pass. Raises UserError."""
    last, pause, attempt = 0.0, LONGEST_PAUSE / 16, 0
    while True:
        try:
            return work()
        except UserError:
            raise
        except Exception as error:
            problem, attempt = problem_of(error, address), attempt + 1
            if not isinstance(problem, TemporaryError | Altered):
                raise problem from None
            last = last or time.monotonic() + PATIENCE
            if time.monotonic() + pause > last and attempt >= ATTEMPTS:
                raise problem from error
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
