"""Writes float8.jsonl: the shares of values that overflow or underflow in casts, counted in sampled steps."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.config import Float8Config
from parallel.dist import World
from parallel.float8 import Cast, casts_of_linears, gathered_as_float8, scale_for
from parallel.fsdp import reshard
from parallel.mesh import Mesh
from parallel.passes import sum_over_group
from recipes.files.atomic import Lines
from recipes.files.layout import FLOAT8_SHARES
from recipes.metrics.clock import LOG, RunClock

Row = dict[str, str | float]
"""{"linear", "tensor", "overflow", "underflow"}: overflow as a share of all elements, underflow of the nonzero ones."""


class CastCounts:
    """Counts on the device, with hooks that exist only inside counting() and do not change the step's results."""

    def __init__(self, model: nn.Module, *, mesh: Mesh, device: torch.device) -> None:
        self._model, self._mesh, self._device = model, mesh, device
        self._linears = casts_of_linears(model)
        names = [(name, cast.tensor) for name, (_, casts) in self._linears.items() for cast in casts]
        self._rows = {name: row for row, name in enumerate(names)}
        self._in_forward = False
        self._restart()

    def _restart(self) -> None:
        self._counts = torch.zeros(len(self._rows), 4, dtype=torch.int64, device=self._device)  # as cast_counts()
        self._weights_counted: set[str] = set()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count during the micro-batches of one step. All processes must enter it."""
        self._restart()
        reshard(self._model)  # validation may have left weights gathered, of which no shard can be asked for
        # Activation checkpointing recomputes blocks, never the whole model, so this flag excludes recomputation.
        handles = [
            self._model.register_forward_pre_hook(partial(self._set_in_forward, True)),
            self._model.register_forward_hook(partial(self._set_in_forward, False)),
        ]
        for name, (linear, casts) in self._linears.items():
            self._count_gathered(name, linear, casts)
            handles.append(linear.register_forward_hook(partial(self._linear_ran, name, casts)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._in_forward = False

    def shares(self) -> list[Row]:
        """The shares over all processes, in the order of the model. All processes must call it; the host waits."""
        counts = sum_over_group(self._counts.clone(), self._mesh.loss_group).tolist()
        return [
            {
                "linear": name,
                "tensor": tensor,
                "overflow": overflowed / max(1, elements),
                "underflow": vanished / max(1, nonzero),
            }
            for (name, tensor), (overflowed, elements, vanished, nonzero) in zip(self._rows, counts, strict=True)
        ]

    def _set_in_forward(self, value: bool, *_: Any) -> None:
        self._in_forward = value

    def _linear_ran(self, name: str, casts: list[Cast], linear: nn.Linear, inputs: tuple[Tensor], out: Tensor) -> None:
        if not self._in_forward:
            return
        self._count(name, casts, "input", inputs[0])
        if name not in self._weights_counted:  # the same in every micro-batch
            self._weights_counted.add(name)
            self._count(name, casts, "weight", linear.weight)
        if out.requires_grad:  # recomputed outputs are other tensors, which get no gradient
            out.register_hook(partial(self._count, name, casts, "grad_output"))

    def _count_gathered(self, name: str, linear: nn.Linear, casts: list[Cast]) -> None:
        """Count the cast of a weight that FSDP gathers in float8: each process casts, and counts, its own shard."""
        gathered = gathered_as_float8(linear)
        if gathered is None:
            return
        self._weights_counted.add(name)
        part, scale = gathered[0].to(self._device), gathered[1]
        for cast in casts:
            if cast.operand == "weight":
                if scale is None:
                    largest = _largest(part, None)
                    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
                    scale = scale_for(largest, cast)
                self._counts[self._rows[name, cast.tensor]] += cast_counts(part, cast, scale.to(self._device))

    @torch.no_grad()
    def _count(self, name: str, casts: list[Cast], operand: str, values: Tensor) -> None:
        values = values.detach().flatten(0, -2)  # (tokens, width)
        for cast in casts:
            if cast.operand == operand:
                scale = scale_for(_largest(values, cast.axis), cast)
                self._counts[self._rows[name, cast.tensor]] += cast_counts(values, cast, scale)


def cast_counts(values: Tensor, cast: Cast, scale: Tensor) -> Tensor:
    """(4,) integers: elements that overflowed, all elements, those that became zero, those that were not zero before.

    A value above the largest float8 number by less than half of its last bit is rounded. Beyond that it overflows:
    torchao saturates it. When the scale comes from the same values, only infinite or NaN values overflow.
    """
    kind = torch.finfo(cast.dtype)
    half_of_last_bit = kind.eps * 2.0 ** torch.tensor(kind.max).log2().floor().item() / 2
    scaled = values.float() * scale  # in float32, as torchao does
    magnitudes = scaled.abs()
    overflowed = ~(magnitudes < kind.max + half_of_last_bit)  # NaN too
    nonzero = values != 0
    vanished = nonzero & (magnitudes.clamp(max=kind.max).to(cast.dtype).float() == 0)
    elements = torch.full_like(overflowed, True)
    return torch.stack([found.sum() for found in (overflowed, elements, vanished, nonzero)])


def _largest(values: Tensor, axis: int | None) -> Tensor:
    """The largest magnitude of all elements, or along an axis, which is kept with size 1.

    Does not use max() or amax(): "selective" activation checkpointing saves their results to reuse them in the same
    order (SAVED in activation_checkpoint.py), and the recomputation, which counts nothing, would get these.
    """
    low, high = torch.aminmax(values) if axis is None else torch.aminmax(values, dim=axis, keepdim=True)
    return torch.maximum(-low, high)


class CastSampler:
    """Writes one row for each cast of each converted linear, every `config.sample_every` steps.

    A sampled step makes a few more passes over every operand; the other steps are unaffected.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Float8Config,
        world: World,
        folder: Path,
        *,
        mesh: Mesh,
        clock: RunClock,
        log: Callable[[str], None],
    ) -> None:
        """
        Args:
            model: the parallelized model.
            config: sample_every is read.
            world: of the run; rank 0 writes.
            folder: the run folder.
            clock: of the run; writing counts as logging.
            log: receives one line of text per message.
        """
        self._every, self._world, self._clock = config.sample_every, world, clock
        self._lines = Lines(folder / FLOAT8_SHARES, log=log)
        self._counts = CastCounts(model, mesh=mesh, device=world.device)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context manager to wrap every step in; the first step has number 1."""
        if number % self._every:
            yield
            return
        with self._counts.counting():
            yield
        with self._clock.synchronized(LOG):
            rows = self._counts.shares()
            if self._world.is_main:
                self._lines.append(*(json.dumps({"step": number, **row}) for row in rows))
