"""The text of .gz and .zst files, and where a broken file breaks off. Imports no torch."""

import gzip
import io
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from recipes.data.text.row import BROKEN, File

# Decompressed at once. Where a stream breaks off, up to this much text before the break is lost.
BLOCK = 1 << 16
# Precision with which the break in a stream is located.
BREAK_BYTES = 1 << 10
# Bytes of text per compressed byte of gzip or zstd: C4's English part is 806 GB of text in 305 GB of .json.gz.
COMPRESSION_RATIO = 3
# The checksum and length at the end of a .gz.
GZIP_END_BYTES = 8


def open_compressed(path: File) -> IO[bytes]:
    """The decompressed text of a file. Opening and reading raise one of BROKEN."""
    if _is_padded(path):
        file: Any = path.open("rb")
        stream = gzip.GzipFile(fileobj=file)
        stream.myfileobj = file  # which it closes with itself
        return io.BufferedReader(stream, BLOCK)
    import pyarrow

    place = str(path) if isinstance(path, Path) else path.open("rb")
    return io.BufferedReader(pyarrow.input_stream(place, compression=_compression(path)), BLOCK)


def before_the_break(path: File) -> tuple[int, int]:
    """How many lines and how many compressed bytes come before the place where a compressed file breaks off."""
    lines = place = 0
    try:
        with closing(_InPieces(path)) as file, _decompressed(path, file) as stream:
            while text := stream.read(BREAK_BYTES):
                lines += text.count(b"\n")
                place = file.place
    except BROKEN:
        pass  # this is the place, or the file is gone
    return lines, place


class _InPieces(io.RawIOBase):
    """A file that returns at most BREAK_BYTES per read, however many are requested."""

    def __init__(self, path: File) -> None:
        self._file, self.place = path.open("rb"), 0

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._file.read(BREAK_BYTES)
        self.place += len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


def _decompressed(path: File, file: io.RawIOBase) -> io.BufferedIOBase:
    """Like open_compressed(), but for an open file and without buffering."""
    if _is_padded(path):
        return gzip.GzipFile(fileobj=file)
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), _compression(path))


def _compression(path: File) -> str:
    """The name that pyarrow uses."""
    return "gzip" if path.name.lower().endswith(".gz") else "zstd"


def _is_padded(path: File) -> bool:
    """Whether a .gz ends in zeros, as block devices leave them: gzip ignores them, pyarrow reports damage."""
    if _compression(path) != "gzip":
        return False
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, io.SEEK_END) - GZIP_END_BYTES))
        return file.read() == bytes(GZIP_END_BYTES)
