"""What a logged step measures and where it goes: rates, goodput, stragglers, metrics.jsonl, the screen."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from models.interface import interface_of
from parallel.dist import World
from parallel.mesh import Mesh
from parallel.reduce import reduce_loss_and_times
from recipes.data.loader import DataLoader, MicroBatch
from recipes.metrics.clock import LOADING, LOG, STEP, RunClock
from recipes.metrics.goodput import SKIPPED, Goodput
from recipes.metrics.throughput import AttentionLength, Throughput, peak_memory_gib
from recipes.metrics.writer import MetricsWriter
from recipes.optimization.skip_steps import StepGuard
from recipes.schema import Recipe
from recipes.training.console import Console, step_line

if TYPE_CHECKING:
    from models.pairs import EncoderDecoderInputs
    from recipes.cluster.stragglers import ComputeTime, StepTimes, Stragglers
    from recipes.metrics.memory import GpuMemory
    from recipes.metrics.pair_lengths import PairLengths
    from recipes.training.foresight import Foresight


class Recorder:
    """Measures a run and writes what it measured. All ranks call all methods, in the same order."""

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        mesh: Mesh,
        model: nn.Module,
        clock: RunClock,
        console: Console,
        loader: DataLoader,
        guard: StepGuard,
        throughput: Throughput,
        progress: Mapping[str, Any],
    ) -> None:
        """progress: state() of the run so far, from the checkpoint it continues from; empty for a new run."""
        self._world, self._mesh, self._clock, self._console = world, mesh, clock, console
        self._loader, self._guard, self._throughput = loader, guard, throughput
        self._steps = recipe.run.steps
        self._knows_pace = False  # the first row's step compiled, and says nothing about the others
        self.counts_lengths = recipe.data.document_mask or recipe.data.has_pairs
        """Whether count() must be told of every step."""
        self._attention_length = AttentionLength(mesh.data_group, device=world.device)
        self._pair_lengths: PairLengths | None = None
        if recipe.model.is_encoder_decoder:
            from recipes.metrics import pair_lengths

            self._pair_lengths = pair_lengths.PairLengths(mesh.data_group, device=world.device)
        self._logged = clock.step  # the newest step that a row describes
        self.goodput = Goodput(clock, before=progress)
        self._compute: ComputeTime | None = None
        self._stragglers: Stragglers | None = None
        if world.size > 1:
            from recipes.cluster import stragglers

            interface = interface_of(model)
            head = model.get_submodule(cast(str, interface.head or interface.tied_head))
            self._compute = stragglers.ComputeTime(clock, world.device, head=head)
            self._stragglers = stragglers.Stragglers(world, clock)
        self._memory: GpuMemory | None = None
        if world.device.type == "cuda":
            from recipes.metrics import memory

            self._memory = memory.GpuMemory(world)
        self._foresight: Foresight | None = None
        if world.device.type == "cuda" or recipe.metrics.calibrated_by:
            from recipes.training.foresight import foresight

            device, nodes = throughput.device_name, len(world.nodes)
            self._foresight = foresight(recipe, mesh.degrees, device=device, nodes=nodes)
        self._metrics = MetricsWriter(
            recipe.run.folder,
            enabled=world.is_main,
            wandb_project=recipe.metrics.wandb_project if recipe.metrics.wandb else None,
            run_name=recipe.run.name,
            recipe=asdict(recipe),
            before=progress,
            log=console.log,
        )

    def tokens(self, step: int) -> int:
        """Tokens of so many steps."""
        counted = self._loader.tokens(step)
        return step * self._throughput.tokens_per_step if counted is None else sum(counted)

    def count(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Take in a step's micro-batches, for how many tokens attend to how many."""
        if self._pair_lengths is None:
            self._attention_length.count(documents for _, _, documents in micro_batches)
        else:
            pairs = [(cast("EncoderDecoderInputs", inputs), targets) for inputs, targets, _ in micro_batches]
            self._pair_lengths.count(pairs)

    def _rates(self, step: int, step_seconds: float) -> dict[str, float | None]:
        """The rate columns of the steps since the last row. All ranks call it."""
        steps, tokens = step - self._logged, self.tokens(step) - self.tokens(self._logged)
        self._logged = step
        if self._pair_lengths is not None:
            return self._throughput.row(step_seconds, lengths=self._pair_lengths.take() / steps)
        attention_length = self._attention_length.take()
        return self._throughput.row(step_seconds, attention_length=attention_length, tokens=tokens / steps)

    def log_step(self, step: int, loss: Tensor, norm: Tensor, *, learning_rate: float) -> None:
        """Record a step: one row of metrics.jsonl, one line on the screen. The host waits for the device here.

        loss: this process's part of the mean loss. Raises NonFiniteRun after too many skipped steps in a row.
        """
        mean_loss, times, counts = self._reduce(loss)
        step_seconds, data_seconds = self._clock.seconds_per_step()
        with self._clock(LOG):
            # Waiting for another process's data is counted as waiting for data here, too.
            waited = max(times.data) - times.data[self._world.rank] if times else 0.0
            self.goodput.move(STEP, LOADING, waited * self._clock.steps)
            self.log_skipped()
            slow, names = self._stragglers.compare(times) if self._stragglers and times else ({}, [])
            memory, full = (
                self._memory.compare(*counts) if self._memory else ({"peak_memory_gib": peak_memory_gib()}, [])
            )
            row: dict[str, Any] = {
                "step": step,
                "tokens": self.tokens(step),
                "loss": mean_loss,
                "grad_norm": norm.item(),
                "lr": learning_rate,
                "step_seconds": step_seconds,
                "eta_seconds": (self._steps - step) * step_seconds if self._knows_pace else None,
                "data_seconds": data_seconds,
                "epochs": self._loader.epochs(step),
                **self._rates(step, step_seconds),
                **memory,
                **self.goodput.row(),
                **slow,
            }
            self._knows_pace = True
            if self._foresight:
                self._foresight.seconds.append(step_seconds)
            self._metrics.write(row)
            self._loader.note_bad_rows()
            self._console.log(step_line(row, self._steps))
            for name in [*names, *full]:
                self._console.log(f"step {step:>6}  {name}")
            self._console.progress(step, self._steps, f"loss {mean_loss:.3f}")
            gc.collect()  # here, and not in the middle of a step
        self._clock.restart()

    def _reduce(self, loss: Tensor) -> "tuple[float, StepTimes | None, list[list[float]]]":
        """The mean loss, every process's times where there are several, and on GPUs what each counted of its memory.

        The host waits for the device.
        """
        counted = self._memory.counts() if self._memory else []
        if self._compute is None:
            if loss.is_cuda:
                torch.cuda.synchronize()  # the loss is there before the step is complete
            return loss.item(), None, [[count] for count in counted]
        from recipes.cluster.stragglers import StepTimes

        compute = self._compute.seconds()  # first: on CUDA it waits, and the step is complete only then
        own = [*self._clock.seconds_per_step(), compute, *counted]
        mean_loss, found = reduce_loss_and_times(loss, own, loss_group=self._mesh.loss_group)
        step, data, computing, *counts = found.t().tolist()
        return mean_loss, StepTimes(step, data, computing), counts

    def log_skipped(self) -> None:
        """Record the steps skipped since the last call. Raises NonFiniteRun after too many in a row."""
        for step, norm in self._guard.skipped():
            self.goodput.move(STEP, SKIPPED, self._clock.seconds_per_step()[0])
            row = {"step": step, "tokens": self.tokens(step), "skipped": True, "grad_norm": norm}
            self._metrics.write(row | {"documents": self._loader.documents(step - 1)})
            self._console.log(f"step {step:>6}  SKIPPED, gradient norm {norm:.2f}; metrics.jsonl names its documents")

    def log_validation(self, step: int, name: str, loss: float, *, is_new: bool) -> None:
        """Record the loss on the validation text of this name, "" for a single text. is_new: it has no row yet, as it
        has when a finished run is started again."""
        if is_new:
            column = f"validation_loss/{name}" if name else "validation_loss"
            self._metrics.write({"step": step, "tokens": self.tokens(step), column: loss})
        self._console.log(f"step {step:>6}  validation loss {f'of {name} ' * bool(name)}{loss:.4f}", style="bold")

    def log_plan(self, step: int) -> None:
        """Record how far the plan of the run was off, where there is one."""
        if self._foresight and (row := self._foresight.row()):
            from recipes.training.foresight import line

            self._metrics.write({"step": step, "tokens": self.tokens(step), **row})
            self._console.log(line(row))

    def sync(self) -> None:
        """Make all rows survive a power cut. Call it before a checkpoint, so that none is newer than its rows."""
        self._metrics.sync()

    def state(self, *, finished: bool) -> dict[str, Any]:
        """What a checkpoint keeps, as plain JSON. finished: the run has no steps left."""
        return self._metrics.state() | self.goodput.state(finished=finished)

    def close(self) -> None:
        """Finish writing, which may wait for the network."""
        self._metrics.close()
