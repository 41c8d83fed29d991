"""Benchmark reading, tokenizing and preparing text against the libraries alone: `bench.py --suite data`. CPU only.

Every comparison alternates its sides within one run, or in child processes where cores are limited, and reports
medians, because machines are noisy.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

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
)
from recipes.data.tokens.workspace import preparation

LENGTH = 8192
"""Tokens per sequence."""
END = 0
ROOT = Path(__file__).resolve().parents[3]


def main(arguments: list[str]) -> int:
    """Print a Markdown table, and write every measurement as JSON to --out. Returns the exit code."""
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.py --suite data", description=__doc__, formatter_class=defaults)
    parser.add_argument("--tokens", type=int, default=2**27, help="tokens in the prepared shards to read")
    parser.add_argument("--copies", type=int, default=12, help="copies of the standard library's text to tokenize")
    parser.add_argument("--shards", type=int, default=15_000, help="shards to open when resuming far into a run")
    parser.add_argument("--batches", type=int, default=100_000, help="batches over which memory must not grow")
    parser.add_argument("--repeats", type=int, default=3, help="measurements after one warm-up")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where to create a temporary folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=("reading", "tokenizing", "preparing"), nargs="+")
    options = parser.parse_args(arguments)
    parts = {"reading": _reading, "tokenizing": _tokenizing, "preparing": _preparing}
    rows: list[dict[str, Any]] = []
    print("| what | median | ratio | target |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name in options.only or parts:
            for row in parts[name](Path(folder), options):
                rows.append(row)
                ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
                print(f"| {row['what']} | {row['median']} | {ratio} | {row.get('target', '')} |", flush=True)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "tokenizers", "datasets", "numpy"))
    print(f"\n{os.cpu_count()} cores, Python {platform.python_version()}, {packages}")
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))
    return 0


def _reading(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
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
        rate = median(rates[1:])
        yield {
            "what": f"prepared shards to batches of 16 x {LENGTH}, shuffled{what}",
            "median": f"{rate:.0f} M tokens/s per process",
            "target": f"at least {target} M",
            "all": rates,
        }
    seconds = [_resume(folder, options.shards) for _ in range(options.repeats + 1)]
    yield {
        "what": f"open {options.shards:,} prepared shards ({options.shards * 2**26 / 1e12:.2f} T tokens), checked, "
        "and read at sequence 10^9",
        "median": f"{median(seconds[1:]) * 1e3:.0f} ms",
        "target": "under a second",
        "all": seconds,
    }
    batches = _batches(_sequences(folder / "shards"), global_batch_size=1, mask=None)
    for batch in range(1000):
        batches.take(batch)
    before = _own_memory()
    for batch in range(1000, 1000 + options.batches):
        batches.take(batch)
    growth = _own_memory() - before
    batches.close()
    yield {
        "what": f"memory of the process over {options.batches:,} batches, without pages of mapped files",
        "median": f"{growth / 2**20:+.1f} MiB",
        "target": "no growth",
        "all": [growth],
    }


def _random_shards(folder: Path, tokens: int) -> None:
    """Write prepared shards of random tokens, with about one document per 800 tokens."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    size = min(tokens, 2**26)
    for number in range(tokens // size):
        values = generator.integers(1, 50_000, size, dtype=np.uint16)
        values[generator.integers(0, size, size // 800)] = END
        arrays = {TRAIN: values, VALIDATION: values[:0], DOCUMENTS: np.zeros(0, dtype=DOCUMENT)}
        for kind in ARRAYS:
            np.save(array_path(folder, number, kind), arrays[kind])
        last = number == tokens // size - 1
        shard = Shard(size, 0, 0, 0, 0, 0, 0.0, 1.0, None, last)
        shard_path(folder, number).write_text(json.dumps(shard.__dict__))


def _resume(folder: Path, count: int) -> float:
    """Seconds from a recipe's data section to a batch far into a run. The shards are one file under many names."""
    shards = folder / "many"
    tokenizer = _tokenizer(folder, 300)
    section = DataConfig(source=str(shards), cache=str(folder / "cache"))
    if not shards.exists():
        shards.mkdir()
        generator = np.random.default_rng(0)
        documents = np.array([(2**26, 0, 1)], dtype=DOCUMENT)
        arrays = {TRAIN: generator.integers(1, 300, 2**26, dtype=np.uint16), DOCUMENTS: documents}
        arrays[VALIDATION] = arrays[TRAIN][: 4 * LENGTH]
        for kind in ARRAYS:
            np.save(array_path(shards, 0, kind), arrays[kind])
            for number in range(1, count):
                os.link(array_path(shards, 0, kind), array_path(shards, number, kind))
        sums = {kind: xxhash.xxh3_64_hexdigest(arrays[kind].data) for kind in ARRAYS}
        whole = Shard(2**26, 4 * LENGTH, 1, 1, 0, 0, 0.0, 1.0, None, last=False, checksums=sums)
        found = (*([whole] * (count - 1)), replace(whole, last=True))
        share = section.validation_fraction
        index = Index(FORMAT_VERSION, "", "source", tokenizer.fingerprint, share, ("",), found)
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


PIPELINES = {
    "plain": "every default: a row at a time",
    "batched": "batched=True",
    "all cores": "batched=True, num_proc and num_workers = all cores",
}
"""The arguments of datasets.map and a torch DataLoader."""


def _tokenizing(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure reading batches of a text file while it is tokenized, against the tokenizer alone and a plain loader."""
    file, texts, tokenizer = _corpus(folder, options.copies)
    with parallel_tokenizers():
        tokens = sum(len(ids) + 1 for ids in tokenizer.encode_batch(texts))
    sides = {
        "ours": partial(_stream, file, tokenizer, folder, tokens),
        "tokenizers": partial(_tokenizers_alone, texts, tokenizer),
    } | {name: partial(_in_child, name, file, folder) for name in PIPELINES}
    seconds = _alternate(sides, options.repeats)
    ours = median(seconds["ours"])
    yield {
        "what": "all of a .jsonl file tokenized and read in batches, against tokenizers alone on the same text",
        "median": f"{tokens / ours / 1e6:.2f} M tokens/s",
        "ratio": median(seconds["tokenizers"]) / ours,
        "target": "at least 0.9",
        "all": seconds,
    }
    for name, how in PIPELINES.items():
        yield {
            "what": f"the same against datasets.map and a DataLoader, {how}",
            "median": f"{tokens / median(seconds[name]) / 1e6:.2f} M tokens/s theirs",
            "ratio": median(seconds[name]) / ours,
            "target": "at least 2",
        }


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


def _tokenizers_alone(texts: list[str], tokenizer: Tokenizer) -> float:
    started = perf_counter()
    with parallel_tokenizers():
        tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
    return perf_counter() - started


def _preparing(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure preparing shards of a text file, on one core and on all, against datasets.map writing Arrow."""
    file, _, _ = _corpus(folder, options.copies)
    sides = {
        "one core": partial(_in_child, "prepare", file, folder, cores=1),
        "all cores": partial(_in_child, "prepare", file, folder),
        "datasets.map": partial(_in_child, "map", file, folder),
    }
    seconds = _alternate(sides, options.repeats)
    ours = median(seconds["all cores"])
    yield {
        "what": f"preparing a .jsonl file with {os.cpu_count()} cores, against one core",
        "median": f"{file.stat().st_size / ours / 1e6:.1f} MB/s",
        "ratio": median(seconds["one core"]) / ours,
        "target": f"near {os.cpu_count()}",
        "all": seconds,
    }
    yield {
        "what": "the same against datasets.map(batched, num_proc=all) writing Arrow",
        "median": f"{file.stat().st_size / median(seconds['datasets.map']) / 1e6:.1f} MB/s theirs",
        "ratio": median(seconds["datasets.map"]) / ours,
        "target": "more than 1",
    }


def _alternate(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each side, measured in turns after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            taken = side()
            if repeat:
                seconds[name].append(taken)
    return seconds


# A fresh process per measurement: the libraries start processes and threads, and the number of cores is limited.
CHILD = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[4])
what, file, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
from recipes.lab.bench import data as bench_data
if __name__ == "__main__":
    print("seconds", bench_data.child(what, file, folder))
"""


def _in_child(what: str, file: Path, folder: Path, *, cores: int | None = None) -> float:
    environment = dict(os.environ)
    if cores:
        environment["RAYON_NUM_THREADS"] = str(cores)
    command = [sys.executable, "-c", CHILD, what, str(file), str(folder), str(ROOT)]
    if cores:
        command = ["taskset", "--cpu-list", f"0-{cores - 1}", *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.rsplit("seconds", 1)[1])


def child(what: str, file: Path, folder: Path) -> float:
    """Seconds of one side of a comparison, without imports: "prepare", "map", or one of PIPELINES."""
    tokenizer = _tokenizer(folder, 32000)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        if what == "prepare":
            started = perf_counter()
            work = preparation(str(file), text_field="text", tokenizer=tokenizer, validation_fraction=0.01)
            for _ in write_shards(Path(own), work):
                pass
            return perf_counter() - started
        import datasets

        datasets.disable_progress_bars()
        backend, end = tokenizer.backend, tokenizer.end_of_document
        cores = None if what in ("plain", "batched") else os.cpu_count() or 1
        started = perf_counter()
        rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=own)

        def tokenized_row(row: dict[str, str]) -> dict[str, list[int]]:
            return {"ids": [*backend.encode(row["text"]).ids, end]}

        def tokenized(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            with parallel_tokenizers() if cores is None else nullcontext():
                return {"ids": [[*found.ids, end] for found in backend.encode_batch_fast(batch["text"])]}

        def packed(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
            joined = [token for ids in batch["ids"] for token in ids]
            return {"ids": [joined[first : first + LENGTH] for first in range(0, len(joined) - LENGTH, LENGTH)]}

        if what == "plain":
            mapped = rows.map(tokenized_row, remove_columns=["text"])
        else:
            mapped = rows.map(tokenized, batched=True, num_proc=cores, remove_columns=["text"])
        if what != "map":
            mapped = mapped.map(packed, batched=True, num_proc=cores).shuffle(seed=0).with_format("torch")
            loader = torch.utils.data.DataLoader(mapped, batch_size=16, num_workers=cores or 0)
            for batch in loader:
                assert batch["ids"].shape[1] == LENGTH
        return perf_counter() - started
