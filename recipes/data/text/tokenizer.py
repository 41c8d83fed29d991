"""The tokenizer that data.tokenizer names: a tokenizer.json, or one trained on the corpus and kept in the cache.

Imports no torch.
"""

import heapq
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import xxhash

from parallel.errors import TemporaryError, UserError
from recipes.data.text.sources import document_hash, file_state, file_states, fingerprint, require_unchanged
from recipes.data.text.tokens_beside import CERTAIN_ENDS, ENDS, OTHER_ENDS, vocabulary_of, with_tokens_beside
from recipes.files.atomic import write_whole
from recipes.files.border import foreign
from recipes.files.layout import TOKENIZER
from recipes.files.reading import cache_fault, checksum_of, is_remote, read_patiently, read_text, user_path, whole_text

if TYPE_CHECKING:
    import tokenizers

    from recipes.data.text.row import Fields

END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCABULARY = 256 + 1  # every byte, and the end-of-document token

# Llama 3's split: words with the preceding space, numbers of up to three digits, runs of symbols, newlines, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

# Training takes about a second per 10 MB, and more text than this barely changes the entries.
TRAINING_CHARACTERS = 64_000_000
# Part of the cache key: raise it when the same text starts to give a different tokenizer.
TRAINER_VERSION = 1

CANNOT_ENCODE = "data.tokenizer: the tokenizers library cannot encode a text"
ENCODE_ANY = "give a tokenizer that encodes any text: a byte-level one, or one with a token for unknown words"

# Text tokenized in one call: enough to keep all cores busy, little enough to hold as lists of ids.
BATCH_CHARACTERS = 2_000_000

Item = TypeVar("Item")


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back. Special tokens spelled out in a text are ordinary text."""

    vocabulary: int
    """Largest id + 1."""
    end_of_document: int
    """Id of the token that ends each document."""
    fingerprint: str
    """Depends only on the tokenizer's contents."""
    json: str
    """The tokenizer.json it came from."""
    backend: "tokenizers.Tokenizer"
    beginning: int | None = None
    """Id of the token that begins each document; None = none does."""
    needed_rows: int = 0
    """Rows of an embedding that has one for every token but added ones, which need not occur in a text."""
    rows: int | None = None
    """Rows of the embedding of the model that reads the tokens, if it is known."""

    def ids(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of a text, with those that the tokenizer adds if they are `special`. Raises ForeignError."""
        with foreign(CANNOT_ENCODE, ENCODE_ANY):
            return list(self.backend.encode(text, add_special_tokens=special).ids)

    def encode_batch(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Encode several texts at once, on all cores inside parallel_tokenizers(). Yields the lists one by one. Raises
        ForeignError, which does not say for which text, at once."""
        with foreign(CANNOT_ENCODE, ENCODE_ANY):
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return (self._begun(encoding.ids) for encoding in encodings)

    def decode(self, ids: Iterable[int]) -> str:
        with foreign("data.tokenizer: the tokenizers library cannot decode tokens", "give another tokenizer"):
            return self.backend.decode(list(ids), skip_special_tokens=False)

    def with_rows(self, rows: int) -> "Tokenizer":
        """The tokenizer of a model with so many rows. Raises UserError for fewer than every text needs."""
        if (needed := max(self.needed_rows, (self.beginning or 0) + 1)) > rows:
            raise UserError(
                f"data.tokenizer has {needed} entries, more than model.vocabulary = {rows}"
                f"; write model.vocabulary = {needed} or another tokenizer"
            )
        return replace(self, rows=rows)

    def require_rows(self, ids: Sequence[int]) -> None:
        """Raises UserError if the model has no row for one of these tokens."""
        if self.rows is None or not ids or (largest := max(ids)) < self.rows:
            return
        raise UserError(
            f"the text holds token {largest}, {self.backend.id_to_token(largest)!r}, but the model has {self.rows} rows"
            " in its embedding: take it out of the text, or give a model with a larger vocabulary"
        )

    def _begun(self, ids: list[int]) -> list[int]:
        if self.rows is not None and self.rows < self.vocabulary:
            self.require_rows(ids)
        return ids if self.beginning is None else [self.beginning, *ids]


def tokenizer_problem(spec: str, vocabulary: int) -> str | None:
    """What is wrong with data.tokenizer for a model of this vocabulary and what to write instead, or None. Trains
    nothing and does not import tokenizers: reads a tokenizer.json as plain JSON."""
    try:
        if (size := training_size(spec)) is None:
            path = tokenizer_file(spec)
            needed = _read_ids(read_tokenizer(path), where=path).largest_needed
            if needed >= vocabulary:
                return (
                    f"'{path}' has ids up to {needed}, but model.vocabulary is {vocabulary}; raise model.vocabulary "
                    f"to {needed + 1} or more, or give a smaller tokenizer"
                )
        elif size > vocabulary:
            return (
                f"{spec!r} produces ids up to {size - 1}, but model.vocabulary is {vocabulary}; write "
                f"'train:{vocabulary}' or less, or raise model.vocabulary to {size} or more"
            )
    except TemporaryError:
        raise
    except UserError as error:
        return str(error).removeprefix("data.tokenizer: ")
    return None


def batches_of(
    items: Iterable[Item], *, size: Callable[[Item], int], characters: int = BATCH_CHARACTERS, most: int = 0
) -> Iterator[list[Item]]:
    """Lists of at least so many characters, or of `most` items, each worth a call of the tokenizer. size: characters
    of an item."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= characters or len(batch) == most:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


@contextmanager
def parallel_tokenizers() -> Iterator[None]:
    """Let the tokenizers library use all cores inside (RAYON_NUM_THREADS limits them), and no threads afterwards. It
    reads the variable at each call. If unset, it prints a warning at every later fork (data workers, compile workers);
    if left at "true", a forked child that tokenizes waits forever for threads it does not have."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


def training_size(spec: str) -> int | None:
    """How many entries to train; None if the spec names a file or folder."""
    if not spec.startswith("train:"):
        return None
    number = spec.removeprefix("train:")
    if not re.fullmatch(r"[0-9]+", number):
        raise UserError(f"data.tokenizer: {spec!r}: write a whole number of entries after 'train:', as in 'train:4096'")
    if int(number) < SMALLEST_VOCABULARY:
        raise UserError(
            f"data.tokenizer: {spec!r} is too small: 256 bytes and {END_OF_DOCUMENT} make {SMALLEST_VOCABULARY}; "
            f"write 'train:{SMALLEST_VOCABULARY}' or more"
        )
    return int(number)


def tokenizer_file(spec: str) -> Path:
    if is_remote(spec):
        from recipes.files.local_copy import local_copy

        copy = local_copy(spec, only=("*.json",))
        path = copy / spec.rpartition("/")[2] if spec.endswith(".json") else copy
    else:
        path = user_path(spec)
    if path.is_dir():
        file = path / TOKENIZER
        if not file.is_file():
            raise UserError(
                f"data.tokenizer: the folder {spec!r} has no tokenizer.json; give one that has, or 'train:N'"
            )
        return file
    if not path.exists():
        from recipes.data.text.hub import download_hint

        if hint := download_hint(spec, "tokenizer.json"):
            raise UserError(f"data.tokenizer: {spec!r} does not exist{hint}")
        raise UserError(
            f"data.tokenizer: {spec!r} does not exist; write the path of a tokenizer.json, of a folder that holds one, "
            f"or 'train:4096' to train one on the source"
        )
    return path


def read_tokenizer(path: Path) -> str:
    """The text of a tokenizer.json, with the tokens that transformers reads beside it. Raises UserError."""
    try:
        text = read_patiently(lambda: whole_text(path), what=f"data.tokenizer: '{path}'")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.tokenizer: cannot read '{path}': {error}") from error
    return with_tokens_beside(text, path)


class Ids(NamedTuple):
    """What a tokenizer.json says of token ids."""

    largest: int
    largest_needed: int
    """The largest of those that every model needs: added tokens need not occur in a text."""
    end_of_document: int


def _read_ids(text: str, *, where: Path, ends: Sequence[int] = ()) -> Ids:
    """The ids in a tokenizer.json, read as JSON. Documents end with the first of `ends` that is an added token, or else
    with the one that is marked, or else the first of CERTAIN_ENDS and OTHER_ENDS that is any token."""
    wrong = f"data.tokenizer: '{where}' is not a tokenizer.json as Hugging Face tokenizers writes it"
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{wrong}: {error}") from error
    try:
        ids = vocabulary_of(content)
        added_ids = {added["content"]: added["id"] for added in content.get("added_tokens") or ()}
        tokens = {number: token for token, number in ids.items()}
        words = [number for number, token in tokens.items() if token not in added_ids]
        largest = max((ids | added_ids).values())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{wrong}: no entries under 'model.vocab'") from error
    if len(tokens) < len(ids):
        both, number = next(([one, tokens[number]], number) for one, number in ids.items() if tokens[number] != one)
        raise UserError(f"data.tokenizer: '{where}' gives {both} the same id, {number}; give another tokenizer")
    # The id of an ordinary word is a mistake, such as a model family's default.
    given = [end for end in ends if end in added_ids.values()]
    given += [added["id"] for added in content.get("added_tokens") or () if added.get(ENDS)]
    ids |= added_ids
    given += [ids[name] for name in (*CERTAIN_ENDS, *OTHER_ENDS) if name in ids]
    if not given:
        raise UserError(
            f"data.tokenizer: '{where}' has no token that ends a document; looked for"
            f" {', '.join((*CERTAIN_ENDS, *OTHER_ENDS))}; add one of them, or give another tokenizer"
        )
    return Ids(largest, max([*words, given[0]]), given[0])


def build_tokenizer(text: str, *, where: Path, ends: Sequence[int] = ()) -> Tokenizer:
    """The tokenizer of a tokenizer.json with this text. Raises UserError, naming `where` the text is from. ends: ids
    that the model's config gives for the end of a document, best first."""
    ids = _read_ids(text, where=where, ends=ends)
    text = _with_special(text, ids.end_of_document)
    with foreign(f"data.tokenizer: the tokenizers library rejects '{where}'"):
        library = text_library(text)
    return Tokenizer(
        vocabulary=ids.largest + 1,
        needed_rows=ids.largest_needed + 1,
        end_of_document=ids.end_of_document,
        fingerprint=xxhash.xxh3_128_hexdigest(text.encode()),
        json=text,
        backend=library,
    )


def text_library(text: str, *, spelled_out: bool = False) -> "tokenizers.Tokenizer":
    """The library's tokenizer of a tokenizer.json, for all text of training, generation and evaluation: nothing in the
    file cuts it, pads it or makes chance decide. spelled_out: special tokens that a text spells out are these tokens,
    as in pairs and chats; otherwise it does not end its document, unless the model has that token as an ordinary
    word."""
    import tokenizers

    library = tokenizers.Tokenizer.from_str(text)
    library.no_truncation()
    library.no_padding()
    if isinstance(library.model, tokenizers.models.BPE):
        library.model.dropout = None
    library.encode_special_tokens = not spelled_out
    return library


def _with_special(text: str, number: int) -> str:
    """The tokenizer.json with this id special if it is an added token: plain added tokens are matched in text."""
    content = json.loads(text)
    plain = [added for added in content.get("added_tokens") or () if added["id"] == number and not added.get("special")]
    for added in plain:
        added["special"] = True
    return json.dumps(content, ensure_ascii=False) if plain else text


def load_tokenizer(
    spec: str,
    *,
    sources: Sequence[str],
    text_field: "Fields",
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
    identity = xxhash.xxh3_128_hexdigest(repr((TRAINER_VERSION, size, *fingerprints)).encode())
    cached = user_path(cache) / "tokenizers" / f"{identity}.json"
    checksum = cached.with_suffix(".xxh3")  # older versions wrote none
    try:
        if not checksum.exists() or read_text(checksum) == checksum_of(cached):
            return build_tokenizer(read_tokenizer(cached), where=cached)
        log(f"{cached} is not as it was written; the tokenizer is trained again")
    except (UserError, OSError):  # missing or damaged
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
    trained = _train(texts, size=size, markers=[] if isinstance(text_field, str) else text_field.tokens)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_whole(cached, trained)
        write_whole(checksum, xxhash.xxh3_128_hexdigest(trained.encode()))
    except OSError as error:
        raise cache_fault(cached.parent, error) from error
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


def _train(texts: Sequence[str], *, size: int, markers: Sequence[str]) -> str:
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
        special_tokens=[END_OF_DOCUMENT, *markers],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with parallel_tokenizers(), foreign("data.tokenizer: the tokenizers library cannot train on the source"):
        tokenizer.train_from_iterator(texts, trainer=trainer, length=len(texts))
    return tokenizer.to_str()
