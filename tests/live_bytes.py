"""How many bytes live at once during one real training step, counted storage by storage on fake tensors.

The step is that of a run, as rank 0 of processes that do not exist. FSDPMemTracker of torch, with which a test compares
this, refuses more than one micro-batch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from models.decoder import Decoder
from parallel.config import MeshDegrees
from parallel.dist import World
from parallel.experts import with_experts
from parallel.fsdp import compute_with_whole_shards, without_idle_resharding
from parallel.mesh import Mesh, build_mesh
from parallel.order import parallelize
from parallel.passes import Passes
from recipes.metrics.clock import RunClock
from recipes.optimization.after_step import Balance
from recipes.optimization.optimizer import build_optimizer
from recipes.optimization.skip_steps import StepGuard
from recipes.plan.tracked import CPU, LiveBytes, fake_processes
from recipes.recipe.schema import Recipe
from recipes.training.build import Built
from recipes.training.build import build as build_for_run
from recipes.training.step import train_step


def build(recipe: Recipe, mesh: Mesh) -> Built:
    """The recipe's model and optimizer on the CPU, without values where fake tensors are on."""
    fsdp = without_idle_resharding(mesh, recipe.fsdp, float8_gathers=recipe.float8.all_gather)
    with unset_fake_temporarily():  # a mesh looks for this process in a tensor
        mesh = with_experts(mesh) if recipe.model.experts else mesh
        with torch.device("meta"):
            model = Decoder(recipe.model, loss_chunks=recipe.batch.loss_chunks)
        report = parallelize(
            model,
            mesh,
            float8=recipe.float8,
            activation_checkpointing=recipe.activation_checkpointing,
            compile=recipe.compile,
            fsdp=fsdp,
            layout=replace(recipe.mesh, overlap_tensor=False),
        )
    model.to_empty(device="cpu")
    compute_with_whole_shards(model, mesh, fsdp)
    return Built(
        mesh=mesh,
        model=model,
        passes=Passes(model, mesh, reshards=fsdp.reshard_after_forward, has_z_loss=False),
        optimizer=build_optimizer(model, recipe.optimizer, mesh, dtype=getattr(torch, fsdp.param_dtype)),
        parameters=tuple(model.parameters()),
        roles={},
        balance=Balance(model, mesh, recipe.experts, whole=recipe.model) if recipe.model.experts else None,
        attention="",
        notes_rows=False,
        grad_clip=recipe.optimizer.grad_clip,
        float8_all_gather=recipe.float8.all_gather,
        report=tuple(report),
        logits=None,
    )


def tracked_step(
    recipe: Recipe,
    processes: int,
    nodes: int = 1,
    live: LiveBytes | None = None,
    *,
    degrees: MeshDegrees | None = None,
) -> LiveBytes:
    """The second step of a run of this recipe."""
    live = live or LiveBytes()
    with fake_processes(processes):
        mesh = build_mesh(degrees or recipe.mesh.fit(processes, nodes=nodes), device_type="cpu")
        with FakeTensorMode(allow_non_fake_inputs=True):
            _track(recipe, build(recipe, mesh), live)
    return live


def _track(recipe: Recipe, built: Built, live: LiveBytes) -> None:
    if built.mesh.pipeline is None:
        _name_moments(cast(Decoder, built.model), live)
    built.optimizer.register_step_pre_hook(lambda *_: setattr(live, "moment", "optimizer"))
    batch = recipe.batch
    micro = batch.global_batch_size // built.mesh.degrees.data_parallel // batch.micro_batch_size
    shape = batch.micro_batch_size, batch.sequence_length
    batches = [(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64), None)] * micro
    live.follow(*built.parameters, *moments_of(built), *batches[0])
    guard = StepGuard(built.mesh, device=CPU, max_skipped_steps=10)
    for step in (1, 2):
        live.restart()
        live.moment = "start"
        with live:
            train_step(built, batches, step=step, learning_rate=1e-3, guard=guard, clock=RunClock(CPU))


def moments_of(built: Built) -> list[torch.Tensor]:
    """What the optimizer keeps of the parameters."""
    return [tensor for state in built.optimizer.state.values() for tensor in state.values()]


def tracked_stage(recipe: Recipe, world: World) -> LiveBytes:
    """The second step of a run of a pipeline as this process takes it, with values, together with the others."""
    live = LiveBytes()
    _track(recipe, build_for_run(recipe, world), live)
    return live


def _name_moments(model: Decoder, live: LiveBytes) -> None:
    """Follow which part of the model is computing."""

    def says(name: str) -> Callable[..., None]:
        def set_moment(*_: Any) -> None:
            live.moment = name

        return set_moment

    model.register_forward_pre_hook(says("forward"))
    model.loss.register_forward_pre_hook(says("loss"))
    for name, module in [
        ("loss backward", model.loss),
        ("head", model.tied_head or model.lm_head),
        ("norm", model.norm),
    ]:
        module.register_forward_hook(
            lambda module, inputs, output, name=name: output.register_hook(says(name)) and None
        )
    for layer, block in enumerate(model.blocks):
        block.register_forward_hook(
            lambda module, inputs, output, layer=layer: (
                tree_leaves(output)[0].register_hook(says(f"backward {layer}")) and None
            )
        )
    model.embedding.register_forward_hook(
        lambda module, inputs, output: output.register_hook(says("embedding")) and None
    )
