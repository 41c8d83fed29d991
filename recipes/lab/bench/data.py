"""Benchmark reading, tokenizing and preparing text against the libraries alone: `bench.py --suite data`. CPU only.

Medians, because machines are noisy; a comparison alternates its sides.
"""

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import cast

import numpy as np
import torch
import xxhash

from recipes.data.batches import Batches
from recipes.data.config import BatchConfig, DataConfig
from recipes.data.open_data import Data, DataSettings, Launch, open_data
from recipes.data.order import SequenceOrder
from recipes.data.sequences import Sequences, Source
from recipes.data.text.rows import readable_documents
from recipes.data.text.tokenizer import Tokenizer, load_tokenizer, parallel_tokenizers
from recipes.data.tokens.prepare import write_shards
from recipes.data.tokens.shards import (
    ARRAYS,
    DOCUMENT,
    DOCUMENTS,
    FORMAT_VERSION,
    INDEX,
    OWNER,
    TRAIN,
    VALIDATION,
    Index,
    Shard,
    Shards,
    array_path,
    shard_path,
    shards_from,
)
from recipes.data.tokens.workspace import preparation
from recipes.files.screen import say

Cells = Iterator[tuple[str, str, str, str]]
"""What was measured, its median, a ratio and a target; "" where there is none."""
LENGTH = 8192
"""Tokens per sequence."""
END = 0


def main(arguments: list[str]) -> int:
    """Print a Markdown table. Returns the exit code."""
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.py --suite data", description=__doc__, formatter_class=defaults)
    parser.add_argument("--tokens", type=int, default=2**27, help="tokens in the prepared shards to read")
    parser.add_argument("--copies", type=int, default=12, help="copies of the standard library's text to tokenize")
    parser.add_argument("--shards", type=int, default=15_000, help="shards to open when resuming far into a run")
    parser.add_argument("--batches", type=int, default=100_000, help="batches over which memory must not grow")
    parser.add_argument("--repeats", type=int, default=3, help="measurements after one warm-up")
    parser.add_argument("--only", choices=("reading", "tokenizing", "preparing"), nargs="+")
    options = parser.parse_args(arguments)
    measures = {"reading": _reading, "tokenizing": _tokenizing, "preparing": _preparing}
    say("| what | median | ratio | target |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only or measures:
            for cells in measures[name](Path(folder), options):
                say("|" + "|".join(f" {cell} " for cell in cells) + "|")
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "tokenizers", "numpy"))
    say(f"\n{os.cpu_count()} cores, Python {platform.python_version()}, {packages}")
    return 0


def _reading(folder: Path, options: argparse.Namespace) -> Cells:
    """Measure reading from prepared shards in the page cache to batches."""
    _random_shards(folder / "shards", options.tokens)
    for what, mask, target in (("", None, "100"), (" with document positions", END, "20")):
        batches = _batches(_sequences(folder / "shards"), global_batch_size=16, mask=mask)
        count = max(1, options.tokens // LENGTH // 16)
        rates = []
        for repeat in range(options.repeats + 1):
            started = perf_counter()
            for batch in range(repeat * count, (repeat + 1) * count):
                batches.take(batch)
            rates.append(count * 16 * LENGTH / (perf_counter() - started) / 1e6)
        batches.close()
        rate = f"{median(rates[1:]):.0f} M tokens/s per process"
        yield f"prepared shards to batches of 16 x {LENGTH}, shuffled{what}", rate, "", f"at least {target} M"
    seconds = [_resume(folder, options.shards) for _ in range(options.repeats + 1)]
    tokens = f"{options.shards * 2**26 / 1e12:.2f} T tokens"
    what = f"open {options.shards:,} prepared shards ({tokens}), checked, and read at sequence 10^9"
    yield what, f"{median(seconds[1:]) * 1e3:.0f} ms", "", "under a second"
    batches = _batches(_sequences(folder / "shards"), global_batch_size=1, mask=None)
    for batch in range(1000):
        batches.take(batch)
    before = _own_memory()
    for batch in range(1000, 1000 + options.batches):
        batches.take(batch)
    growth = _own_memory() - before
    batches.close()
    what = f"memory of the process over {options.batches:,} batches, without pages of mapped files"
    yield what, f"{growth / 2**20:+.1f} MiB", "", "no growth"


def _random_shards(folder: Path, tokens: int) -> None:
    """Write prepared shards of random tokens, with about one document per 800 tokens."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    size = min(tokens, 2**26)
    for number in range(tokens // size):
        values = generator.integers(1, 50_000, size, dtype=np.uint16)
        values[generator.integers(0, size, size // 800)] = END
        arrays = {TRAIN: values, VALIDATION: values[: 4 * LENGTH], DOCUMENTS: np.array([(size, 0, 1)], dtype=DOCUMENT)}
        for kind in ARRAYS:
            np.save(array_path(folder, number, kind), arrays[kind])
        last = number == tokens // size - 1
        shard = Shard(size, 4 * LENGTH, 1, 1, 0, 0, 0.0, 1.0, None, last, number=number)
        shard_path(folder, number).write_text(json.dumps(shard.stored))


def _resume(folder: Path, count: int) -> float:
    """Seconds from a recipe's data section to a batch far into a run. The shards are one file under many names."""
    shards = folder / "many"
    tokenizer = _tokenizer(folder, 300)
    section = DataConfig(source=str(shards), cache=str(folder / "cache"))
    if not shards.exists():
        _random_shards(shards, 2**26)
        for kind in ARRAYS:
            for number in range(1, count):
                os.link(array_path(shards, 0, kind), array_path(shards, number, kind))
        sums = {kind: xxhash.xxh3_64_hexdigest(np.load(array_path(shards, 0, kind)).data) for kind in ARRAYS}
        whole = replace(next(shards_from(shards, 0)), checksums=sums)
        entries = (*([replace(whole, last=False)] * (count - 1)), whole)
        share = section.validation_fraction
        index = Index(FORMAT_VERSION, "", "source", tokenizer.fingerprint, share, ("",), entries)
        (shards / INDEX).write_text(index.json())
        (shards / OWNER).write_text("the benchmark")
    started = perf_counter()
    data = _open(section, tokenizer)
    data.training.require(10**9, 16)
    cast(Sequences, data.training).rows(10**9, 16)
    seconds = perf_counter() - started
    data.training.close()
    return seconds


def _open(section: DataConfig, tokenizer: Tokenizer) -> Data:
    launch = Launch(run="benchmark", writes=True, log=lambda line: None)
    settings = DataSettings(section, BatchConfig(sequence_length=LENGTH), 0, lambda: tokenizer)
    return open_data(settings, launch, resumed_data_state={})


def _tokenizer(folder: Path, entries: int) -> Tokenizer:
    return load_tokenizer(
        f"train:{entries}", sources=["python-stdlib"], text_field="text", cache=folder / "cache", log=lambda line: None
    )


def _sequences(folder: Path) -> Sequences:
    return Sequences([Source("shards", Shards(folder), SequenceOrder(LENGTH, 0, None))], [1.0])


def _batches(sequences: Sequences, *, global_batch_size: int, mask: int | None) -> Batches:
    return Batches(
        sequences,
        global_batch_size=global_batch_size,
        micro_batch_size=1,
        data_rank=0,
        data_ranks=1,
        end_of_document=mask,
        device=torch.device("cpu"),
    )


def _own_memory() -> int:
    """Bytes of anonymous memory of this process, without mapped files."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def _corpus(folder: Path, copies: int) -> tuple[Path, list[str], Tokenizer]:
    """Copies of the standard library's sources, each slightly different, as one .jsonl file."""
    texts = list(readable_documents("python-stdlib", text_field="text"))
    texts = [f"# copy {copy}\n{text}" for copy in range(copies) for text in texts]
    file = folder / "corpus.jsonl"
    if not file.exists():
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file, texts, _tokenizer(folder, 32000)


def _tokenizing(folder: Path, options: argparse.Namespace) -> Cells:
    """Measure reading batches of a text file while it is tokenized, in turns with the tokenizer alone."""
    file, texts, tokenizer = _corpus(folder, options.copies)
    with parallel_tokenizers():
        tokens = sum(len(ids) + 1 for ids in tokenizer.encode_batch(texts))
    seconds: dict[str, list[float]] = {"ours": [], "tokenizers": []}
    for _ in range(options.repeats + 1):
        seconds["ours"].append(_stream(file, tokenizer, folder, tokens))
        started = perf_counter()
        with parallel_tokenizers():
            tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
        seconds["tokenizers"].append(perf_counter() - started)
    ours, theirs = (median(times[1:]) for times in seconds.values())
    what = "all of a .jsonl file tokenized and read in batches, against tokenizers alone on the same text"
    yield what, f"{tokens / ours / 1e6:.2f} M tokens/s", f"{theirs / ours:.2f}", "at least 0.9"


def _stream(file: Path, tokenizer: Tokenizer, folder: Path, tokens: int) -> float:
    cache = tempfile.mkdtemp(dir=folder)
    started = perf_counter()
    section = DataConfig(source=str(file), cache=cache, shuffle_tokens=2**22)
    data = _open(section, tokenizer)
    batches = _batches(cast(Sequences, data.training), global_batch_size=16, mask=None)
    for batch in range(int(tokens * (1 - section.validation_fraction)) // LENGTH // 16):
        batches.take(batch)
    seconds = perf_counter() - started
    batches.close()
    return seconds


def _preparing(folder: Path, options: argparse.Namespace) -> Cells:
    """Measure preparing shards of a text file, with all cores."""
    file, _, tokenizer = _corpus(folder, options.copies)
    seconds = []
    for _ in range(options.repeats + 1):
        with tempfile.TemporaryDirectory(dir=folder) as shards:
            started = perf_counter()
            work = preparation(str(file), text_field="text", tokenizer=tokenizer, validation_fraction=0.01)
            for _ in write_shards(Path(shards), work):
                pass
            seconds.append(perf_counter() - started)
    rate = file.stat().st_size / median(seconds[1:]) / 1e6
    yield f"preparing a .jsonl file with {os.cpu_count()} cores", f"{rate:.1f} MB/s", "", ""
