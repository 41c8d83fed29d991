"""The files of one shard while it is written, and how shards and the index appear in their folder. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
import xxhash

from parallel.errors import UserError
from recipes.data.text.row import UNREADABLE, Row
from recipes.data.tokens.shards import (
    ARRAYS,
    DOCUMENT,
    DOCUMENTS,
    FORMAT_VERSION,
    INDEX,
    TRAIN,
    VALIDATION,
    Index,
    Shard,
    array_path,
    bad_rows_path,
    read_shard,
    shard_path,
    token_type,
)
from recipes.data.tokens.workspace import Preparation, alone, publish

HASHES = 2**64


def held_out_below(validation_fraction: float) -> int:
    """Documents with smaller hashes are held out."""
    return int(validation_fraction * HASHES)


def token_type_of(work: Preparation) -> np.dtype:
    """The type of the tokens of shards: pairs hold lengths, too."""
    return token_type(work.tokenizer.vocabulary if isinstance(work.text_field, str) else 2**32)


def publish_shard(folder: Path, number: int, shard: Shard, part: Path, *, source: str) -> Shard:
    """Move the files of a whole shard from `part` into the folder. Returns the shard that is there: a faster process
    may have made it. Raises UserError if that holds other tokens."""
    shard = replace(shard, number=number)
    with alone(folder):
        if (there := read_shard(folder, number)) is not None:  # of a faster process; a run may use it
            if there.checksums != shard.checksums:
                raise UserError(
                    f"data.source: another process made different tokens of {source!r}: one of the two could"
                    " not read a file; start again"
                )
            return there
        # The arrays first, and last the description, without which the shard does not exist.
        for kind in ARRAYS:
            (part / kind).replace(array_path(folder, number, kind))
        if shard.bad:
            (part / "bad").replace(bad_rows_path(folder, number))
        publish(part, shard_path(folder, number), json.dumps(shard.stored))
    return shard


def publish_index(
    folder: Path, work: Preparation, *, files: Sequence[str], shards: Sequence[Shard], part: Path
) -> None:
    """Write index.json, once all shards of the source are there."""
    index = Index(
        FORMAT_VERSION,
        work.source,
        work.source_fingerprint,
        work.tokenizer.fingerprint,
        work.validation_fraction,
        tuple(files),
        tuple(shards),
        pairs="" if isinstance(work.text_field, str) else work.text_field.summary,
    )
    publish(part, folder / INDEX, index.json())


class ShardWriter:
    """The files of one shard while it is written."""

    def __init__(self, part: Path, work: Preparation, files: Sequence[str]) -> None:
        """part: folder for unfinished files. files: names of the source's files."""
        types = {TRAIN: token_type_of(work), VALIDATION: token_type_of(work), DOCUMENTS: DOCUMENT}
        self._files = {kind: ArrayWriter((part / kind).open("wb"), dtype) for kind, dtype in types.items()}
        self._bad_file: TextIO = (part / "bad").open("w", encoding="utf-8")
        self._names = files
        self._held_out = self._empty = self._bad = 0
        self._unread = False
        self._lowest, self._highest = 1.0, 0.0

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._bad_file.close()

    @property
    def train(self) -> int:
        """Tokens for training."""
        return self._files[TRAIN].length

    @property
    def tokens(self) -> int:
        return self.train + self._files[VALIDATION].length

    @property
    def rows(self) -> int:
        return self._files[DOCUMENTS].length + self._held_out + self._empty + self._bad

    def extend(
        self, arrays: Mapping[str, Sequence[np.ndarray]], *, held_out: int, empty: int, hashes: Sequence[int]
    ) -> None:
        """Append documents. arrays: of each kind. held_out: how many of them are. empty: rows without text among them.
        hashes: of all documents, or just the smallest and the largest."""
        for kind, of_kind in arrays.items():
            self._files[kind].extend(of_kind)
        self._held_out += held_out
        self._empty += empty
        for number in hashes:
            self._lowest, self._highest = min(self._lowest, number / HASHES), max(self._highest, number / HASHES)

    def note(self, row: Row) -> None:
        """Append a bad row to the list."""
        self._bad += row.lost
        self._unread |= row.kind == UNREADABLE
        place = {"file": self._names[row.file], "row": row.number, "reason": row.problem}
        self._bad_file.write(json.dumps(place) + "\n")

    def finish(self, *, cursor: Any, last: bool) -> Shard:
        """Finish the files. Returns what the shard holds. cursor, last: where the source continues, if it does."""
        checksums = {kind: file.finish() for kind, file in self._files.items()}
        return Shard(
            train=self._files[TRAIN].length,
            validation=self._files[VALIDATION].length,
            documents=self._files[DOCUMENTS].length,
            held_out=self._held_out,
            empty=self._empty,
            bad=self._bad,
            lowest=self._lowest,
            highest=self._highest,
            cursor=cursor,
            last=last,
            unread=self._unread,
            checksums=checksums,
        )


class ArrayWriter:
    """A one-dimensional .npy file that grows."""

    def __init__(self, file: BinaryIO, dtype: np.dtype) -> None:
        self.length = 0
        self._file = file
        self._dtype = dtype
        self._checksum = xxhash.xxh3_64()
        self._header_size = self._write_header()

    def extend(self, arrays: Sequence[np.ndarray]) -> None:
        if arrays:
            joined = np.concatenate(arrays)
            self._file.write(joined.data)
            self._checksum.update(joined.data)
            self.length += len(joined)

    def finish(self) -> str:
        """Write the length into the header, which numpy pads for this. Returns the checksum of the contents."""
        self._file.seek(0)
        if self._write_header() != self._header_size:
            raise UserError("a token shard has grown too long for its header")
        return self._checksum.hexdigest()

    def close(self) -> None:
        self._file.close()

    def _write_header(self) -> int:
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()
