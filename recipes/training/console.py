"""Output for people: lines and a live progress line on a terminal, plain lines in a file. Only rank 0 prints."""

import shlex
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, cast

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from models.config import ModelConfig
from models.hf import beyond_hf, export_of
from parallel.config import MeshDegrees
from recipes.data.config import DataConfig
from recipes.files.atomic import Lines, utc_now
from recipes.files.interpreter import ROOT
from recipes.files.layout import CHECKPOINTS
from recipes.files.screen import Screen, safe
from recipes.metrics.throughput import Throughput
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import Stage


class Console:
    """Prints to standard output and, as plain text after the time, to a log file. A silent one, on other ranks, does
    nothing."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._output = Screen()
        self._said = ""  # why the screen cannot be written, as the log file says
        # No colours on numbers, and [brackets] and :colons: in the text are printed as they are.
        file = cast(IO[str], self._output)
        self._screen = RichConsole(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=silent)
        self._file: Lines | None = None
        self._early: list[str] = []  # lines from before there was a log file
        self._progress: Progress | None = None

    def open_log(self, path: Path) -> None:
        """Append lines to this file too, beginning with those logged before it was opened."""
        if not self._silent:
            self._file = Lines(path, log=self._show)
            self._file.append(*self._early)

    def log(self, text: str = "", *, style: str | None = None) -> None:
        text = safe(text)
        self._show(text, style=style)
        now = utc_now()
        lines = [f"{now} {text}" if text else ""]
        if (error := self._output.error) and error.strerror != self._said:
            self._said = error.strerror or ""
            lines.append(
                f"{now} standard output cannot be written: {self._said}; its lines are in this file only until it can"
            )
        if self._file is not None:
            self._file.append(*lines)
        elif not self._silent:
            self._early += lines

    def _show(self, text: str, *, style: str | None = None) -> None:
        self._screen.print(text, style=style)

    def progress(self, step: int, steps: int, text: str) -> None:
        """Update the live line; only a terminal has one."""
        if self._silent or not self._screen.is_terminal:
            return
        if self._progress is None:
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._progress = Progress(*columns, console=self._screen, transient=True)
            self._progress.add_task("", total=steps)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=step, description=safe(text))

    def end_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *error: object) -> None:
        self.end_progress()


def run_header(stage: Stage, degrees: MeshDegrees, throughput: Throughput, report: Sequence[str]) -> list[str]:
    """The lines that open a stage: a headline, and indented below it the mesh, the parallelization, batch and FLOPs.

    report: what each part of parallel/ did, one line each.
    """
    recipe = stage.recipe
    model, data, batch = recipe.model, recipe.data, recipe.batch
    masked, inside = data.document_mask or data.has_pairs, "pairs" if data.has_pairs else "documents"
    encoder_decoder = model.is_encoder_decoder
    sequences = f"pairs, at most {batch.sequence_length} tokens of a prompt and {data.answer_length} of an answer"
    peak = "unknown, so no MFU" if throughput.peak is None else f"{throughput.peak / 1e12:.1f} TFLOP/s (dense bf16)"
    headline = f"{recipe.run.name}: {model.name} with {model.parameters}"
    if stage.name:
        headline += f"; stage {stage.name}, steps {stage.first + 1} to {stage.last} of {recipe.run.steps}"
    lines = [
        *([f"model: {model.computed_by}"] if model.name.startswith("from_") else []),
        f"mesh: {degrees} = {degrees.processes} {'process' if degrees.processes == 1 else 'processes'}"
        f" on {throughput.device_name}",
        *report,
        f"batch: {batch.global_batch_size}"
        f" {sequences if encoder_decoder else f'sequences of {batch.sequence_length} tokens'}"
        f" = {batch.divided(degrees)}",
        *([f"attention: inside {inside}, with positions from 0 in each"] if masked and not encoder_decoder else []),
        f"flops: {_flops(model, throughput, masked=masked)}, peak of the device {peak}",
        f"export: {export_of(model)}",
    ]
    return [headline, *(f"  {line}" for line in lines)]


def _flops(model: ModelConfig, throughput: Throughput, *, masked: bool) -> str:
    """What a token takes. Attention inside documents needs fewer; logged steps count them from what was read."""
    if model.is_encoder_decoder:
        from models.counts import TRAINING, forward_flops

        each = forward_flops(model) / (1e9 / TRAINING)
        return f"{each.encoder:.3g} billion per token of a prompt, {each.decoder:.3g} of an answer, besides attention"
    if part := model.uncounted():
        return f"not known, because model.{part} does not say its costs (no MFU)"
    return f"{'at most ' if masked else ''}{throughput.flops['causal'] / 1e9:.3g} billion per token"


def step_line(row: Mapping[str, float | None], steps: int) -> str:
    """The line of one logged step, from its row of metrics.jsonl."""
    mfu = "" if row["mfu"] is None else f"  mfu {row['mfu']:.1%}"
    reserved = row.get("reserved_memory_gib")
    memory = f"{row['peak_memory_gib']:.2f} GiB" + (f" of {reserved:.2f} reserved" if reserved else "")
    left = row["eta_seconds"]  # without validation and saves
    eta = "" if left is None else f"  eta {timedelta(seconds=round(left))}"
    return (
        f"step {row['step']:>6}/{steps}  loss {row['loss']:.4f}  norm {row['grad_norm']:.2f}  lr {row['lr']:.2e}"
        f"  {row['step_seconds']:.3f} s  {row['tokens_per_second']:,.0f} tokens/s{mfu}"
        f"  {memory}  {row['tokens']:,} tokens{eta}"
    )


def done_line(steps: int, tokens: int, seconds: float, *, validation_loss: Mapping[str, float]) -> str:
    """The result of all steps of this start. validation_loss: by the names of texts, "" for a single one."""
    validation = "".join(f", validation loss {name} {loss:.4f}" for name, loss in validation_loss.items())
    validation = validation.replace("loss  ", "loss ")
    rate = f"{tokens / seconds:,.0f} tokens/s in all"
    return f"done: {steps} steps, {tokens:,} tokens in {seconds:.1f} s, {rate}{validation}"


def interrupted_message(signal: str, step: int, *, saved: bool, every: int) -> str:
    """The last line of a run that a signal stopped after this step. every: checkpoint.every."""
    rest = (
        "NOT SAVED, the same command resumes from an older checkpoint"
        if every
        else "not saved, as checkpoint.every = 0"
    )
    return f"{signal}: interrupted after step {step}; {'the same command resumes from there' if saved else rest}"


def early_notes(recipe: Recipe, *, entries: int) -> list[str]:
    """What a user should know before the first step. entries: those of the tokenizer."""
    vocabulary = recipe.model.vocabulary
    lines = [*filter(None, [recipe.data.shares_note, "" if recipe.checkpoint.every else NOT_SAVED])]
    if (unused := 1 - entries / vocabulary) > 0.01:  # vocabularies are rounded up to suit the kernels
        lines.append(
            f"the tokenizer has {entries:,} entries, the model's vocabulary {vocabulary:,}:"
            f" {unused:.0%} of the embedding is never trained"
        )
    return lines


NOT_SAVED = "nothing is saved: checkpoint.every = 0; the weights are gone when the run ends"
BORDER_UNSAVED = "the stage is done, but its last checkpoint is not saved; the same command resumes from an older one"
UNSAVED = "all steps are done, but the last checkpoint is not saved; the same command tries again"


def last_lines(folder: Path, model: ModelConfig, data: DataConfig) -> list[str]:
    """The last lines of a finished run: the files in its folder, and what can be done with its weights."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    lines = [f"written to {folder}: {' '.join(names)}"]
    if CHECKPOINTS in names:
        there = beyond_hf(model) or Path(f"{folder}-hf").exists()
        python = "python scripts" if Path.cwd() == ROOT else f"python {shlex.quote(str(ROOT))}/scripts"
        run = shlex.quote(str(folder))
        lines += [
            "next:",
            f"  {python}/generate.py {run} " + ("--chat" if data.messages_field else '"Once upon a time"'),
            f"  {python}/checkpoint.py list {run}",
            *([f"  {python}/serve.py {run}"] if data.messages_field else []),
            *([] if there else [f"  {python}/convert_hf.py export {run} {run}-hf"]),
        ]
    return lines
