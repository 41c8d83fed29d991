"""One optimizer step, from micro-batches to new weights. The training loop and benchmarks call the same function."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from models.interface import interface_of
from models.loss import IGNORED
from parallel.dist import World
from parallel.errors import CorruptState
from parallel.passes import clipping_divisor, share_gradients_of_copies, sum_over_group
from recipes.data.batches import MicroBatch
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard, take_step
from recipes.training.build import Built


class Measured(NamedTuple):
    """What a step measured, on the device: the host does not wait for it."""

    loss: Tensor
    """This process's part of the mean cross-entropy."""
    norm: Tensor
    """The gradient norm before clipping."""
    rows: Tensor | None
    """As of Passes.run(), if the step is to be logged and the recipe asks for losses of sources."""
    columns: Mapping[str, Tensor]
    """Further columns of metrics.jsonl, which a step measures only if it is to be logged, and the recipe asks."""


def train_step(
    built: Built,
    micro_batches: Sequence[MicroBatch],
    *,
    step: int,
    learning_rate: float,
    guard: StepGuard,
    clock: RunClock,
    is_logged: bool = False,
) -> Measured:
    """Take one optimizer step.

    Args:
        built: the parallel model, its optimizer, and how they are stepped.
        micro_batches: this data rank's share of the global batch.
        step: number of this step; the first is 1.
        learning_rate: that of this step.
        guard: decides on the device whether the step changes anything.
        clock: is told of each micro-batch, which is progress.
        is_logged: whether to measure further columns.
    """
    optimizer, parameters = built.optimizer, built.parameters
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_share", 1.0)
    counts = torch.stack([(targets != IGNORED).sum() for _, targets, _ in micro_batches])
    # Not over the loss group: context parallelism cuts rows inside the model, so its processes count the same targets.
    target_tokens = sum_over_group(counts.sum(), built.mesh.data_group)
    count, rows = sum(len(targets) for _, targets, _ in micro_batches), None
    if is_logged and built.notes_rows:
        rows = torch.zeros(2, count, device=target_tokens.device)
    losses = built.passes.run(micro_batches, target_tokens, step=step, progressed=clock.progressed, rows=rows)
    loss = losses[0] if built.passes.has_z_loss else losses
    norm = guard.norm_of_all(built.passes.norm(parameters))
    columns = further_columns(built, losses) if is_logged else {}
    if built.mesh.tensor is not None:  # after the norm, so that a fault of any copy shows in it
        share_gradients_of_copies(parameters, built.mesh.tensor)
    device, skip = parameters[0].device, guard.should_skip(step, loss=loss, norm=norm)
    divisor = clipping_divisor(norm, max_norm=built.grad_clip).to(device) if built.grad_clip > 0 else None
    take_step(optimizer, parameters, skip=skip.to(device), divisor=divisor)
    optimizer.zero_grad()
    if built.balance is not None:
        columns |= built.balance.move(skip, is_logged=is_logged)
    if built.logits is not None:
        columns |= built.logits.after_step(skip, is_logged=is_logged)
    if built.float8_all_gather:
        from parallel.float8 import precompute_scales

        precompute_scales(built.model)
    return Measured(loss, norm, rows, columns)


def further_columns(built: Built, losses: Tensor) -> dict[str, Tensor]:
    """Columns of metrics.jsonl from what a step has before it clips its gradients, equal on all processes.

    Each is one number on the device, under a name that no other column has: Recorder.log_step() looks.
    """
    norms = {f"grad_norm/{role}": built.passes.norm(parameters) for role, parameters in built.roles.items()}
    if not built.passes.has_z_loss:
        return norms
    return norms | {"z_loss": sum_over_group(losses[1].clone(), built.mesh.loss_group)}


def require_sound_state(built: Built, world: World) -> None:
    """Raise CorruptState, on all processes, if a parameter or a moment is not finite or differs between copies."""
    from parallel.state_check import named_state, require_sound, whole_along

    state, mesh = named_state(built.model, built.parameters, built.optimizer), built.mesh
    copies = [(mesh.replicate_group, list(state))] if mesh.degrees.replicate > 1 else []
    if mesh.tensor is not None:  # norms are whole on every process of a tensor group
        copies.append((mesh.tensor.get_group(), whole_along(state, mesh.tensor)))
    if built.passes.copies is not None:
        tied = f".{interface_of(built.model).embedding}.weight"
        copies.append((built.passes.copies, [name for name in state if tied in name]))
    biases = {f"model.{name}": buffer for name, buffer in built.model.named_buffers()} if mesh.experts else {}
    if mesh.experts is not None and biases:  # of routers: all processes with the same layers move them alike
        copies.append((mesh.experts.tokens, list(biases)))
    require_sound(state | biases, world, copies=copies)


def corruption(built: Built, world: World) -> CorruptState | None:
    """What require_sound_state() would raise."""
    try:
        require_sound_state(built, world)
    except CorruptState as error:
        return error
    return None


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Inside, garbage is collected only by gc.collect(), and what exists at the beginning is left alone.

    Python would collect in the middle of any step, on each rank in a different one, and all ranks wait for the slowest.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
