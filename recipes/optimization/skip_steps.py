"""Keeps poison out: a step whose loss or gradient norm is no finite number changes no byte of the state.

The device decides, with a select inside of the optimizer, and the host reads what came of it where it waits anyway.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from parallel.reduce import sum_over_processes
from recipes.schema import RunConfig

WINDOW = 64
"""Losses of good steps that a new one is compared with."""


class NonFiniteRun(Exception):
    """Too many steps in a row were skipped; the text is for people."""


def backward(loss: Tensor) -> None:
    """loss.backward(), where a loss that is not finite makes every gradient nan.

    So the gradient norm, which all ranks share, tells of every rank's loss, and no message more is needed.
    """
    number = loss.detach()
    loss.backward(number - number + 1)  # 1 for a finite number, nan for nan and the infinities


class StepGuard:
    """Says which steps to skip, on all ranks the same."""

    def __init__(self, run: RunConfig, *, device: torch.device, replicas: int = 1) -> None:
        """replicas: of the sharded model. Each has a gradient norm of its own, and all must act as one."""
        self._replicas = replicas
        self._too_many, self._spike_z = run.max_skipped_steps, run.loss_spike_z
        self._window = torch.full((WINDOW,), math.nan, device=device)
        self._in_a_row = 0
        self._judged: list[tuple[int, Tensor, Tensor]] = []  # (step, whether skipped, norm) since the last look

    def should_skip(self, step: int, *, loss: Tensor, norm: Tensor) -> Tensor:
        """1.0 on the device where the step must be skipped, else 0.0: what torch's fused optimizers call found_inf.

        loss: this rank's part of the mean loss; norm: the gradient norm. The host waits for neither.
        """
        skip = ~norm.isfinite()
        if self._replicas > 1:
            skip = sum_over_processes(skip.to(torch.float32)) > 0
        if self._spike_z:
            mean_loss = sum_over_processes(loss.clone())
            # While the window is not full, nan in it makes the limit nan, and nothing is above that.
            limit = self._window.mean() + self._spike_z * self._window.std()
            skip = skip.to(loss.device) | (mean_loss > limit)
            moved = torch.cat([self._window[1:], mean_loss[None]])
            self._window = torch.where(skip, self._window, moved)
        self._judged.append((step, skip, norm))
        return skip.to(torch.float32)

    def skipped(self) -> Iterator[tuple[int, float]]:
        """(step, gradient norm) of the steps skipped since the last call. The host waits for the device."""
        if not self._judged:
            return
        flags = torch.stack([skip for _, skip, _ in self._judged]).tolist()
        norms = torch.stack([norm for _, _, norm in self._judged]).tolist()
        steps, self._judged = [step for step, _, _ in self._judged], []
        for step, skip, norm in zip(steps, flags, norms, strict=True):
            self._in_a_row = self._in_a_row + 1 if skip else 0
            if skip:
                yield step, norm
            if self._in_a_row >= self._too_many:
                raise NonFiniteRun(f"steps {step - self._in_a_row + 1} to {step} were all skipped")

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, plain JSON. After skipped()."""
        window = {"loss_window": [loss for loss in self._window.tolist() if not math.isnan(loss)]}
        return {"skipped_in_a_row": self._in_a_row} | (window if self._spike_z else {})

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Go on from state(), if it is in there: checkpoints of before there was one lack it."""
        self._in_a_row = progress.get("skipped_in_a_row", 0)
        if losses := progress.get("loss_window", []):
            self._window[-len(losses) :] = torch.tensor(losses)
