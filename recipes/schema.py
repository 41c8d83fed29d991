"""Everything a recipe can say, with types, ranges and defaults. Imports no torch.

A field's type (with its annotated_types range) is what recipes/load.py enforces; the string below it is what --help
and docs/recipes.md print.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval, MinLen

from models.config import ModelConfig
from models.sizes import SIZES
from parallel.config import (
    ActivationCheckpointingConfig,
    AttentionConfig,
    CompileConfig,
    Float8Config,
    FSDPConfig,
    MeshConfig,
)


@dataclass(frozen=True)
class RunConfig:
    """What the run is called, where it goes and how long it is."""

    name: Annotated[str, MinLen(1)] = "unnamed"
    """Name of the run; its files go to `output`/`name`."""
    output: Annotated[str, MinLen(1)] = "runs"
    """Folder of all runs; a relative path starts at the current folder."""
    steps: Annotated[int, Ge(1)] = 100
    """Optimizer steps in all. Raise it to extend a finished run."""
    seed: Annotated[int, Interval(ge=0, lt=2**32)] = 0
    """Seed of the initial weights and of the data order."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" = the GPUs where there are any, else the CPU."""
    max_skipped_steps: Annotated[int, Ge(1)] = 10
    """A step whose loss or gradient norm is not finite changes nothing; so many in a row stop the run."""
    loss_spike_z: Annotated[float, Ge(0)] = 0.0
    """Skip steps whose loss is so many standard deviations above the mean of the last 64 that counted; 0 = off."""
    hang_timeout: Annotated[float, Interval(ge=0, le=86400)] = 600.0
    """Seconds without progress that end the run; 0 = off. Start-up, first step, validation and saves have more time."""

    @property
    def folder(self) -> Path:
        """Where the files of the run go."""
        return Path(self.output).expanduser() / self.name


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


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW. No weight decay on norms and embeddings."""

    lr: Annotated[float, Gt(0)] = 3e-4
    """Peak learning rate."""
    betas: tuple[Annotated[float, Interval(ge=0, lt=1)], Annotated[float, Interval(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the denominator of the update."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decoupled weight decay of the matrices."""
    grad_clip: Annotated[float, Ge(0)] = 1.0
    """Gradients are scaled down to this global norm; 0 = off."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which both moments are kept; "bfloat16" halves them, and the arithmetic stays float32."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the run, as a share of optimizer.lr."""

    kind: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    """After warm-up: "wsd" holds, then falls linearly over decay_steps; "cosine" and "linear" fall all the way."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Steps of linear warm-up from 0."""
    decay_steps: Annotated[int, Ge(0)] = 0
    """wsd: length of the final decay."""
    min_lr_ratio: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Where the decay ends, as a share of optimizer.lr."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: Annotated[int, Ge(0)] = 0
    """Steps between checkpoints, and one at the end; 0 = none."""
    keep: Annotated[int, Ge(1)] = 2
    """Newest checkpoints to keep."""
    keep_every: Annotated[int, Ge(0)] = 0
    """Keep those at every so many steps too; 0 = none."""
    asynchronous: bool = True
    """Write a checkpoint while training goes on from a copy in the host's memory; false = wait for the disk."""
    resume: Literal["auto", "never"] = "auto"
    """"auto" continues from the newest checkpoint of this run; "never" refuses a folder that has one."""
    export_hf: bool = False
    """At the end, write the weights to `hf` in the folder of the run, as Hugging Face transformers reads them."""


@dataclass(frozen=True)
class MetricsConfig:
    """What is measured and where it goes; metrics.jsonl is always written."""

    every: Annotated[int, Ge(1)] = 10
    """Steps between logged steps, the only ones at which the loop waits for the device."""
    wandb: bool = False
    """Send metrics to Weights & Biases; without an API key the run is kept offline."""
    wandb_project: Annotated[str, MinLen(1)] = "shardwright"
    """Weights & Biases project."""


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on held-out documents."""

    every: Annotated[int, Ge(0)] = 0
    """Steps between validations, and one at the end; 0 = none."""
    batches: Annotated[int, Ge(1)] = 8
    """Global batches per validation; always the same ones."""
    sample_tokens: Annotated[int, Ge(0)] = 0
    """Length of the continuation sampled at the end of the run; 0 = none."""


@dataclass(frozen=True)
class ProfileConfig:
    """Traces by torch.profiler and where their steps' time goes, written to `profile` in the run's folder."""

    trace_steps: Annotated[int, Ge(0)] = 0
    """Steps to trace on rank 0, one after the other; 0 = none. One is enough where steps are alike."""
    after: Annotated[int, Ge(0)] = 10
    """Steps to take first, from where the run starts or goes on: the first ones compile."""


@dataclass(frozen=True)
class Recipe:
    """One run. The sections, in the order of the steps of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=lambda: SIZES["smollm3_debug"])
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
