"""Skipping bad steps: a step whose loss or gradient norm is NaN or infinite changes no byte of the state.

The device decides, inside the optimizer's kernel, or else the host in take_step(). The host reads the result at the
next logged step, where it waits.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.mesh import Mesh
from parallel.passes import largest_in_groups, sum_over_group
from recipes.optimization.adamw import local_of

WINDOW = 64
"""A new loss is compared with this many losses of good steps."""


@runtime_checkable
class Skips(Protocol):
    """An optimizer whose step() reads these, as torch's fused ones do."""

    found_inf: Tensor | None
    """A tensor of 1.0 on the device makes a step change nothing."""
    grad_scale: Tensor | None
    """What gradients are divided by, on the device; in place, if the optimizer likes."""


class NonFiniteRun(Exception):
    """Too many consecutive steps were skipped. The text names them."""


class StepGuard:
    """Decides which steps to skip, the same ones on all ranks."""

    def __init__(self, mesh: Mesh, *, device: torch.device, max_skipped_steps: int, loss_spike_z: float = 0.0) -> None:
        """max_skipped_steps, loss_spike_z: as in the [run] section of a recipe."""
        self._loss_group = mesh.loss_group
        # Groups whose processes must decide alike, though their numbers may differ slightly: each replica computes its
        # own gradient norm, each process of a tensor group its own loss and its own gradients of RMSNorm weights.
        self._loss_copies = [mesh.tensor.get_group()] if mesh.tensor is not None else []
        self._judges = [mesh.replicate_group] if mesh.degrees.replicate > 1 else []
        self._judges += self._loss_copies
        self._max_skipped_steps, self._spike_z = max_skipped_steps, loss_spike_z
        self._window = torch.full((WINDOW,), math.nan, device=device)
        self._in_a_row = 0
        self._judged: list[tuple[int, Tensor, Tensor]] = []  # (step, whether skipped, norm) since skipped() was called

    def norm_of_all(self, norm: Tensor) -> Tensor:
        """The gradient norm that all processes use: the largest of theirs, infinite if one of them is NaN."""
        return largest_in_groups(norm, self._judges) if self._judges else norm

    def should_skip(self, step: int, *, loss: Tensor, norm: Tensor) -> Tensor:
        """1.0 on the device if the step must be skipped, else 0.0: the found_inf of torch's fused optimizers.

        loss: this rank's part of the mean loss; norm: norm_of_all(). The host waits for neither.
        """
        skip = ~norm.isfinite()
        if self._spike_z:
            mean_loss = sum_over_group(loss.clone(), self._loss_group)
            if self._loss_copies:
                mean_loss = largest_in_groups(mean_loss, self._loss_copies)
            # Until the window is full it holds NaN, which makes the limit NaN, and no loss exceeds that.
            limit = self._window.mean() + self._spike_z * self._window.std()
            skip = skip.to(loss.device) | ~mean_loss.isfinite() | (mean_loss > limit)
            moved = torch.cat([self._window[1:], mean_loss[None]])
            self._window = torch.where(skip, self._window, moved)
        self._judged.append((step, skip, norm))
        return skip.to(torch.float32)

    def skipped(self) -> Iterator[tuple[int, float]]:
        """(step, norm) of newly skipped steps; waits for the device. Raises NonFiniteRun after too many in a row."""
        if not self._judged:
            return
        steps, skips, norms = zip(*self._judged, strict=True)
        self._judged = []
        for step, skip, norm in zip(steps, torch.stack(skips).tolist(), torch.stack(norms).tolist(), strict=True):
            self._in_a_row = self._in_a_row + 1 if skip else 0
            if skip:
                yield step, norm
            if self._in_a_row >= self._max_skipped_steps:
                raise NonFiniteRun(f"steps {step - self._in_a_row + 1} to {step} were all skipped")

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as plain JSON. Call it after skipped()."""
        window = {"loss_window": [loss for loss in self._window.tolist() if not math.isnan(loss)]}
        return {"skipped_in_a_row": self._in_a_row} | (window if self._spike_z else {})

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Continue from state(). Checkpoints of older versions may lack it."""
        self._in_a_row = progress.get("skipped_in_a_row", 0)
        if losses := progress.get("loss_window", []):
            self._window[-len(losses) :] = torch.tensor(losses)


def take_step(
    optimizer: Optimizer, parameters: Iterable[nn.Parameter], *, skip: Tensor | None, divisor: Tensor | None
) -> None:
    """Step with gradients / divisor, unless `skip` is 1.0: then parameters, moments and counts stay as they are.

    Optimizers with these two inputs, made for GradScaler, look themselves: the host does not wait, and clipping needs
    no pass of its own. For all others, the host waits for `skip`.
    """
    if isinstance(optimizer, Skips):
        optimizer.found_inf, optimizer.grad_scale = skip, divisor
    elif skip is not None and skip.item():
        return
    elif divisor is not None:
        for gradient in (one.grad for one in parameters if one.grad is not None):
            local_of(gradient).div_(divisor)
    optimizer.step()
