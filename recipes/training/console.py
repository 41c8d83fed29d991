"""What a person sees: a live line on a terminal, plain lines in a file. Rank 0 speaks for all."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from models.config import ModelConfig
from parallel.config import MeshDegrees
from recipes.data.config import BatchConfig, DataConfig
from recipes.files.atomic import Lines
from recipes.metrics.throughput import Throughput

# A young model emits any byte; an escape among them would be an order to the terminal.
CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), 127) if chr(code) not in "\n\t"}


class Console:
    """Prints to standard output and, as plain text, to a log file. A silent one (other ranks) does nothing."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._screen = self._new_screen()
        self._file: Lines | None = None
        self._early: list[str] = []  # what was said before there was a log
        self._progress: Progress | None = None

    def open_log(self, path: Path) -> None:
        """Lines go to this file too, after what it holds already; those said before follow now."""
        if not self._silent:
            self._file = Lines(path, log=self._show)
            self._file.append(*self._early)

    def log(self, text: str = "", *, style: str | None = None) -> None:
        text = text.translate(CONTROLS)
        self._show(text, style=style)
        if self._file is not None:
            self._file.append(text)
        elif not self._silent:
            self._early.append(text)

    def _show(self, text: str, *, style: str | None = None) -> None:
        try:
            self._screen.print(text, style=style)
        except OSError:  # the screen may be a file on the disk that is full: training goes on
            self._screen = self._new_screen()  # the old one would print this again, with all that follows

    def _new_screen(self) -> RichConsole:
        # Numbers are read more easily without colours on half of them, and text may hold [brackets] and :colons:.
        return RichConsole(highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=self._silent)

    def progress(self, step: int, steps: int, text: str) -> None:
        """Move the live line, which only a terminal has."""
        if self._silent or not self._screen.is_terminal:
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._screen,
                transient=True,
            )
            self._progress.add_task("", total=steps)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=step, description=text)

    def end_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> "Console":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_progress()


def run_header(
    run_name: str,
    model: ModelConfig,
    data: DataConfig,
    batch: BatchConfig,
    degrees: MeshDegrees,
    yardstick: Throughput,
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


def interrupted_message(signal: str, step: int, *, saved: bool, every: int) -> str:
    """The last word of a run that a signal stopped after this step. every: as in [checkpoint]."""
    rest = "NOT SAVED, the same command goes on from an older one" if every else "not saved, as checkpoint.every = 0"
    return f"{signal}: interrupted after step {step}; {'the same command goes on from there' if saved else rest}"


UNSAVED = "all steps are done, but the last checkpoint is not saved; the same command tries again"


def contents(folder: Path) -> str:
    """What a run wrote, and where."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return f"written to {folder}: {' '.join(names)}"
