"""From a recipe to a run that is ready for its first step. The order of the calls is the order of the build."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from models.build import build_model
from models.config import of_transformers
from models.interface import interface_of
from parallel.dist import World, allocator_settings, on_all, on_main, on_main_first
from parallel.errors import TemporaryError, UserError
from parallel.fsdp import compute_with_whole_shards, units_of, without_idle_resharding
from parallel.kernels import choose_attention
from parallel.materialize import materialize
from parallel.mesh import Mesh, build_mesh
from parallel.nodes import placement
from parallel.order import parallelize
from recipes.data.loader import DataLoader
from recipes.data.text.tokenizer import Tokenizer
from recipes.files.layout import LOG_FILE
from recipes.files.lock import FolderLock
from recipes.metrics.clock import RunClock
from recipes.optimization.optimizer import build_optimizer, matrices_of
from recipes.optimization.skip_steps import StepGuard
from recipes.recipe.load import LoadedRecipe
from recipes.recipe.rules_mesh import advice, require_fits_world
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import Stage, at_several_lengths, stage_of, stages_of
from recipes.training import surroundings
from recipes.training.border import FellBack, Kept, Start
from recipes.training.console import Console, notes, run_header
from recipes.training.interruption import Interruption
from recipes.training.recorder import Recorder
from recipes.training.resume import Beginning, find_beginning, open_checkpoints, resume, weights_for
from recipes.training.run_folder import check_output_folder, claim_run_folder, resumed_data_state
from recipes.weights.locate import (
    FROM_WEIGHTS,
    Description,
    Weights,
    find_weights,
    trained_description,
)

if TYPE_CHECKING:
    from recipes.checkpoint.checkpoints import Checkpoints
    from recipes.metrics.float8_samples import CastSampler
    from recipes.metrics.profile import StepProfiler


@dataclass(frozen=True)
class Built:
    """A parallel model, its optimizer, and how they are stepped."""

    mesh: Mesh
    model: nn.Module
    units: tuple[FSDPModule, ...]
    """The modules whose weights FSDP gathers together: the model itself, perhaps blocks, embedding and head."""
    optimizer: Optimizer
    parameters: tuple[nn.Parameter, ...]
    """Those of the model, as sharding left them."""
    roles: Mapping[str, tuple[nn.Parameter, ...]]
    """Of these parameters; empty unless the recipe asks for their gradient norms."""
    # The next four are as in the recipe, but nothing is resharded where that frees nothing.
    z_loss: float
    grad_clip: float
    reshard_after_forward: bool
    float8_all_gather: bool
    dropout_seed: int | None
    """Of the random numbers that the model draws in a step; None if it draws none."""
    report: tuple[str, ...]
    """What each part of the parallelization did, one line per part."""


@dataclass(frozen=True)
class Run:
    """Everything that the training loop needs."""

    recipe: Recipe
    world: World
    console: Console
    clock: RunClock
    built: Built
    loader: DataLoader
    checkpoints: "Checkpoints | None"
    """None for a run that neither saves nor resumes."""
    guard: StepGuard
    recorder: Recorder
    interruption: Interruption
    observers: "tuple[StepProfiler | CastSampler, ...]"
    """What the recipe asks to watch steps with; each is entered around every step."""
    description: Description
    """What accompanies the weights wherever they go."""
    tasks: Callable[[], Mapping[str, float]]
    """Evaluates the tasks of the validation: "TASK/METRIC" -> value."""
    stage: Stage
    """The part of the run that this is, whose steps it takes."""
    kept: Kept
    """What the next stage takes over."""


def build_run(
    loaded: LoadedRecipe, world: World, console: Console, clock: RunClock, *, after: Kept | None = None
) -> Run:
    """Build the stage that is due, from the newest checkpoint; the first one of a process claims the run's folder.

    after: what the stage before it left. Raises UserError, on all processes, for whatever keeps it from starting.
    """
    recipe, build_stage = loaded.recipe, partial(_build_stage, loaded, world, console, clock)
    if after:
        try:
            return build_stage(Beginning.own(recipe, after.step), after=after)
        except FellBack as older:
            where = f"the checkpoint of step {after.step}, the end of a stage, is damaged"
            raise TemporaryError(f"{where}; the same command resumes from step {older.step}") from None
    for stage in stages_of(recipe):
        require_fits_world(stage.recipe.mesh, stage.recipe.batch, nodes=world.nodes)
    on_main_first(world, lambda: check_output_folder(recipe))
    lock = FolderLock()  # held for as long as this process lives
    on_main(world, lambda: lock.take(recipe.run.folder, log=console.log))
    begin = on_main(world, lambda: find_beginning(recipe, console))
    while True:
        try:
            return build_stage(begin, lock=lock)
        except FellBack as older:
            begin = Beginning.own(recipe, older.step)


def _build_stage(
    loaded: LoadedRecipe,
    world: World,
    console: Console,
    clock: RunClock,
    begin: Beginning,
    *,
    lock: FolderLock | None = None,
    after: Kept | None = None,
) -> Run:
    """Build the stage that follows this beginning. lock: that of the run's folder, which is claimed; None with `after`.

    Raises FellBack if the checkpoint of this step is damaged and the next older one belongs to another stage.
    """
    stage = stage_of(loaded.recipe, begin.step)
    recipe = stage.recipe
    weights = weights_for(loaded, begin)
    assert weights is not None or not recipe.model.weights, "a recipe whose weights load_run() has not located"
    starts_from = weights if recipe.model.weights and begin.checkpoint is None else None
    built = build(recipe, world, weights=starts_from, mesh=_mesh_of(recipe, world, after))
    throughput = surroundings.throughput(recipe, world)
    header = run_header(stage, built.mesh.degrees, throughput, built.report)
    for line in (*header, *surroundings.predicted_memory(recipe, built.mesh, world.device)):
        console.log(line, style=None if line.startswith(" ") else "bold")
    if starts_from is not None:
        console.log(f"weights from {starts_from.path}")
    several = at_several_lengths(loaded.recipe)
    loader = _open_data(recipe, world, built.mesh, weights, begin, console, several)
    for line in notes(recipe, entries=loader.tokenizer.vocabulary):
        console.log(line)
    description = _describe(recipe, loader, weights, begin, console)
    tasks = _validation_tasks(recipe, built, description, world, clock)
    checkpoints = open_checkpoints(recipe, loader, description, begin, console)
    progress = resume(recipe, built, loader, checkpoints, begin, console)
    if stage_of(loaded.recipe, progress.get("step", 0)).number != stage.number:
        loader.close()
        raise FellBack(progress["step"])
    clock.step = progress.get("step", 0)
    if checkpoints and recipe.checkpoint.every and clock.step < recipe.run.steps:
        moments, matrices = getattr(torch, recipe.optimizer.state_dtype), matrices_of(built.optimizer)
        checkpoints.require_space(built.parameters, moments=moments, matrices=matrices)
    # Only now: until here a signal ends the process, and a run that could not start leaves nothing behind.
    interruption = after.interruption if after else Interruption()
    if lock:
        _claim_folder(loaded.recipe, world, built.mesh, console, clock, lock)
        on_main(world, lambda: begin.note_origin(loaded.recipe))
    if clock.step < recipe.run.steps:  # a finished run reads nothing more, and has its list
        loader.list_bad_rows_in(recipe.run.folder)
    guard = _guard(recipe, world, built, progress)
    measured = (built.mesh, built.model, clock, console, loader, guard, throughput, progress)
    recorder = Recorder(recipe, world, *measured, after=after)
    recorder.metrics.stage = stage.name
    profiler = after.profiler if after else surroundings.profiler_of(recipe, world, clock, console)
    sampler = surroundings.sampler_of(recipe, world, built, clock, console)
    observers = tuple(observer for observer in (profiler, sampler) if observer is not None)
    start = after.start if after else Start(clock.step, recorder.tokens(clock.step), time.perf_counter())
    kept = Kept(stage.last, built.mesh, interruption, recorder.metrics, recorder.goodput, profiler, start)
    parts = (built, loader, checkpoints, guard, recorder, interruption, observers, description, tasks)
    return Run(recipe, world, console, clock, *parts, stage, kept)


def _guard(recipe: Recipe, world: World, built: Built, progress: Mapping[str, Any]) -> StepGuard:
    guard = StepGuard(
        built.mesh,
        device=world.device,
        max_skipped_steps=recipe.run.max_skipped_steps,
        loss_spike_z=recipe.run.loss_spike_z,
    )
    guard.restore(progress)
    return guard


def _validation_tasks(recipe: Recipe, *parts: Any) -> Callable[[], Mapping[str, float]]:
    if not recipe.validation.tasks:
        return dict
    from recipes.training.tasks import validation_tasks

    return validation_tasks(recipe, *parts)


def _mesh_of(recipe: Recipe, world: World, after: Kept | None) -> Mesh | None:
    """The mesh of the stage before, if it fits; None = a new one."""
    degrees = recipe.mesh.fit(world.size, nodes=len(world.nodes))
    return after.mesh if after and after.mesh.degrees == degrees else None


def _claim_folder(
    recipe: Recipe, world: World, mesh: Mesh, console: Console, clock: RunClock, lock: FolderLock
) -> None:
    about = surroundings.environment_of(world, mesh, console)
    for note in on_main(world, lambda: claim_run_folder(recipe, done=clock.step, environment=about, lock=lock)):
        console.log(note)
    console.open_log(recipe.run.folder / LOG_FILE)


def build(recipe: Recipe, world: World, *, weights: Weights | None = None, mesh: Mesh | None = None) -> Built:
    """Build the parallel model of a recipe and its optimizer, on this process's device.

    weights: trained weights to start from; None = random ones from the recipe's seed. mesh: None makes the recipe's.
    Raises UserError, on all processes, for weights that cannot be read and for what this device does not have.
    """
    if mesh is None:
        degrees = recipe.mesh.fit(world.size, nodes=len(world.nodes))
        mesh = build_mesh(degrees, device_type=world.device.type)
    fsdp = without_idle_resharding(mesh, recipe.fsdp, float8_gathers=recipe.float8.all_gather)
    model = _plain_model(recipe, device_type=world.device.type)
    report = [f"blocks: {model.about}"] if of_transformers(recipe.model) else []
    report += placement(mesh.degrees, world.nodes)
    report += [f"GPU memory: {allocator_settings()}"] if world.device.type == "cuda" else []
    report += choose_attention(recipe.attention, device_type=world.device.type)
    report += advice(recipe.mesh, float8=recipe.float8, degrees=mesh.degrees)
    report += parallelize(
        model,
        mesh,
        float8=recipe.float8,
        activation_checkpointing=recipe.activation_checkpointing,
        compile=recipe.compile,
        fsdp=fsdp,
        context_by=recipe.mesh.context_by,
        overlap_tensor=recipe.mesh.overlap_tensor,
    )
    keep_on = torch.device("cpu") if fsdp.cpu_offload else None
    try:
        materialize(model, device=world.device, keep_on=keep_on, seed=recipe.run.seed)
    except ValueError as error:  # only asking shows which values a model of transformers does not start from
        raise UserError(f"model: {error}") from error
    compute_with_whole_shards(model, mesh, fsdp)
    if weights is not None:
        from recipes.weights.convert import load_weights

        on_all(world, lambda: load_weights(model, weights))
    optimizer = build_optimizer(model, recipe.optimizer, mesh, dtype=getattr(torch, fsdp.param_dtype))
    if matrices := matrices_of(optimizer):
        report.append(f"muon: {len(matrices)} matrices of the blocks, {fsdp.param_dtype} products")
    return Built(
        mesh,
        model,
        units=units_of(model),
        optimizer=optimizer,
        parameters=tuple(model.parameters()),
        roles=_roles(model) if recipe.metrics.grad_norms else {},
        z_loss=recipe.optimizer.z_loss,
        grad_clip=recipe.optimizer.grad_clip,
        reshard_after_forward=fsdp.reshard_after_forward,
        float8_all_gather=recipe.float8.all_gather,
        dropout_seed=recipe.run.seed if interface_of(model).draws_random else None,
        report=tuple(report),
    )


def _roles(model: nn.Module) -> dict[str, tuple[nn.Parameter, ...]]:
    from models.roles import parameters_by_role

    return parameters_by_role(model)


def _plain_model(recipe: Recipe, *, device_type: str) -> nn.Module:
    """The model on the meta device. Raises UserError for one of transformers that cannot be trained as asked."""
    try:
        with torch.device("meta"):
            model = build_model(recipe.model, loss_chunks=recipe.batch.loss_chunks, z_loss=recipe.optimizer.z_loss)
        if of_transformers(recipe.model):
            from models.assumptions import require_sound_recomputation
            from models.transformers import require_documents_apart, require_kernels

            if device_type == "cpu" and recipe.compile.enabled and recipe.activation_checkpointing.mode != "none":
                require_sound_recomputation(model)
            require_kernels(recipe.model, backend=recipe.attention.backend)
            packs_pairs = recipe.data.has_pairs and not recipe.model.is_encoder_decoder
            if recipe.data.document_mask or packs_pairs:
                require_documents_apart(recipe.model)
    except ValueError as error:
        raise UserError(f"model: {error}") from error
    return model


def _describe(
    recipe: Recipe, loader: DataLoader, weights: Weights | None, begin: Beginning, console: Console
) -> Description:
    start = weights if recipe.model.weights else None
    if start is None and begin.checkpoint is not None:  # weights that an earlier start named, perhaps
        start = find_weights(begin.checkpoint)
    length = recipe.batch.sequence_length
    found = trained_description(recipe.model, loader.tokenizer, start, length=length, log=console.log)
    if loader.pairing is None or not loader.pairing.format.template:
        return found
    from recipes.data.text.chat import TEMPLATE

    return replace(found, companions={**found.companions, TEMPLATE: loader.pairing.format.template})


def _open_data(
    recipe: Recipe,
    world: World,
    mesh: Mesh,
    weights: Weights | None,
    begin: Beginning,
    console: Console,
    several: frozenset[str],
) -> DataLoader:
    """The data of a stage. several: the sources that the whole run reads at several lengths."""

    def tokenizer() -> str | Tokenizer:
        spec = recipe.data.tokenizer
        if begin.checkpoint is not None and spec.startswith("train:"):  # on other text it would be another one
            return find_weights(begin.checkpoint).tokenizer
        return weights.tokenizer if weights and spec == FROM_WEIGHTS else spec

    pairing = None
    if recipe.data.has_pairs:
        from recipes.weights.pairing import pairing_of

        pairing = pairing_of(recipe.data, recipe.model, weights)
    return DataLoader(
        recipe.data,
        recipe.batch,
        world=world,
        data_rank=mesh.data_rank,
        data_ranks=mesh.data_ranks,
        seed=recipe.run.seed,
        vocabulary=recipe.model.vocabulary,
        tokenizer=tokenizer,
        resumed_data_state=partial(resumed_data_state, begin.checkpoint),
        log=console.log,
        validation=recipe.validation.texts,
        pairing=pairing,
        at_several_lengths=several,
    )
