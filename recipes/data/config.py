"""The [data] and [batch] sections of a recipe. Imports no torch."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, Interval, MinLen


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes tokens."""

    source: Annotated[str, MinLen(1)] = "python-stdlib"
    """"python-stdlib", a file, folder or glob (.txt .jsonl .parquet), "hf:ID[:CONFIG[:SPLIT]]", or prepared shards."""
    mixture: dict[Annotated[str, MinLen(1)], Annotated[float, Gt(0)]] = field(default_factory=dict)
    """Several sources instead of `source`, each with its share of the tokens, as in {"web/*.parquet" = 0.7, ...}."""
    text_field: Annotated[str, MinLen(1)] = "text"
    """Field or column that holds the text in .jsonl and .parquet files."""
    tokenizer: Annotated[str, MinLen(1)] = "train:4096"
    """A tokenizer.json, a folder with one, "train:N" (N entries trained on the source), or "from_weights"."""
    document_mask: bool = False
    """Keep attention inside each document and restart positions there; false = a sequence is one document."""
    validation_fraction: Annotated[float, Interval(gt=0, lt=1)] = 0.01
    """Share of the documents held out for validation, chosen by a hash of the document."""
    shuffle_tokens: Annotated[int, Ge(1)] = 2**25
    """Tokens shuffled together in the first epoch of text tokenized during training; other epochs shuffle them all."""
    bad_row_budget: Annotated[float, Interval(ge=0, le=1)] = 0.01
    """Largest share of a source's rows that may be bad before the run stops; quarantine.jsonl lists the bad rows."""
    cache: Annotated[str, MinLen(1)] = "~/.cache/shardwright"
    """Folder for trained tokenizers and tokenized text, keyed by content; all nodes must share it."""

    @property
    def sources(self) -> dict[str, float]:
        """Every source with its share of the tokens."""
        return self.mixture or {self.source: 1.0}


@dataclass(frozen=True)
class BatchConfig:
    """How many sequences make one optimizer step."""

    sequence_length: Annotated[int, Ge(1)] = 2048
    """Tokens per sequence."""
    global_batch_size: Annotated[int, Ge(1)] = 16
    """Sequences per optimizer step over all processes; gradient accumulation makes up the difference."""
    micro_batch_size: Annotated[int, Ge(1)] = 1
    """Sequences per process in one forward and backward pass."""
    loss_chunks: Annotated[int, Ge(1)] = 1
    """Chunks in which the loss of a micro-batch is computed; the float32 logits of only one exist at a time."""
