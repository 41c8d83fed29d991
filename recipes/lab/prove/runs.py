"""The runs of a twin, through the training loop itself, and what each of their steps finds."""

import logging
import math
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.documents import Documents
from models.interface import interface_of
from models.loss import IGNORED
from parallel.dist import World
from parallel.fsdp import plain_name, without_wrapper
from parallel.mesh import build_mesh
from parallel.passes import sum_over_group
from recipes.data.batches import MicroBatch
from recipes.data.loader import DataLoader
from recipes.lab.prove.reference import Record
from recipes.lab.prove.twin import SAVED, STEPS, Twin
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import WINDOW
from recipes.recipe.load import LoadedRecipe
from recipes.recipe.schema import Recipe
from recipes.training.build_run import Run, build_run, open_loader
from recipes.training.console import Console
from recipes.training.process import Process
from recipes.training.step import Measured
from recipes.training.trainer import Trainer

GRADIENT_BAD, SPIKE, LOSS_BAD = SAVED, SAVED + 1, SAVED + 2
"""The step in which one process's gradient is NaN after all have been summed, that whose loss is judged a spike, where
losses are judged, and that in which one process's loss is infinite."""


def ignored(inputs: Tensor) -> Tensor:
    """Which targets of rows (B, T) a twin ignores, by their first token: none, the first half, most, or all."""
    length = inputs.shape[1]
    begins = torch.tensor([0, length // 2, length - 5, length], device=inputs.device)[inputs[:, 0] % 4]
    return torch.arange(length, device=inputs.device) < begins[:, None]


def thinned(micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch without the targets that are ignored; pairs have such of their own."""
    inputs, targets, documents = micro_batch
    if not isinstance(inputs, Tensor):
        return micro_batch
    return inputs, targets.masked_fill(ignored(inputs), IGNORED), documents


class Watched(Trainer):
    """A run of a twin whose steps are recorded, and in which some go wrong on purpose."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.record = Record()
        self.ended = ""
        """Why the run gave up, if it did."""
        self._passes = self.built.passes
        self._gradients_of = self._passes.run
        self._passes.run = self._passes_run
        if not self.recipe.data.has_pairs:
            self._thin()
        if self.step == 0:
            self.record.initial = self._whole()
        self.record.state[self.step] = self._whole()
        self.record.guard[self.step] = [self.guard.state()["skipped_in_a_row"]]

    def _thin(self) -> None:
        loader, batch, held_out = self.loader, self.loader.batch, self.loader.validation_batches
        loader.batch = lambda number: [*map(thinned, batch(number))]
        loader.validation_batches = lambda count: {name: map(thinned, text) for name, text in held_out(count).items()}

    def take_step(self) -> Measured:
        number, record, before = (
            self.step + 1,
            self.record,
            [p.detach().clone() for p in map(_local, self.built.parameters)],
        )
        bad = self._spoil_loss() if number == LOSS_BAD else None
        measured = super().take_step()
        if bad is not None:
            bad.remove()
        record.losses[number] = sum_over_group(measured.loss.clone(), self.built.mesh.loss_group).item()
        record.norms[number] = measured.norm.item()
        record.rates[number] = min(
            g["lr"] / g.get("lr_share", 1.0) for g in self.built.optimizer.param_groups if g["params"]
        )
        if "z_loss" in measured.columns:
            record.z_losses[number] = measured.columns["z_loss"].item()
        if all(map(torch.equal, before, map(_local, self.built.parameters))):
            record.skipped.add(number)
        if number == SAVED:
            record.state[number] = self._whole()
        if self.recipe.run.loss_spike_z and number in (SAVED, SPIKE):
            share = 0.75 * record.losses[SAVED] if number == SAVED else float("nan")
            self.guard.restore({"loss_window": [share - 1e-3, share + 1e-3] * (WINDOW // 2)})
        return measured

    def _save(self) -> None:
        super()._save()
        if self.step == SAVED:
            self.record.guard[SAVED] = [self.guard.state()["skipped_in_a_row"]]

    def _finish(self) -> int | None:
        code = super()._finish()
        self.record.state[STEPS] = self._whole()  # after all that a run does at its end
        self.record.guard[STEPS] = self.guard.state().get("loss_window", [])
        return code

    def validate(self) -> None:
        super().validate()
        [self.record.validation[self.step]] = self.validation_loss.values()

    def _give_up(self, error: Any) -> int:
        self.ended = str(error)
        return super()._give_up(error)

    def _passes_run(self, *arguments: Any, step: int, **options: Any) -> Tensor:
        losses = self._gradients_of(*arguments, step=step, **options)
        if step == 1:
            gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self._named()}
            self.record.gradients = self._on_host(gradients)
            self._count_loads()
        if step == GRADIENT_BAD and self.world.rank == self.world.size - 1:
            counted = self.built.passes.counted(self.built.parameters)
            shards = [_local(p.grad) for p in counted if p.grad is not None and _local(p.grad).numel()]
            shards[-1].view(-1)[0] = float("nan")
        return losses

    def _spoil_loss(self) -> Any:
        """Let the loss of the last of the processes with one be infinite from now on, as if only its sum had been."""
        mesh, model = self.built.mesh.devices, self.built.model
        names, coordinates = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
        sizes = zip(names, mesh.shape, coordinates, strict=True)
        if any(own != size - 1 for name, size, own in sizes if name != "pipeline"):
            return None
        loss = model.get_submodule(interface_of(model).loss)
        return loss.register_forward_hook(lambda module, arguments, output: output + math.inf)

    def _count_loads(self) -> None:
        mesh = self.built.mesh
        if mesh.experts is None:
            return
        routers: Any = self.built.balance._routers if self.built.balance else None
        counted = sum_over_group(routers.found.double(), mesh.experts.tokens).cpu()
        for layer, index in routers.places.items():
            self.record.loads[layer], self.record.router_losses[layer] = counted[index, :-2], counted[index, -2:]

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((plain_name(name), parameter) for name, parameter in self.built.model.named_parameters())

    def _whole(self) -> dict[str, Tensor]:
        buffers = {plain_name(name): buffer for name, buffer in self.built.model.named_buffers()}
        return self._on_host({**dict(self._named()), **buffers})

    def _on_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole copies; all processes with the same layers call it."""
        return {
            name: _whole(tensor.detach(), self.world.device).float().cpu().clone() for name, tensor in tensors.items()
        }


def _local(tensor: Tensor) -> Tensor:
    plain = without_wrapper(tensor)
    return plain.to_local() if isinstance(plain, DTensor) else plain


logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # that a gather takes two steps


def _whole(tensor: Tensor, device: torch.device) -> Tensor:
    plain = without_wrapper(tensor)
    return plain.to(device).full_tensor() if isinstance(plain, DTensor) else plain


def run_twin(recipe: Recipe, world: World) -> Watched:
    """Train a twin to its end, or from its checkpoint on."""
    with Console(silent=True) as console:
        trainer = Watched(build_run(LoadedRecipe(recipe), Process(world, console, RunClock(world.device))))
        code = trainer.run()
        if code:
            trainer.ended = trainer.ended or f"exit code {code}"
        if trainer.checkpoints:
            trainer.checkpoints.finish_copies()
    return trainer


def read_all(twin: Twin, world: World) -> tuple[list[list[MicroBatch]], list[MicroBatch]]:
    """The micro-batches of the whole global batch of each step, and those held out, as no mesh has cut them."""
    recipe = twin.recipe
    mesh = build_mesh(twin.degrees, device_type=world.device.type)
    with Console(silent=True) as console:
        process = Process(world, console, RunClock(world.device))
        loader = open_loader(recipe, process, mesh, None, None, several=frozenset())
    size, batches = recipe.batch.global_batch_size, recipe.validation.batches
    [text] = loader.validation.values()
    available = text.sequences.available
    read = partial(_pairs if recipe.data.has_pairs else _rows, loader, recipe)
    steps = [read(loader.training, step * size, size) for step in range(STEPS)]
    held_out = [
        one for n in range(min(batches, -(-available // size))) for one in read(text, n * size, size, available)
    ]
    loader.close()
    return steps, held_out


def _rows(
    loader: DataLoader, recipe: Recipe, text: Any, first: int, count: int, available: int = sys.maxsize
) -> list[MicroBatch]:
    """So many sequences of text from the first on, in micro-batches; later ones than are available are left out."""
    found, end = [], loader.document_boundary
    tokens = torch.from_numpy(text.sequences.rows(first, min(count, available - first)))
    for rows in tokens.split(recipe.batch.micro_batch_size):
        inputs = rows[:, :-1]
        documents = None if end is None else Documents.of(inputs, end_of_document=end)
        found.append((inputs, rows[:, 1:].masked_fill(ignored(inputs), IGNORED), documents))
    return found


def _pairs(
    loader: DataLoader, recipe: Recipe, text: Any, first: int, count: int, available: int | None = None
) -> list[MicroBatch]:
    """The same of pairs, as one process deals them out."""
    batch = recipe.batch
    whole = type(text)(
        text.sequences,
        pairing=loader.pairing,
        end_of_document=loader.tokenizer.end_of_document,
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        data_rank=0,
        data_ranks=1,
        device=torch.device("cpu"),
    )
    micro_batches: list[MicroBatch] = whole._micro_batches(first, available)
    return micro_batches
