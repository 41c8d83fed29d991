"""The text of .gz and .zst files. Imports no torch."""

import gzip
import io
from typing import Any

from parallel.errors import UserError
from recipes.data.text.row import File

# Decompressed at once. Where a stream breaks off, up to this much text before the break is lost.
BLOCK = 1 << 16
# At least so many reads of a file, which may be small and hold much, so that it is known where in it a row is.
PIECES = 256
# What pyarrow says of zstd with a window above 128 MB: it would take up to 2 GB of memory for each open file.
TOO_WIDE = "requires too much memory"


class CompressedText(io.BufferedReader):
    """The decompressed text of a file. Opening and reading raise one of BROKEN."""

    def __init__(self, path: File) -> None:
        import pyarrow

        self._file = _InPieces(path)
        compression = "gzip" if path.name.lower().endswith(".gz") else "zstd"
        if compression == "gzip" and _ends_in_zeros(path):
            stream: Any = gzip.GzipFile(fileobj=self._file)
        else:
            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(self._file, mode="r"), compression)
        super().__init__(stream, BLOCK)

    @property
    def place(self) -> int:
        """Compressed bytes that were read so far."""
        return self._file.place


class _InPieces(io.RawIOBase):
    """A file that returns at most so many bytes per read, however many are requested."""

    def __init__(self, path: File) -> None:
        self._file, self.place = path.open("rb"), 0
        self._piece = max(1, min(BLOCK, path.stat().st_size // PIECES))

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._file.read(self._piece if size is None or size < 0 else min(size, self._piece))
        self.place += len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


def _ends_in_zeros(path: File) -> bool:
    """As block devices leave them: gzip ignores them, pyarrow reports damage. A .gz of any text ends in others."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, io.SEEK_END) - 8))
        return file.read() == bytes(8)


def require_narrow(path: File, error: BaseException) -> None:
    """Raises UserError if this error of reading says that the window of a .zst is too large for pyarrow. That is not
    damage: every row can be had."""
    if TOO_WIDE in str(error):
        raise UserError(
            f"data.source: '{path}' is zstd with a window above 128 MB, which is not read; compress it again:"
            " zstd -dc --long=31 OLD.zst | zstd -o NEW.zst"
        ) from None
