"""What a logged step measures and where it goes: rates, goodput, stragglers, metrics.jsonl, the screen."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.interface import interface_of
from parallel.dist import World
from parallel.errors import UserError
from parallel.passes import gather_loss_and_numbers
from recipes.checkpoint.config import AVERAGE_LOSS, AVERAGED, KEEP_BEST, VALIDATION
from recipes.data.history import epoch_lines
from recipes.data.loader import DataLoader
from recipes.evaluation.config import TASK
from recipes.metrics.clock import LOADING, LOG, SKIPPED, STEP, Goodput
from recipes.metrics.config import TRACKERS
from recipes.metrics.throughput import AttentionLength, HostMemory, Throughput
from recipes.metrics.writer import MetricsWriter
from recipes.optimization.skip_steps import StepGuard
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import Stage
from recipes.training.build import Built
from recipes.training.console import Console, step_line
from recipes.training.process import Process
from recipes.training.run_folder import Report

if TYPE_CHECKING:
    from recipes.cluster.stragglers import ComputeTime, Stragglers
    from recipes.metrics.memory import GpuMemory
    from recipes.metrics.pair_lengths import PairLengths
    from recipes.training.foresight import Foresight
    from recipes.training.step import Measured


class Recorder:
    """Measures a run and writes what it measured. All ranks call all methods, in the same order."""

    def __init__(
        self,
        stage: Stage,
        process: Process,
        built: Built,
        loader: DataLoader,
        *,
        guard: StepGuard,
        throughput: Throughput,
        progress: Mapping[str, Any],
    ) -> None:
        """progress: state() of the run so far, from the checkpoint it continues from; empty for a new run."""
        recipe = stage.recipe
        mesh, model, world, clock, console = built.mesh, built.model, process.world, process.clock, process.console
        self._world, self._mesh, self._clock, self._console = world, mesh, clock, console
        self._built = built
        self._loader, self._guard, self._throughput = loader, guard, throughput
        self._balance = built.balance
        self._recipe, self._steps = recipe, recipe.run.steps
        self._knows_pace = False  # the first row's step compiled, and says nothing about the others
        self.counts_lengths = recipe.data.document_mask or recipe.data.has_pairs
        """Whether lengths.count() must be told of every step."""
        self.lengths: AttentionLength | PairLengths = AttentionLength(mesh.data_group, device=world.device)
        if recipe.model.is_encoder_decoder:
            from recipes.metrics import pair_lengths

            self.lengths = pair_lengths.PairLengths(mesh.data_group, device=world.device)
        self._logged = self._first_step = clock.step  # the newest step that a row describes
        self._validated: dict[str, float] = {}  # the columns of the validation at the step that follows
        self._validated_at = -1
        self._averaged: Sequence[int] = ()  # the steps whose average was validated last
        self.goodput = process.goodput or Goodput(clock, before=progress)
        self._compute: ComputeTime | None = None
        self._stragglers: Stragglers | None = None
        if world.size > 1:
            from recipes.cluster import stragglers

            interface = interface_of(model)
            name = interface.head or interface.tied_head
            head = model.get_submodule(name) if name and mesh.pipeline is None else None
            self._compute = stragglers.ComputeTime(clock, world.device, head=head)
            self._stragglers = stragglers.Stragglers(world, clock, stages=mesh.degrees.pipeline)
        self._memory: GpuMemory | HostMemory = HostMemory(world.rank)
        if world.device.type == "cuda":
            from recipes.metrics import memory

            self._memory = memory.GpuMemory(world)
        self._foresight: Foresight | None = None
        if world.device.type == "cuda" or recipe.metrics.calibrated_by:
            from recipes.training.foresight import foresight

            self._foresight = foresight(recipe, mesh.degrees, device=throughput.device_name, nodes=len(world.nodes))
        self._report = Report(recipe.run.folder) if recipe.metrics.picture and world.is_main else None
        self.metrics = process.metrics or _writer(recipe, world, progress, console)
        self.metrics.stage = stage.name
        self._stage_end, self._said_epochs = stage.last, clock.step >= stage.last
        self._say_epochs()

    def _say_epochs(self) -> None:
        """Log once how often the stage will have read its sources, when all their lengths are known."""
        if not self._said_epochs and None not in (epochs := self._loader.epochs(self._stage_end)).values():
            self._said_epochs = True
            for line in epoch_lines(epochs, by=f"step {self._stage_end}"):
                self._console.log(line)

    def _rates(self, step: int, step_seconds: float) -> dict[str, float | None]:
        """The rate columns of the steps since the last row. All ranks call it."""
        steps, tokens = step - self._logged, self._loader.tokens(step) - self._loader.tokens(self._logged)
        self._logged = step
        return self._throughput.row(step_seconds, tokens=tokens / steps, **self.lengths.per_step(steps))

    def log_step(self, step: int, measured: "Measured", *, learning_rate: float) -> None:
        """Record a step: one row of metrics.jsonl, one line on the screen. The host waits for the device here.

        Raises NonFiniteRun after too many skipped steps in a row.
        """
        mean_loss, times, memory_numbers, of_sources = self._reduce(step, measured)
        step_seconds, data_seconds = self._clock.seconds_per_step()
        with self._clock(LOG):
            # Waiting for another process's data is counted as waiting for data here, too.
            waited = times[0] - data_seconds if times else 0.0
            self.goodput.move(STEP, LOADING, waited * self._clock.steps)
            self.log_skipped()
            slow, names = self._stragglers.compare(times) if self._stragglers else ({}, [])
            memory, full = self._memory.compare(memory_numbers)
            matrix_share = self._recipe.optimizer.matrix_share
            row = dict[str, Any](  # raises TypeError for a column of two owners
                step=step,
                tokens=self._loader.tokens(step),
                loss=mean_loss,
                **self._columns_of_sources(step, of_sources),
                grad_norm=measured.norm.item(),
                **{column: value.item() for column, value in measured.columns.items()},
                lr=learning_rate,
                **({"matrix_lr": learning_rate * matrix_share} if matrix_share else {}),
                step_seconds=step_seconds,
                eta_seconds=(self._steps - step) * step_seconds if self._knows_pace else None,
                data_seconds=data_seconds,
                epochs=self._loader.epochs(step),
                **self._rates(step, step_seconds),
                **memory,
                **self.goodput.row(),
                **slow,
            )
            row = row_with_metrics(row, recipe=self._recipe, built=self._built)
            self._knows_pace = True
            if self._foresight:
                self._foresight.seconds.append(step_seconds)
            self.metrics.write(row)
            self._loader.note_bad_rows()
            self._say_epochs()
            self._console.log(step_line(row, self._steps))
            experts = self._balance.lines() if self._balance else []
            experts += self._balance.causes(slow.get("stragglers", ())) if self._balance and names else []
            for name in [*names, *full, *experts]:
                self._console.log(f"step {step:>6}  {name}")
            self._console.progress(step, self._steps, f"loss {mean_loss:.3f}")
            gc.collect()  # here, and not in the middle of a step
        self._clock.restart()

    def _reduce(self, step: int, measured: "Measured") -> tuple[float, list[float], list[float], list[float]]:
        """The mean loss, the summary of all processes' times where there are several, that of their memory, and the
        summed losses of the sources with, behind them, their targets, if the step has noted those of rows.

        The host waits for the device once, and reads as many values at any number of processes.
        """
        if self._compute is None or self._stragglers is None:
            if measured.loss.is_cuda:
                torch.cuda.synchronize()  # the loss is there before the step is complete
            alone = torch.tensor([self._memory.counts()], dtype=torch.float64)
            loss, *of_sources = self._losses(step, measured).tolist()
            return loss, [], self._memory.summary(alone).tolist(), of_sources
        compute = self._compute.seconds()  # first: on CUDA it waits, and the step is complete only then
        times = self._stragglers.counts(*self._clock.seconds_per_step(), compute)
        numbers, own = [*times, *self._memory.counts()], self._losses(step, measured)
        losses, rows = gather_loss_and_numbers(own, numbers, loss_group=self._mesh.loss_group)
        of_times, of_memory = (columns for columns in rows.tensor_split([len(times)], dim=1))
        both = [self._stragglers.summary(of_times), self._memory.summary(of_memory)]
        read = iter(torch.cat([losses, *both]).tolist())  # at once
        (loss, *of_sources), of_time, of_host = ([*islice(read, len(part))] for part in (losses, *both))
        return loss, of_time, of_host, of_sources

    def _losses(self, step: int, measured: "Measured") -> Tensor:
        """This process's part of the mean loss and, if rows are noted, of the sums and targets of each source."""
        if measured.rows is None:
            return measured.loss[None]
        sources = torch.from_numpy(self._loader.training.sources_of(step - 1)).to(measured.rows.device)
        sums = measured.rows.new_zeros(2, len(self._recipe.data.sources), dtype=torch.float64)
        sums.index_add_(1, sources, measured.rows.double())
        return torch.cat([measured.loss.double()[None], sums.flatten()])

    def _columns_of_sources(self, step: int, sums: list[float]) -> dict[str, float | None]:
        """The columns of the sources of a mixture, from what _reduce() found; no loss for one without a target."""
        if not sums:
            return {}
        count = len(sums) // 2
        losses = zip(self._recipe.data.sources, sums[:count], sums[count:], strict=True)
        columns: dict[str, float | None] = {f"loss/{name}": loss / n if n else None for name, loss, n in losses}
        training = self._loader.training
        read = training.sequences.tokens_by_source(training.first_of(step))
        return columns | {f"tokens/{name}": tokens for name, tokens in read.items()}

    def log_skipped(self) -> None:
        """Record the steps skipped since the last call. Raises NonFiniteRun after too many in a row."""
        for step, norm in self._guard.skipped():
            self.goodput.move(STEP, SKIPPED, self._clock.seconds_per_step()[0])
            row = {"step": step, "tokens": self._loader.tokens(step), "skipped": True, "grad_norm": norm}
            self.metrics.write(row | {"documents": self._loader.documents(step - 1)})
            self._console.log(f"step {step:>6}  SKIPPED, gradient norm {norm:.2f}; metrics.jsonl names its documents")

    def log_validation(self, step: int, name: str, loss: float, *, averaged: Sequence[int] = ()) -> None:
        """Record the loss on the validation text of this name, "" for a single text. averaged: of so many steps."""
        self._averaged, column = averaged, AVERAGE_LOSS if averaged else "validation_loss"
        self._note_validation(step, {f"{column}/{name}" if name else column: loss})
        whose = f"of the average of {len(averaged)} checkpoints " if averaged else ""
        of_text = f"of {name} {whose}" if name else whose
        self._console.log(f"step {step:>6}  validation loss {of_text}{loss:.4f}", style="bold")

    def end_validation(self, step: int, scores: Mapping[str, float]) -> None:
        """Record the scores on its tasks, "TASK/METRIC" -> value."""
        if scores:
            self._note_validation(step, {f"{TASK}{name}": score for name, score in scores.items()})
            shown = ", ".join(f"{name} {score:.4f}" for name, score in scores.items())
            self._console.log(f"step {step:>6}  {shown}", style="bold")
        if self._report and step < self._steps:
            self._report.begin()

    def _note_validation(self, step: int, columns: dict[str, float]) -> None:
        """Write a row, and remember its finite values for a checkpoint of this step."""
        if step > self._first_step:  # a finished run that is started again has the row
            self.metrics.write({"step": step, "tokens": self._loader.tokens(step), **columns})
        before = self._validated if step == self._validated_at else {}
        finite = {name: value for name, value in columns.items() if isfinite(value)}
        self._validated, self._validated_at = {**before, **finite}, step

    def log_consumed(self, step: int) -> None:
        """Log what was read of each source, if that changed during the run."""
        if len(self._loader.history(step)) > 1:
            for line in self._loader.consumed(step):
                self._console.log(line)

    def log_plan(self, step: int) -> None:
        """Record how far the plan of the run was off, where there is one."""
        if self._foresight and (row := self._foresight.row()):
            self.metrics.write({"step": step, "tokens": self._loader.tokens(step), **row})
            self._console.log(self._foresight.line(row))

    def state(self, *, finished: bool) -> dict[str, Any]:
        """What a checkpoint of this step keeps, as plain JSON. finished: the run has no steps left."""
        state = self.metrics.state() | self.goodput.state(finished=finished)
        if self._validated_at == self._clock.step:
            state |= {VALIDATION: self._validated} | ({AVERAGED: [*self._averaged]} if self._averaged else {})
        keep_best = self._recipe.checkpoint.keep_best
        return state | ({KEEP_BEST: keep_best} if keep_best else {})

    def close(self, *, in_a_hurry: bool = False) -> None:
        """Finish writing, which may wait for the network, and write the report, unless it is in a hurry."""
        self.metrics.close()
        if not in_a_hurry:
            self.write_report()

    def write_report(self) -> None:
        """Write the report of the rows so far, if this process writes one, and wait for it."""
        if self._report:
            self._report.write(log=self._console.log)


def _writer(recipe: Recipe, world: World, progress: Mapping[str, Any], console: Console) -> MetricsWriter:
    return MetricsWriter(
        recipe.run.folder,
        recipe.metrics,
        enabled=world.is_main,
        run_name=recipe.run.name,
        recipe=asdict(recipe),
        before=progress,
        openers=TRACKERS | {name: entry.value for name, entry in recipe.added.get("tracker", {}).items()},
        log=console.log,
    )


def row_with_metrics(row: dict[str, Any], *, recipe: Recipe, built: Built) -> dict[str, Any]:
    """The row with the columns of plug-ins. All ranks call it. Raises UserError for a column of two owners."""
    for name, entry in recipe.added.get("metric", {}).items():
        own = {"fields": getattr(recipe, name)} if entry.fields else {}
        if name in row:
            raise UserError(f"{entry.place}: metric {name!r} is a column already; rename it")
        row = row | {name: float(entry.value(row, built, **own))}
    return row
