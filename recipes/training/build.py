"""From a recipe to a run that is ready for its first step. The order of the calls is the order of the build."""

import json
from collections.abc import Mapping
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
from parallel.errors import UserError
from parallel.float8 import precompute_scales
from parallel.fsdp import compute_with_whole_shards, has_nothing_to_reduce, units_of, without_idle_resharding
from parallel.kernels import choose_attention
from parallel.materialize import materialize
from parallel.mesh import Mesh, build_mesh
from parallel.nodes import placement
from parallel.order import parallelize
from recipes.data.loader import DataLoader
from recipes.data.text.tokenizer import Tokenizer
from recipes.files.layout import CHECKPOINTS, DATA, LOG_FILE, PROFILE, SAVED, step_folder
from recipes.files.lock import FolderLock
from recipes.files.reading import names_in, read_text
from recipes.load import LoadedRecipe
from recipes.mesh_rules import advice, require_fits_world
from recipes.metrics.clock import RunClock
from recipes.metrics.throughput import Throughput
from recipes.optimization.optimizer import build_optimizer
from recipes.optimization.skip_steps import StepGuard
from recipes.schema import Recipe
from recipes.training.console import Console, notes, run_header
from recipes.training.environment import environment
from recipes.training.interruption import Interruption
from recipes.training.recorder import Recorder
from recipes.training.run_folder import check_output_folder, claim_run_folder, require_same_data, resumed_data_state
from recipes.weights.locate import (
    FROM_WEIGHTS,
    Description,
    Weights,
    checkpoint_files,
    find_weights,
    initial_weights,
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
    """The modules whose weights FSDP gathers together: the model itself, its blocks, perhaps embedding and head."""
    optimizer: Optimizer
    parameters: tuple[nn.Parameter, ...]
    """Those of the model, as sharding left them."""
    reduces_gradients: bool
    """Whether other processes have a part of the gradients."""
    # The next three are as in the recipe, but nothing is resharded where that frees nothing.
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


def build_run(loaded: LoadedRecipe, world: World, console: Console, clock: RunClock) -> Run:
    """Build a run, and claim its folder. Raises UserError, on all processes, for whatever keeps it from starting."""
    recipe, folder = loaded.recipe, loaded.recipe.run.folder
    require_fits_world(recipe.mesh, recipe.batch, nodes=world.nodes)
    on_main_first(world, lambda: check_output_folder(recipe))
    lock = FolderLock()  # held for as long as this process lives
    on_main(world, lambda: lock.take(folder, log=console.log))
    resume_step = on_main(world, lambda: _newest_checkpoint(recipe, console))
    weights = _weights(loaded, resumes=resume_step is not None)
    assert weights is not None or not recipe.model.weights, "a recipe whose weights load_run() has not located"
    starts_from = weights if recipe.model.weights and resume_step is None else None
    built = build(recipe, world, weights=starts_from)
    throughput = _throughput(recipe, world)
    header = run_header(recipe, built.mesh.degrees, throughput, built.report)
    for line in (*header, *_predicted_memory(recipe, built.mesh, world.device)):
        console.log(line, style=None if line.startswith(" ") else "bold")
    if starts_from is not None:
        console.log(f"weights from {starts_from.path}")
    loader = _open_data(recipe, world, built.mesh, weights, resume_step, console)
    for line in notes(recipe, entries=loader.tokenizer.vocabulary):
        console.log(line)
    description = _describe(recipe, loader, weights, resume_step, console)
    checkpoints = _open_checkpoints(recipe, loader, description, resume_step, console)
    guard = StepGuard(
        built.mesh,
        device=world.device,
        max_skipped_steps=recipe.run.max_skipped_steps,
        loss_spike_z=recipe.run.loss_spike_z,
    )
    progress = _resume(recipe, built, loader, checkpoints, resume_step)
    guard.restore(progress)
    clock.step = progress.get("step", 0)
    if checkpoints and recipe.checkpoint.every and clock.step < recipe.run.steps:
        checkpoints.require_space(built.parameters, moments=getattr(torch, recipe.optimizer.state_dtype))
    # Only now: until here a signal ends the process, and a run that could not start leaves nothing behind.
    interruption = Interruption()
    about = _environment(world, built.mesh, console)
    for note in on_main(world, lambda: claim_run_folder(recipe, done=clock.step, environment=about, lock=lock)):
        console.log(note)
    console.open_log(folder / LOG_FILE)
    if clock.step < recipe.run.steps:  # a finished run reads nothing more, and has its list
        loader.list_bad_rows_in(folder)
    recorder = Recorder(recipe, world, built.mesh, built.model, clock, console, loader, guard, throughput, progress)
    observers = _observers(recipe, world, built, clock, console)
    return Run(
        recipe,
        world,
        console,
        clock,
        built,
        loader,
        checkpoints,
        guard=guard,
        recorder=recorder,
        interruption=interruption,
        observers=observers,
        description=description,
    )


def _predicted_memory(recipe: Recipe, mesh: Mesh, device: torch.device) -> list[str]:
    """Lines for the log about the peak of a step on a GPU."""
    if device.type != "cuda":
        return []
    if of_transformers(recipe.model):
        return ["memory: as train.py RECIPE --check predicts it, which takes longer than a run should wait"]
    from recipes.plan.memory import predict, summary

    return summary(predict(recipe, mesh.degrees), torch.cuda.get_device_properties(device).total_memory)


def _environment(world: World, mesh: Mesh, console: Console) -> dict[str, Any]:
    """What environment.json records; with several processes, also the speed of what connects them."""
    about = environment(world_size=world.size, device=world.device)
    if world.size == 1:
        return about
    from recipes.cluster.axes import measure_axes, summary

    found = measure_axes(world, mesh)
    for line in summary(found, world):
        console.log(line)
    return about | {"preflight": found}


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
    return Built(
        mesh,
        model,
        units=units_of(model),
        optimizer=build_optimizer(model, recipe.optimizer),
        parameters=tuple(model.parameters()),
        grad_clip=recipe.optimizer.grad_clip,
        reshard_after_forward=fsdp.reshard_after_forward,
        reduces_gradients=not has_nothing_to_reduce(mesh, fsdp),
        float8_all_gather=recipe.float8.all_gather,
        dropout_seed=recipe.run.seed if interface_of(model).draws_random else None,
        report=tuple(report),
    )


def _plain_model(recipe: Recipe, *, device_type: str) -> nn.Module:
    """The model on the meta device. Raises UserError for one of transformers that cannot be trained as asked."""
    try:
        with torch.device("meta"):
            model = build_model(recipe.model, loss_chunks=recipe.batch.loss_chunks)
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
    recipe: Recipe, loader: DataLoader, weights: Weights | None, resume_step: int | None, console: Console
) -> Description:
    start = weights if recipe.model.weights else None
    if start is None and resume_step is not None:  # weights that an earlier start named, perhaps
        start = find_weights(step_folder(recipe.run.folder / CHECKPOINTS, resume_step))
    length = recipe.batch.sequence_length
    found = trained_description(recipe.model, loader.tokenizer, start, length=length, log=console.log)
    if loader.pairing is None or not loader.pairing.format.template:
        return found
    from recipes.data.text.chat import TEMPLATE

    return replace(found, companions={**found.companions, TEMPLATE: loader.pairing.format.template})


def _newest_checkpoint(recipe: Recipe, console: Console) -> int | None:
    """The step of the newest whole checkpoint of this run, None if there never was one. Sets damaged ones aside.

    Raises UserError if there were some but none is whole, TemporaryError if this cannot be determined now.
    """
    folder, names = recipe.run.folder / CHECKPOINTS, names_in(recipe.run.folder)
    if not {CHECKPOINTS, SAVED} & {*names}:
        return None
    from recipes.checkpoint.folder import newest_whole, none_left

    step = newest_whole(folder, log=console.log)
    if SAVED in names:
        saved = read_text(recipe.run.folder / SAVED, errors="replace")
        if step is None:
            known = saved if saved.isdecimal() else "unknown, as .saved is damaged"
            raise UserError(none_left(folder, [f"the newest was of step {known}"]))
        if saved.isdecimal() and int(saved) > step:  # a kill between the two leaves an older one
            console.log(f"the newest checkpoint was of step {saved}; the newest intact one now is of step {step}")
    return step


def _weights(loaded: LoadedRecipe, *, resumes: bool) -> Weights | None:
    """What load() found; looked up again only if that was a checkpoint of this run that has been set aside since."""
    found, recipe = loaded.weights, loaded.recipe
    stale = found is not None and not resumes and recipe.run.folder in found.path.parents
    return initial_weights(recipe.model.weights, recipe.run.folder) if stale else found


def _throughput(recipe: Recipe, world: World) -> Throughput:
    batch, length = recipe.batch.global_batch_size, recipe.batch.sequence_length
    sizes = {"tokens_per_step": batch * length, "sequence_length": length, "devices": world.size}
    return Throughput(recipe.model, **sizes, device=world.device)


def _open_data(
    recipe: Recipe, world: World, mesh: Mesh, weights: Weights | None, resume_step: int | None, console: Console
) -> DataLoader:
    def tokenizer() -> str | Tokenizer:
        spec = recipe.data.tokenizer
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
        resumed_data_state=partial(resumed_data_state, recipe.run.folder, resume_step),
        log=console.log,
        validation=recipe.validation.texts,
        pairing=pairing,
    )


def _open_checkpoints(
    recipe: Recipe, loader: DataLoader, description: Description, resume_step: int | None, console: Console
) -> "Checkpoints | None":
    if recipe.checkpoint.every == 0 and resume_step is None:
        return None
    from recipes.checkpoint.checkpoints import Checkpoints

    return Checkpoints(
        recipe.run.folder / CHECKPOINTS,
        keep=recipe.checkpoint.keep,
        keep_every=recipe.checkpoint.keep_every,
        asynchronous=recipe.checkpoint.asynchronous,
        log=console.log,
        files=checkpoint_files(description) | {DATA: json.dumps(loader.data_state, indent=2) + "\n"},
        mark=recipe.run.folder / SAVED,
    )


def _resume(
    recipe: Recipe, built: Built, loader: DataLoader, checkpoints: "Checkpoints | None", step: int | None
) -> Mapping[str, Any]:
    """Load the newest checkpoint of this run, if there is one. Returns what it records of the run so far."""
    if checkpoints is None or step is None:
        return {}
    check = partial(require_same_data, data_state=loader.data_state)
    progress = checkpoints.resume(built.model, built.optimizer, step=step, check=check)
    if progress["step"] < recipe.run.steps:  # a finished run reads nothing more
        loader.require_trained_on(progress.get("trained_on", {}), batches=progress["step"])
    if built.float8_all_gather:
        precompute_scales(built.model)
    return progress


def _observers(
    recipe: Recipe, world: World, built: Built, clock: RunClock, console: Console
) -> "tuple[StepProfiler | CastSampler, ...]":
    found: list[Any] = []
    folder, log = recipe.run.folder, console.log
    if recipe.profile.trace_steps:
        from recipes.metrics.profile import StepProfiler

        found.append(StepProfiler(recipe.profile, world, folder=folder / PROFILE, clock=clock, log=log))
    if recipe.float8.sample_every:
        from recipes.metrics.float8_samples import CastSampler

        found.append(CastSampler(built.model, recipe.float8, world, folder, mesh=built.mesh, clock=clock, log=log))
    return tuple(found)
