"""What a recipe says of its data and of its batches. Imports no torch."""

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
    """Attention stays inside a document and positions start anew in each; false = all tokens of a sequence are one."""
    validation_fraction: Annotated[float, Interval(gt=0, lt=1)] = 0.01
    """Share of the documents held out for validation, chosen by a hash of the document."""
    shuffle_tokens: Annotated[int, Ge(1)] = 2**25
    """Tokens shuffled together in the first epoch of text that is tokenized during training; else all of them are."""
    bad_row_budget: Annotated[float, Interval(ge=0, le=1)] = 0.01
    """Share of a source's rows that may be broken or without text; more stop the run. quarantine.jsonl lists them."""
    cache: Annotated[str, MinLen(1)] = "~/.cache/shardwright"
    """Folder for trained tokenizers and tokenized text, keyed by content; must be shared by all nodes."""

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
    """Sequences per optimizer step over all processes; what is missing comes from gradient accumulation."""
    micro_batch_size: Annotated[int, Ge(1)] = 1
    """Sequences per process in one forward and backward pass."""
    loss_chunks: Annotated[int, Ge(1)] = 1
    """Take a micro-batch's loss in so many runs of tokens: float32 logits of one exist at a time; 1 = all at once."""
