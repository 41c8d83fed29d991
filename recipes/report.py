"""What a run says of itself, line by line. Imports no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from models.config import ModelConfig
from parallel.config import MeshDegrees
from recipes.data.config import BatchConfig, DataConfig


class Yardstick(Protocol):
    """What recipes.metrics.throughput.Throughput knows of model and device."""

    flops: int
    peak: float | None
    device_name: str


def introduction(
    run_name: str,
    model: ModelConfig,
    data: DataConfig,
    batch: BatchConfig,
    degrees: MeshDegrees,
    yardstick: Yardstick,
    parts: Sequence[str],
) -> list[str]:
    """The headline, the mesh, what every part of parallel/ did (`parts`), the batch and the yardstick."""
    processes = degrees.data_parallel
    accumulation = batch.global_batch_size // degrees.data_parallel // batch.micro_batch_size
    # Inside documents it is less; how much less, the logged steps say, from the documents that there were.
    at_most = "at most " if data.document_mask else ""
    peak = "unknown, so no MFU" if yardstick.peak is None else f"{yardstick.peak / 1e12:.1f} TFLOP/s (dense bf16)"
    return [
        f"{run_name}: {model.name} with {model.num_params():,} parameters",
        f"mesh: replicate {degrees.replicate} x shard {degrees.shard}"
        f" = {processes} {'process' if processes == 1 else 'processes'} on {yardstick.device_name}",
        *parts,
        f"batch: {batch.global_batch_size} sequences of {batch.sequence_length} tokens"
        f" = {processes} x {accumulation} micro-batches of {batch.micro_batch_size}",
        *(["attention: inside documents, where positions start anew"] if data.document_mask else []),
        f"flops: {at_most}{yardstick.flops / 1e9:.3g} billion per token, peak of the device {peak}",
    ]


def step_line(row: Mapping[str, float | None], steps: int) -> str:
    """One logged step, from its row of metrics.jsonl."""
    mfu = "" if row["mfu"] is None else f"  mfu {row['mfu']:.1%}"
    return (
        f"step {row['step']:>6}/{steps}  loss {row['loss']:.4f}  norm {row['grad_norm']:.2f}  lr {row['lr']:.2e}"
        f"  {row['step_seconds']:.3f} s  {row['tokens_per_second']:,.0f} tokens/s{mfu}"
        f"  {row['peak_memory_gib']:.2f} GiB"
    )


def summary(steps: int, tokens: int, seconds: float, *, validation_loss: float | None) -> str:
    """What came out of all steps of this start."""
    validation = "" if validation_loss is None else f", validation loss {validation_loss:.4f}"
    rate = f"{tokens / seconds:,.0f} tokens/s in all"
    return f"done: {steps} steps, {tokens:,} tokens in {seconds:.1f} s, {rate}{validation}"


def farewell(signal: str, step: int, *, saved: bool, every: int) -> str:
    """The last word of a run that a signal stopped after this step. every: as in [checkpoint]."""
    rest = "NOT SAVED, the same command goes on from an older one" if every else "not saved, as checkpoint.every = 0"
    return f"{signal}: interrupted after step {step}; {'the same command goes on from there' if saved else rest}"


UNSAVED = "all steps are done, but the last checkpoint is not saved; the same command tries again"


def contents(folder: Path) -> str:
    """What a run wrote, and where."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return f"written to {folder}: {' '.join(names)}"
