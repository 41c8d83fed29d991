"""The text of .gz and .zst files, and where a broken file breaks off. Imports no torch."""

import gzip
import io
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from parallel.errors import UserError
from recipes.data.text.row import BROKEN, File

# Decompressed at once. Where a stream breaks off, up to this much text before the break is lost.
BLOCK = 1 << 16
# Precision with which the break in a stream is located: so many bytes, or finer in a small file, which may hold much.
BREAK_BYTES = 1 << 10
FINEST = 256
# Bytes of text per compressed byte of gzip or zstd: C4's English part is 806 GB of text in 305 GB of .json.gz.
COMPRESSION_RATIO = 3
# The checksum and length at the end of a .gz.
GZIP_END_BYTES = 8
# What pyarrow says of zstd with a window above 128 MB: it would take up to 2 GB of memory for each open file.
TOO_WIDE = "requires too much memory"


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


def before_the_break(path: File, size: int) -> tuple[int, int]:
    """How many lines, and how many compressed bytes up to the last of them, come before the place where a compressed
    file of this size breaks off."""
    lines = place = 0
    try:
        piece = max(1, min(BREAK_BYTES, size // FINEST))
        with closing(_InPieces(path, piece)) as file, _decompressed(path, file) as stream:
            while text := stream.read(BREAK_BYTES):
                if found := text.count(b"\n"):  # without any, it may be what damage decompresses to
                    lines, place = lines + found, file.place
    except BROKEN:
        pass  # this is the place, or the file is gone
    return lines, place


def require_narrow(path: File, error: BaseException) -> None:
    """Raises UserError if this error of reading says that the window of a .zst is too large for pyarrow. That is not
    damage: every row can be had."""
    if TOO_WIDE in str(error):
        raise UserError(
            f"data.source: '{path}' is zstd with a window above 128 MB, which is not read; compress it again:"
            " zstd -dc --long=31 OLD.zst | zstd -o NEW.zst"
        ) from None


class _InPieces(io.RawIOBase):
    """A file that returns at most so many bytes per read, however many are requested."""

    def __init__(self, path: File, piece: int) -> None:
        self._file, self._piece, self.place = path.open("rb"), piece, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._file.read(self._piece)
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
