"""The runs of a twin, through the training loop itself, in which some steps go wrong on purpose."""

import json
import logging
import math
import signal
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.documents import Documents
from models.interface import interface_of
from models.loss import IGNORED
from parallel.axes import DATA_AXES, LAYER_AXES
from parallel.dist import World
from parallel.fsdp import plain_name, reshard, without_wrapper
from parallel.mesh import build_mesh
from parallel.passes import sum_over_group
from recipes.data.batches import MicroBatch
from recipes.data.loader import DataLoader
from recipes.files.exit_codes import PREEMPTED, ended_by
from recipes.files.layout import METRICS
from recipes.lab.prove.reference import Record, Tensors
from recipes.lab.prove.twin import SAVED, Twin
from recipes.metrics.clock import RunClock
from recipes.optimization.adamw import local_of
from recipes.optimization.skip_steps import WINDOW
from recipes.recipe.load import LoadedRecipe
from recipes.recipe.schema import Recipe
from recipes.training.build_run import Run, build_run, open_loader
from recipes.training.console import Console
from recipes.training.process import Process
from recipes.training.step import Measured
from recipes.training.trainer import Trainer

GRADIENT_BAD, SPIKE, LOSS_BAD = SAVED, SAVED + 1, SAVED + 2
"""The step in which one process's gradient is NaN after all have been summed, that whose loss is a spike, where losses
are judged, and that in which one process's loss is infinite."""
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # that a gather takes two steps


def thinned(micro_batches: Iterable[MicroBatch], first: int, share: int) -> Iterator[MicroBatch]:
    """Ignore the first targets of each row of text, in no two rows as many; in the first none, in a third of them all.

    first: the row of the global batch that each batch begins with here, of which it has so many, a share.
    """
    done = 0
    for inputs, targets, documents in micro_batches:
        count, length = targets.shape
        rows = first + (done + torch.arange(count, device=targets.device)) % share
        shares = rows * 0.382 % 1  # spread evenly, without a period
        begins = (length * shares).where(shares < 2 / 3, length)[:, None]
        yield inputs, targets.masked_fill(torch.arange(length, device=targets.device) < begins, IGNORED), documents
        done += count


class Stopped(Exception):
    """A signal has ended a proof; the argument is its number."""


class Watched(Trainer):
    """A run of a twin whose steps are recorded."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        passes, loader = self.built.passes, self.loader
        self._add_up, batch, held_out = passes.run, loader.batch, loader.validation_batches
        vars(passes)["run"] = self._gradients
        if not self.recipe.data.has_pairs:
            share = self.recipe.batch.global_batch_size // self.built.mesh.data_ranks
            thin = partial(thinned, first=self.built.mesh.data_rank * share, share=share)
            vars(loader)["batch"] = lambda number: [*thin(batch(number))]
            vars(loader)["validation_batches"] = lambda n: {name: thin(some) for name, some in held_out(n).items()}
        state, skipped = self._whole(), self.guard.state()["skipped_in_a_row"]
        self.record = Record(initial={} if self.step else state, state={self.step: state}, guard={self.step: [skipped]})

    def take_step(self) -> Measured:
        number, record, parameters = self.step + 1, self.record, self.built.parameters
        before = [local_of(parameter.detach()).clone() for parameter in parameters]
        spoiled = self._spoil_loss() if number == LOSS_BAD else None
        measured = super().take_step()
        if spoiled is not None:
            spoiled.remove()
        record.losses[number] = sum_over_group(measured.loss.clone(), self.built.mesh.loss_group).item()
        record.norms[number] = measured.norm.item()
        groups = (group for group in self.built.optimizer.param_groups if group["params"])
        record.rates[number] = min(group["lr"] / group.get("lr_share", 1.0) for group in groups)
        if "z_loss" in measured.columns:
            record.z_losses[number] = measured.columns["z_loss"].item()
        if all(map(torch.equal, before, map(local_of, parameters))):
            record.skipped.add(number)
        if self.recipe.run.loss_spike_z and number in (SAVED, SPIKE):
            usual = 0.75 * record.losses[SAVED] if number == SAVED else math.nan
            self.guard.restore({"loss_window": [usual - 1e-3, usual + 1e-3] * (WINDOW // 2)})
        return measured

    def validate(self) -> None:
        super().validate()
        [self.record.validation[self.step]] = self.validation_loss.values()

    def _save(self, *, in_memory: bool = False) -> None:
        super()._save(in_memory=in_memory)
        if self.step == SAVED and not in_memory:
            self.record.state[SAVED] = self._whole()
            self.record.guard[SAVED] = [self.guard.state()["skipped_in_a_row"]]

    def _finish(self) -> int | None:
        code = super()._finish()
        self.record.state[self.step] = self._whole()  # after all that a run does at its end
        self.record.guard[self.step] = self.guard.state().get("loss_window", [])
        return code

    def _give_up(self, error: Any) -> int:
        self.record.ended = str(error)
        return super()._give_up(error)

    def _gradients(self, *arguments: Any, step: int, **options: Any) -> Tensor:
        losses = self._add_up(*arguments, step=step, **options)
        if step == 1:
            named = self.built.model.named_parameters()
            self.record.gradients = self._on_host(
                (name, torch.zeros_like(p) if p.grad is None else p.grad) for name, p in named
            )
            self._count_loads()
        if step == GRADIENT_BAD and self.world.rank == self.world.size - 1:
            counted = self.built.passes.counted(self.built.parameters)
            shards = [local_of(p.grad) for p in counted if p.grad is not None and local_of(p.grad).numel()]
            shards[-1].view(-1)[0] = math.nan
        return losses

    def _spoil_loss(self) -> Any:
        """Let the loss of the first of the processes with one be infinite, though all gradients are finite."""
        mesh, model = self.built.mesh.devices, self.built.model
        coordinates = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True)
        if any(here for axis, here in coordinates if axis in (*DATA_AXES, *LAYER_AXES)):
            return None
        loss = model.get_submodule(interface_of(model).loss)
        return loss.register_forward_hook(lambda module, arguments, output: output + math.inf)

    def _count_loads(self) -> None:
        mesh, routers = self.built.mesh.experts, self.built.passes.routers
        if mesh is None or routers is None:
            return
        counted = sum_over_group(routers.found.double(), mesh.tokens).cpu()
        for layer, index in routers.places.items():
            self.record.loads[layer], self.record.router_losses[layer] = counted[index, :-2], counted[index, -2:]

    def _whole(self) -> Tensors:
        reshard(self.built.model)  # what a validation has gathered is rounded
        return self._on_host([*self.built.model.named_parameters(), *self.built.model.named_buffers()])

    def _on_host(self, named: Any) -> Tensors:
        """Whole copies; all processes with the same layers call it."""
        found = {}
        for name, tensor in named:
            plain = without_wrapper(tensor.detach())
            there: Any = plain.to(self.world.device)
            whole = there.full_tensor() if isinstance(there, DTensor) else there
            found[plain_name(name)] = whole.float().cpu().clone()
        return found


def run_twin(recipe: Recipe, world: World) -> Record:
    """Train a twin to its end, or from its checkpoint on."""
    with Console(silent=True) as console:
        trainer = Watched(build_run(LoadedRecipe(recipe), Process(world, console, RunClock(world.device))))
        first, record = trainer.step, trainer.record
        code = trainer.run()
        if code == PREEMPTED or (code and code > ended_by(0)):  # on all processes, whichever got the signal
            raise Stopped(trainer.interruption.noted or signal.SIGTERM)
        if code:
            record.ended = record.ended or f"the run ended with exit code {code}"
    if world.is_main:  # what users see
        lines = (recipe.run.folder / METRICS).read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if row["step"] > first and row.get("loss") is not None]
        record.losses |= {row["step"]: row["loss"] for row in rows}
        for row in rows:
            named = {Path(key).name: loss for key, loss in row.items() if key.startswith("loss/") and loss is not None}
            record.source_losses[row["step"]] = named
    return record


def read_all(twin: Twin, world: World) -> tuple[list[list[MicroBatch]], list[MicroBatch]]:
    """The micro-batches of the whole global batch of each step, and those held out, as no mesh has cut them."""
    recipe, mesh = twin.recipe, build_mesh(twin.degrees, device_type=world.device.type)
    with Console(silent=True) as console:
        process = Process(world, console, RunClock(world.device))
        loader = open_loader(recipe, process, mesh, None, None, several=frozenset())
    [text], size = loader.validation.values(), recipe.batch.global_batch_size
    read, available = partial(_pairs if recipe.data.has_pairs else _rows, loader, recipe), text.sequences.available
    steps = [read(loader.training, step * size) for step in range(recipe.run.steps)]
    held_out = [
        one
        for n in range(min(recipe.validation.batches, -(-available // size)))
        for one in read(text, n * size, available)
    ]
    loader.close()
    return steps, held_out


def _rows(loader: DataLoader, recipe: Recipe, text: Any, first: int, available: int = sys.maxsize) -> list[MicroBatch]:
    """The micro-batches of a global batch of text, without rows beyond those available."""
    found, end, size = [], loader.document_boundary, recipe.batch.global_batch_size
    tokens = torch.from_numpy(text.sequences.rows(first, min(size, available - first)))
    for rows in tokens.split(recipe.batch.micro_batch_size):
        inputs, targets = rows[:, :-1], rows[:, 1:]
        documents = None if end is None else Documents.of(inputs, end_of_document=end)
        if recipe.data.document_mask and not recipe.data.border_targets:
            targets = torch.tensor([[IGNORED if a == end else b for a, b in pairwise(row)] for row in rows.tolist()])
        found.append((inputs, targets, documents))
    return [*thinned(found, 0, size)]


def _pairs(loader: DataLoader, recipe: Recipe, text: Any, first: int, available: int | None = None) -> list[MicroBatch]:
    """The micro-batches of a global batch of pairs, as one process deals them out."""
    batch, options = recipe.batch, {"pairing": loader.pairing, "end_of_document": loader.tokenizer.end_of_document}
    options |= {"global_batch_size": batch.global_batch_size, "micro_batch_size": batch.micro_batch_size}
    whole = type(text)(text.sequences, data_rank=0, data_ranks=1, device=torch.device("cpu"), **options)
    return cast(list[MicroBatch], whole._micro_batches(first, available))
