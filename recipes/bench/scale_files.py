"""What data and files cost each process, for each step, skipped step and resume at step 10^6. (See scale_start.py for
packages and code.)"""

import json
import sys
import tempfile
import time
import tracemalloc
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from recipes.bench.scale_rows import Row, median_seconds
from recipes.data.history import Segment
from recipes.data.order import SequenceOrder
from recipes.data.sequences import Sequences, Source
from recipes.data.tokens.shards import TRAIN, Shard, Shards, array_path, read_index
from recipes.data.tokens.workspace import USUAL
from recipes.files.atomic import cut_back

PER_NODE, PER_RANK = 8, 16
"""Processes of a node, and sequences of each in a step."""
STEP, LENGTH = 10**6, 4096
TOKENS = 15 * 10**12
SHARES = (0.5, 0.3, 0.15, 0.05)
INDEX_READS = 2
"""Of a folder of prepared tokens by each process: by the rules, and to map the tokens."""


def file_rows(ranks: int) -> list[Row]:
    """The rows for a run of so many processes, eight to a node, on prepared tokens."""
    batch, nodes = ranks * PER_RANK, max(1, ranks // PER_NODE)
    sequences = corpus()
    first = STEP * batch
    opens = opens_of_a_sequence()
    share = np.arange(first, first + PER_RANK)
    size, memory, seconds = index()
    kept, peak = resume()
    there = median_seconds(lambda: sequences.require(first, batch))
    order = median_seconds(lambda: ordered(sequences, share))
    found = median_seconds(lambda: place(batch))
    # On average half of a shard of two bytes per token, or four, by one process of each node.
    compared = nodes * USUAL.largest_shard * 2
    return [
        Row("batch: seconds to know that its tokens are there", there, "s", "simulated"),
        Row("batch: seconds to order a process's share", order, "s", "simulated"),
        Row("batch: opened files of 15T tokens, in all", opens * batch, "", "counted"),
        Row("skipped step: sequences that each process looks up", PER_RANK, "", "counted"),
        Row("15T tokens: bytes of their index", size, "B", "simulated"),
        Row("15T tokens: seconds to read the index", seconds, "s", "simulated"),
        Row("15T tokens: memory of the index in each process", memory, "B", "simulated"),
        Row("15T tokens: bytes of indexes parsed at start, in all", size * INDEX_READS * ranks, "B", "counted"),
        Row("resume: bytes of tokens compared, in all", compared, "B", "counted"),
        Row("resume at step 10^6: seconds to find the place in the data", found, "s", "simulated"),
        Row("resume at step 10^6: seconds to cut metrics.jsonl back", kept, "s", "run"),
        Row("resume at step 10^6: memory to cut metrics.jsonl back", peak, "B", "run"),
    ]


def shard(*, last: bool) -> Shard:
    """One of the largest size."""
    sums = dict.fromkeys(("train", "validation", "documents"), "0123456789abcdef")
    counts = USUAL.largest_shard, 60_000, 60_000, 60, 0, 0
    return Shard(*counts, lowest=0.0, highest=1.0, cursor=[12, 345678], last=last, checksums=sums)


@cache
def corpus() -> Sequences:
    """15T tokens of four sources; nothing reads them."""
    counts = [int(share * TOKENS / USUAL.largest_shard) for share in SHARES]
    shards = [[*[shard(last=False)] * (count - 1), shard(last=True)] for count in counts]
    order = SequenceOrder(LENGTH, 0, None)
    sources = [
        Source(f"source {number}", Shards(Path("nowhere"), TRAIN, only=own), order, prepared=True)
        for number, own in enumerate(shards)
    ]
    return Sequences(sources, SHARES)


def ordered(sequences: Sequences, numbers: np.ndarray) -> None:
    """Find where these sequences are."""
    places, own = sequences.mixture.place(numbers)
    for place, source in enumerate(sequences.sources):
        list(source.position.pieces(own[places == place], total=source.tokens))


def place(batch: int) -> None:
    """What a resume asks of the order: all but the tokens themselves."""
    found = Sequences(corpus().sources, SHARES)
    shares = {source.name: share for source, share in zip(found.sources, SHARES, strict=True)}
    first = found.continue_after((Segment(shares, LENGTH, STEP * batch),))
    found.require(first, batch)
    found.epochs(first)
    found.tokens(first)
    for source in found.sources:
        source.shards.checksum(None)


@cache
def opens_of_a_sequence() -> int:
    """How often a process opens files to read a sequence of a shard that it does not keep open."""
    with tempfile.TemporaryDirectory() as name:
        folder, opened, watching = Path(name), [], True
        np.save(array_path(folder, 0, TRAIN), np.zeros(LENGTH + 1, np.uint16))
        found = Shards(folder, TRAIN, only=[replace(shard(last=True), train=LENGTH + 1)])

        def hear(event: str, arguments: tuple[Any, ...]) -> None:  # it stays for as long as the process
            if event == "open" and watching and str(arguments[0]).startswith(name):
                opened.append(arguments[0])

        sys.addaudithook(hear)
        found.read(0, np.empty(LENGTH, np.int64))
        watching = False
    return len(opened)


@cache
def index() -> tuple[int, int, float]:
    """Bytes of the index of 15T tokens, its memory, and the seconds to read it."""
    with tempfile.TemporaryDirectory() as name:
        count = TOKENS // USUAL.largest_shard
        one = json.dumps(asdict(shard(last=False)))
        head = '{"format": 2, "source": "s", "source_fingerprint": "s", "tokenizer_fingerprint": "t"'
        text = f'{head}, "validation_fraction": 0.001, "files": [], "shards": [{", ".join([one] * count)}]}}'
        file = Path(name, "index.json")
        file.write_text(text, encoding="utf-8")
        begin = time.perf_counter()
        read_index(Path(name))
        seconds = time.perf_counter() - begin
        tracemalloc.start()
        found = read_index(Path(name))
        memory = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert found is not None and len(found.shards) == count
        return file.stat().st_size, memory, seconds


@cache
def resume() -> tuple[float, int]:
    """Seconds and memory to cut 1,000 of 10^6 rows off."""
    columns = {f"column_{number}": 1 / (3 + number) for number in range(30)}
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "metrics.jsonl")
        with file.open("w", encoding="utf-8") as out:
            row = json.dumps(columns)[1:]
            out.writelines(f'{{"step": {step}, {row}\n' for step in range(1, STEP + 1))
        begin = time.perf_counter()
        cut_back(file, STEP - 500)
        seconds = time.perf_counter() - begin
        tracemalloc.start()
        cut_back(file, STEP - 1000)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return seconds, peak
