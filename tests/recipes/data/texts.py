"""Small sources for the tests of data, and their shards."""

import json
from pathlib import Path

import numpy as np

from recipes.data.text.tokenizer import Tokenizer, load_tokenizer
from recipes.data.tokens.prepare import write_shards
from recipes.data.tokens.shards import Shard, array_path
from recipes.data.tokens.workspace import Pieces, Preparation, preparation

END = "<|endoftext|>"
# So small that a few hundred documents fill several shards.
SMALL = Pieces(smallest_shard=1000, largest_shard=4000, batch_characters=900)


def write_rows(path: Path, count: int, start: int = 0, *, name: str = "Document") -> list[str]:
    """Write a .jsonl file of `count` different texts. Returns the texts."""
    texts = [
        f"{name} number {number} says {number * 7919 % 1000} words, " + "and so on. " * (number % 5)
        for number in range(start, start + count)
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def tokenizer_for(*sources: Path, entries: int = 300) -> Tokenizer:
    return load_tokenizer(
        f"train:{entries}",
        sources=[str(source) for source in sources],
        text_field="text",
        cache=sources[0].parent / "cache",
        log=lambda line: None,
    )


def work_on(
    source: Path, *, fraction: float = 0.2, tokenizer: Tokenizer | None = None, pieces: Pieces = SMALL
) -> Preparation:
    return preparation(
        str(source),
        text_field="text",
        tokenizer=tokenizer or tokenizer_for(source),
        validation_fraction=fraction,
        pieces=pieces,
    )


def shards_in(folder: Path, work: Preparation) -> list[Shard]:
    return list(write_shards(folder, work))


def texts_of(folder: Path, work: Preparation, kind: str, shards: int) -> list[str]:
    """The documents of all shards, in order."""
    tokens = np.concatenate([np.load(array_path(folder, number, kind)) for number in range(shards)])
    text = work.tokenizer.decode(tokens.tolist())
    return text.removesuffix(END).split(END) if text else []


def contents(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of every file."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
