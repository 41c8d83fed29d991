"""Reading token shards: across their borders, past the end, and when they are large."""

import json
import resource
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel.errors import TemporaryError, UserError
from recipes.data.order import SequenceOrder
from recipes.data.sequences import Sequences, Source
from recipes.data.tokens.shards import (
    ARRAYS,
    DOCUMENT,
    DOCUMENTS,
    TRAIN,
    VALIDATION,
    BadRowBudget,
    Shard,
    Shards,
    array_path,
    bad_rows_path,
    shard_path,
)
from tests.recipes.data.texts import shards_in, tokenizer_for, work_on, write_rows


def write(folder: Path, number: int, tokens: np.ndarray, *, last: bool) -> None:
    """Write a shard without a source."""
    folder.mkdir(exist_ok=True)
    arrays = {TRAIN: tokens, VALIDATION: tokens[:0], DOCUMENTS: np.zeros(0, dtype=DOCUMENT)}
    for kind in ARRAYS:
        np.save(array_path(folder, number, kind), arrays[kind])
    describe(folder, number, len(tokens), last=last)


def describe(folder: Path, number: int, tokens: int, *, last: bool) -> None:
    shard = Shard(tokens, 0, 0, 0, 0, 0, 0.0, 1.0, None, last)
    shard_path(folder, number).write_text(json.dumps(asdict(shard)))


def test_shards_read_as_one_row_that_repeats(tmp_path: Path) -> None:
    tokens = np.arange(100, dtype=np.uint16)
    for number, (begin, end) in enumerate(((0, 30), (30, 31), (31, 31), (31, 80), (80, 100))):
        write(tmp_path, number, tokens[begin:end], last=end == 100)
    shards = Shards(tmp_path)
    assert (shards.tokens, shards.complete) == (100, True)
    for start in (0, 5, 29, 30, 31, 79, 80, 99, 100, 130, 1234):
        for count in (0, 1, 2, 40, 100, 250):
            out = np.empty(count, dtype=np.int64)
            shards.read(start, out)
            assert out.tolist() == [(start + index) % 100 for index in range(count)]
    assert [shards.covering(count) for count in (1, 30, 31, 32, 80, 81, 100, 1000)] == [1, 1, 2, 4, 4, 5, 5, 5]


def test_new_shards_are_found_in_order(tmp_path: Path) -> None:
    write(tmp_path, 0, np.arange(10, dtype=np.uint16), last=False)
    shards = Shards(tmp_path)
    assert (shards.tokens, shards.complete) == (10, False)
    assert not shards.refresh()
    write(tmp_path, 2, np.arange(5, dtype=np.uint16), last=True)
    assert not shards.refresh()  # not before the one in between
    write(tmp_path, 1, np.arange(7, dtype=np.uint16), last=False)
    assert shards.refresh()
    assert (shards.tokens, shards.complete) == (22, True)


def test_tokens_that_do_not_match_their_index_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 0, np.arange(10, dtype=np.uint16), last=True)
    describe(tmp_path, 0, 11, last=True)
    with pytest.raises(UserError, match=r"00000-train.npy' does not match its index"):
        Shards(tmp_path).read(0, np.empty(3, dtype=np.int64))
    array_path(tmp_path, 0, TRAIN).unlink()
    with pytest.raises(TemporaryError, match="were removed while the run reads them"):
        Shards(tmp_path).read(0, np.empty(3, dtype=np.int64))


def test_thousands_of_shards_need_few_file_descriptors(tmp_path: Path) -> None:
    count = 600
    for number in range(count):
        write(tmp_path, number, np.full(8, number, dtype=np.uint16), last=number == count - 1)
    shards = Shards(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    out = np.empty(1, dtype=np.int64)
    for number in [*range(count), *range(0, count, 7), 0, 0]:
        shards.read(number * 8, out)
        assert out[0] == number
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 257


def test_bad_row_budget_counts_each_shard_once(tmp_path: Path) -> None:
    """Summing over all shards for each new one would take most of a minute for a trillion tokens."""
    shard = Shard(10, 0, 95, 0, 0, 5, 0.0, 1.0, None, False)
    looks = 0

    class Counting(list[Shard]):
        def __getitem__(self, place: Any) -> Any:
            nonlocal looks
            found = super().__getitem__(place)
            looks += len(found)
            return found

    budget = BadRowBudget(tmp_path, source="x", budget=0.05)
    shards = Counting([shard] * 5000)
    for known in (1000, 3000, 5000, 5000):
        budget.count(Counting(list(shards)[:known]))
    assert looks == 5000
    bad_rows_path(tmp_path, 5000).write_text('{"file": "f", "row": 7, "reason": "null"}\n')
    with pytest.raises(UserError, match=r"25001 of the first 500001 rows of 'x' .*(.|\n)*The first:"):
        budget.count([*([replace(shard, bad=0)] * 5000), replace(shard, documents=0, bad=1, number=5000)])


def test_trillion_tokens_are_read_in_little_memory(tmp_path: Path) -> None:
    """Uses sparse files, which have the size but occupy no space."""
    count, size = 10, 10**11
    for number in range(count):
        file = array_path(tmp_path, number, TRAIN)
        header = {"descr": "<u2", "fortran_order": False, "shape": (size,)}
        with file.open("wb") as content:
            np.lib.format.write_array_header_1_0(content, header)
            begin = content.tell()
            try:
                content.truncate(begin + 2 * size)
            except OSError as error:
                pytest.skip(f"this file system has no files of 200 GB with holes: {error}")
            content.seek(begin + 2 * (size - 1))
            content.write((number + 1).to_bytes(2, "little"))  # the last token
        describe(tmp_path, number, size, last=number == count - 1)
    shards = Shards(tmp_path)
    assert shards.tokens == 10**12
    out = np.empty(2, dtype=np.int64)
    for number in range(count):
        shards.read((number + 1) * size - 1, out)
        assert out.tolist() == [number + 1, 0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sequences = Sequences([Source("far", shards, SequenceOrder(8192, 0, None))], [1.0])
    for first in (0, 10**6, 10**9, 10**11):
        assert sequences.rows(first, 8).shape == (8, 8193)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_checksum_covers_exactly_the_first_tokens(tmp_path: Path) -> None:
    texts = write_rows(tmp_path / "one.jsonl", 300)
    lines = [json.dumps({"text": text}) for text in (*texts[:200], *(text + " Or not." for text in texts[200:]))]
    (tmp_path / "other.jsonl").write_text("\n".join(lines))
    found = []
    for name in ("one", "other"):
        work = work_on(tmp_path / f"{name}.jsonl", tokenizer=tokenizer_for(tmp_path / "one.jsonl"))
        shards_in(tmp_path / name, work)
        found.append(Shards(tmp_path / name))
    one, other = found
    rows = [np.zeros(min(one.tokens, other.tokens), dtype=np.int64) for _ in found]
    for shards, row in zip(found, rows, strict=True):
        shards.read(0, row)
    alike = int(np.flatnonzero(rows[0] != rows[1])[0])
    end = one.shards[0].train
    assert 1 < end < alike
    places = [1, end - 1, end, end + 1, alike]
    assert [one.checksum(tokens) for tokens in places] == [other.checksum(tokens) for tokens in places]
    assert len({one.checksum(tokens) for tokens in (*places, None)}) == len(places) + 1
    assert one.checksum(alike + 1) != other.checksum(alike + 1) and one.checksum(None) != other.checksum(None)
    assert one.checksum(one.tokens) == one.checksum(10**12) == one.checksum(None)
    begun = Shards(tmp_path / "one", only=one.shards[:2])  # as it was when the rest was still to come
    assert begun.checksum(end + 1) == one.checksum(end + 1)
