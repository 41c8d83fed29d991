"""What makes the tokens of a source, and the shards of it that are there already. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from recipes.data.text.sources import file_size, file_states, fingerprint, would_read
from recipes.data.text.tokenizer import BATCH_CHARACTERS, Tokenizer
from recipes.data.tokens.shards import (
    ARRAYS,
    INDEX,
    Shard,
    array_path,
    damage,
    read_index,
    read_shard,
    shard_path,
    tokens_fingerprint,
)
from recipes.data.tokens.workspace import remove_left

# Up to this size, shards are compared with their checksums at every start (a fraction of a second).
VERIFY_UP_TO_BYTES = 1_000_000_000
# Files in a folder of shards that a source would read as text.
TEXTS = ("owner.txt", "problem-of-a-run.txt", "00000-bad.jsonl", "quarantine.jsonl")


@dataclass(frozen=True)
class Pieces:
    """Where shards and batches end. All shards of one folder must use the same values."""

    smallest_shard: int = 2**22
    """Tokens in the first shard, so that training can start early; each further one has twice as many ..."""
    largest_shard: int = 2**26
    """... up to this, so that a trillion tokens fit in some thousand files."""
    shard_rows: int = 2**22
    """Rows that end a shard even if they hold hardly any text."""
    batch_characters: int = BATCH_CHARACTERS
    """Text passed to the tokenizer in one call ..."""
    batch_rows: int = 2**16
    """... or rows, if they hold hardly any."""

    def shard_tokens(self, number: int) -> int:
        """Tokens after which shard `number` ends, with the batch that reaches them."""
        return min(self.largest_shard, self.smallest_shard << min(number, 40))


USUAL = Pieces()


@dataclass(frozen=True)
class Preparation:
    """A source and how it becomes tokens. Equal fingerprints mean equal shards."""

    source: str
    text_field: str
    tokenizer: Tokenizer
    validation_fraction: float
    source_fingerprint: str
    states: dict[str, tuple[int, int]]
    """Size and modification time of each file, taken before the fingerprint; empty for a dataset on the hub, where the
    commit is fixed."""
    pieces: Pieces

    @property
    def fingerprint(self) -> str:
        """The name of the shards' folder in the cache."""
        return tokens_fingerprint(self.source_fingerprint, self.tokenizer.fingerprint, self.validation_fraction)


def preparation(
    source: str, *, text_field: str, tokenizer: Tokenizer, validation_fraction: float, pieces: Pieces = USUAL
) -> Preparation:
    """Take the fingerprint of a source's files. Raises UserError if something is wrong with them."""
    states = file_states(source)  # first: then a change while the contents are read is noticed when they are tokenized
    found = fingerprint(source, text_field=text_field)
    return Preparation(source, text_field, tokenizer, validation_fraction, found, states, pieces)


def would_read_itself(source: str, folder: Path) -> bool:
    """Whether the source would read shards in this folder as text."""
    return any(would_read(source, folder / name) for name in TEXTS)


def whole_shards(folder: Path, *, keep_unread: bool = True) -> list[Shard]:
    """The shards that are there without a gap. Damaged shards, and all after them, are removed and will be made again.

    keep_unread: also keep shards that lack an unreadable file, because a run was trained on them.
    """
    remove_left(folder)
    shards: list[Shard] = []
    size = 0
    while (shard := read_shard(folder, len(shards))) is not None:
        size += sum(file_size(array_path(folder, len(shards), kind)) for kind in ARRAYS)
        outdated = shard.unread and not keep_unread
        if outdated or (size <= VERIFY_UP_TO_BYTES and damage(folder, len(shards), shard)):
            (folder / INDEX).unlink(missing_ok=True)
            number = len(shards)
            while shard_path(folder, number).exists():
                shard_path(folder, number).unlink()
                number += 1
            break
        shards.append(shard)
        if shard.last:
            break
    if read_index(folder) is None or not (shards and shards[-1].last):
        (folder / INDEX).unlink(missing_ok=True)
    return shards
