"""The [data] and [batch] sections. Imports no torch."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval, MinLen

from parallel.config import MeshDegrees

PAIR_FIELDS = ("prompt_field", "answer_field", "messages_field")
ONLY_OF_PAIRS = ("prompt_prefix", "prompt_suffix", "chat_template", "chat_date", "long_pairs", "answer_length")
"""Settings that mean nothing without pairs."""
PAIR_OPTIONS = {
    "prompt_field": "name of the field with the prompt",
    "answer_field": "name of the field with the answer",
    "messages_field": "name of the field with the messages of a chat",
    "prompt_prefix": "text before every prompt, such as 'summarize: '",
    "prompt_suffix": "text after every prompt",
    "chat_template": "file with the Jinja template of messages, or chatml, llama3 or qwen3",
    "chat_date": "what the template takes for today",
    "long_pairs": "leave_out, cut_prompt_start or cut_prompt_end: those longer than --sequence-length",
}
"""Fields of [data] that scripts have as options, and what they mean."""
HELD_OUT = ""
"""The validation source that is the held-out documents of the training sources."""


@dataclass(frozen=True)
class DataConfig:
    """The text and how it is tokenized."""

    source: Annotated[str, MinLen(1)] = "python-stdlib"
    """"python-stdlib[/FOLDER]", file, folder, glob (.txt .jsonl .md ...), "hf:ID[:CONFIG[:SPLIT]]" or tokens."""
    mixture: dict[Annotated[str, MinLen(1)], Annotated[float, Gt(0)]] = field(default_factory=dict)
    """Several sources instead of `source`, each with its share of the tokens, such as {"web/*.parquet" = 0.7, ...}."""
    text_field: Annotated[str, MinLen(1)] = "text"
    """Name of the text field or column in .jsonl, .parquet and .csv files."""
    text_documents: Annotated[str, MinLen(1)] = "auto"
    """A document of a .txt file is a "file", "line", "blank_line", "pieces", "auto" (docs/data.md) or a separator."""
    tokenizer: Annotated[str, MinLen(1)] = "train:4096"
    """A tokenizer.json, a folder with one, "train:N" (N entries trained on the source), or "from_weights"."""
    bos: bool = False
    """Begin every document with the tokenizer's beginning-of-sequence token; needs a tokenizer that has one."""
    prompt_field: str = ""
    """Train on pairs instead of text: the field that holds the prompt. Only answers are learned (docs/data.md)."""
    answer_field: str = ""
    """The field that holds the answer to the prompt."""
    messages_field: str = ""
    """Instead of the two: the field with messages of a chat (role, content or from, value). Assistants' are learned."""
    prompt_prefix: str = ""
    """Text before every prompt, such as "summarize: "."""
    prompt_suffix: str = ""
    """Text between every prompt and its answer, such as a line feed."""
    chat_template: str = ""
    """File with the Jinja template of messages, "chatml", "llama3" or "qwen3"; "" = the one of the weights."""
    chat_date: str = ""
    """The date that a chat template writes as today's, such as "2026-01-31"; needed if it writes one."""
    long_pairs: Literal["leave_out", "cut_prompt_start", "cut_prompt_end"] = "leave_out"
    """What happens to pairs longer than batch.sequence_length: left out as bad rows, or their prompts are cut."""
    answer_length: Annotated[int, Ge(1)] = 128
    """Tokens of an answer for encoder-decoder models, at most; batch.sequence_length limits their prompts."""
    document_mask: bool = False
    """Restrict attention to each document and restart its positions at 0; false = treat a sequence as one document."""
    border_targets: bool = False
    """With document_mask: also learn the first token of a document from the end of the one before it (docs/data.md)."""
    validation_fraction: Annotated[float, Interval(ge=0, lt=1)] = 0.01
    """Fraction of the documents held out for validation, chosen by a hash of their text; 0 = none."""
    shuffle_tokens: Annotated[int, Ge(1)] = 2**25
    """Shuffle window (tokens) of the first epoch for text that is tokenized during training; otherwise all tokens."""
    bad_row_budget: Annotated[float, Interval(ge=0, le=1)] = 0.01
    """Fraction of a source's rows that may be invalid or empty; more stop the run. quarantine.jsonl lists them."""
    cache: Annotated[str, MinLen(1)] = "~/.cache/shardwright"
    """Folder for trained tokenizers and tokenized text, keyed by content; all nodes must share it."""

    @property
    def shares_note(self) -> str:
        """What is said of shares that do not add up to 1; "" = they do."""
        if not self.mixture or abs((total := sum(self.mixture.values())) - 1) < 0.005:
            return ""
        shares = ", ".join(f"{source!r} {share / total:.1%}" for source, share in [*self.mixture.items()][:5])
        return f"data.mixture adds up to {total:g}, not 1: of the tokens, {shares}"

    @property
    def sources(self) -> dict[str, float]:
        """Every source with its share of the tokens."""
        return self.mixture or {self.source: 1.0}

    @property
    def has_pairs(self) -> bool:
        """Whether rows are pairs of prompt and answer, or messages; also true with settings that only pairs have."""
        return any(getattr(self, name) != getattr(DataConfig, name) for name in (*PAIR_FIELDS, *ONLY_OF_PAIRS))


@dataclass(frozen=True)
class BatchConfig:
    """Sequence length and batch sizes."""

    sequence_length: Annotated[int, Ge(1)] = 2048
    """Tokens per sequence."""
    global_batch_size: Annotated[int, Ge(1)] = 16
    """Sequences per optimizer step over all processes; gradient accumulation makes up the difference."""
    micro_batch_size: Annotated[int, Ge(1)] = 1
    """Sequences per process in one forward and backward pass; with context or tensor, per group that shares them."""
    loss_chunks: Annotated[int, Ge(1)] = 1
    """Compute the loss in this many chunks of tokens, to hold the float32 logits of only one (compiled, of none)."""

    def micro_batches(self, degrees: MeshDegrees) -> int:
        """Micro-batches of a step, on each process."""
        return self.global_batch_size // (degrees.data_parallel * self.micro_batch_size)

    def divided(self, degrees: MeshDegrees) -> str:
        """How a global batch is divided, as in "2 x 4 micro-batches of 1, each shared by 8 processes"."""
        shares, inner = degrees.data_parallel, degrees.processes // degrees.data_parallel
        shared = f", each shared by {inner} processes" if inner > 1 else ""
        return f"{shares} x {self.micro_batches(degrees)} micro-batches of {self.micro_batch_size}{shared}"
