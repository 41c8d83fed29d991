"""The tokenizer that a recipe names: loaded, or trained on its own text and kept. Imports no torch."""

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from parallel.errors import UserError
from recipes.data.text.sources import document_hash, file_state, file_states, fingerprint, require_unchanged
from recipes.data.text.tokenizer import (
    END_OF_DOCUMENT,
    Tokenizer,
    build_tokenizer,
    parallel_tokenizers,
    read_tokenizer,
    tokenizer_file,
    training_size,
)
from recipes.files.atomic import write_whole
from recipes.files.reading import user_path

if TYPE_CHECKING:
    from recipes.data.text.pair_format import PairFields

# Llama 3's split: words with the preceding space, numbers of up to three digits, runs of symbols, newlines, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

# Training takes about a second per 10 MB, and more text than this barely changes the entries.
TRAINING_CHARACTERS = 64_000_000
# Part of the cache key: raise it when the same text starts to give a different tokenizer.
TRAINER_VERSION = 1


def load_tokenizer(
    spec: str,
    *,
    sources: Sequence[str],
    text_field: "PairFields",
    text_documents: str = "auto",
    cache: Path,
    log: Callable[[str], None],
) -> Tokenizer:
    """The tokenizer of a recipe. "train:N" trains on the sources, or takes the result for equal text from the cache.
    Raises UserError if the tokenizer or a source is bad, or the cache cannot be written.

    Args:
        spec: data.tokenizer.
        sources, text_field, text_documents: what to train on.
        cache: folder for trained tokenizers.
        log: receives one line of text per message.
    """
    if (size := training_size(spec)) is None:
        path = tokenizer_file(spec)
        return build_tokenizer(read_tokenizer(path), where=path)
    states = {file: state for source in sources for file, state in file_states(source).items()}
    fingerprints = [fingerprint(source, text_field=text_field, text_documents=text_documents) for source in sources]
    identity = repr((TRAINER_VERSION, size, *fingerprints))
    cached = user_path(cache) / "tokenizers" / f"{xxhash.xxh3_128_hexdigest(identity.encode())}.json"
    try:
        return build_tokenizer(read_tokenizer(cached), where=cached)
    except UserError:  # missing or damaged
        pass
    from recipes.data.text.rows import readable_documents

    started = time.perf_counter()
    texts = training_sample(
        text
        for source in sources
        for text in readable_documents(source, text_field=text_field, text_documents=text_documents)
    )
    require_unchanged(list(states), states)
    if gone := [file for file in states if file_state(file) is None]:
        raise UserError(f"data.source: '{gone[0]}' disappeared while it was read; start again")
    trained = _train(texts, size=size)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_whole(cached, trained)
    except OSError as error:
        raise UserError(f"data.cache: cannot write '{cached}': {error}; give another folder") from error
    megabytes = sum(map(len, texts)) / 1e6
    log(f"trained a tokenizer of {size} entries on {megabytes:.1f} MB in {time.perf_counter() - started:.1f} s")
    return build_tokenizer(trained, where=cached)


def training_sample(documents: Iterable[str], characters: int = TRAINING_CHARACTERS) -> list[str]:
    """The documents with the largest hashes, up to a total of `characters`, in one pass and bounded memory. The sample
    does not depend on their order, and has no held-out text of a large corpus: that has the smallest hashes."""
    kept: list[tuple[int, str]] = []  # a heap with the smallest hash on top
    size = 0
    for text in documents:
        heapq.heappush(kept, (document_hash(text), text))
        size += len(text)
        while size > characters and len(kept) > 1:
            size -= len(heapq.heappop(kept)[1])
    return [text for _, text in sorted(kept)]


def _train(texts: Sequence[str], *, size: int) -> str:
    """The JSON of a byte-level BPE tokenizer, which can encode any text and decodes it unchanged."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as LibraryTokenizer

    tokenizer = LibraryTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with parallel_tokenizers():
        tokenizer.train_from_iterator(texts, trainer=trainer, length=len(texts))
    return tokenizer.to_str()
