"""Builds a run that is ready for its first step from a recipe. The order of the calls is the order of the build."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from models.config import FROM_WEIGHTS
from parallel.dist import World, on_main, on_main_first
from parallel.errors import TemporaryError
from parallel.mesh import Mesh
from recipes.data.loader import DataLoader
from recipes.data.open_data import DataSettings
from recipes.data.text.tokenizer import Tokenizer
from recipes.files.atomic import utc_now
from recipes.files.layout import CHECKPOINTS, END, LOG_FILE, MEMORY, PROFILE, SAVED
from recipes.files.reading import names_in
from recipes.metrics.throughput import Throughput
from recipes.optimization.optimizer import matrices_of
from recipes.optimization.skip_steps import StepGuard
from recipes.recipe.load import LoadedRecipe
from recipes.recipe.rules_mesh import require_fits_world
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import Stage, at_several_lengths, stage_of, stages_of
from recipes.training.build import Built, build
from recipes.training.console import early_notes, run_header
from recipes.training.process import Process
from recipes.training.recorder import Recorder
from recipes.training.run_folder import (
    check_output_folder,
    claim_run_folder,
    is_in_memory,
    is_of_trunk,
    own_checkpoint,
    step_of,
)

if TYPE_CHECKING:
    from recipes.checkpoint.checkpoints import Checkpoints
    from recipes.checkpoint.memory import Memory
    from recipes.evaluation.beside import Beside
    from recipes.metrics.profile import StepProfiler
    from recipes.weights.description import Description
    from recipes.weights.locate import Weights

    Observer = Beside | StepProfiler


@dataclass(frozen=True)
class Run:
    """Everything that the training loop needs for one stage."""

    process: Process
    stage: Stage
    """The steps that it takes, and the recipe that it takes them with."""
    built: Built
    loader: DataLoader
    checkpoints: "Checkpoints | None"
    """None for a run that neither saves nor resumes."""
    memory: "Memory | None"
    """The copies in the memory of the nodes, if the recipe asks for them."""
    guard: StepGuard
    recorder: Recorder
    observers: "tuple[Observer, ...]"
    """What the recipe asks to watch steps with; each is entered around every step."""
    tasks: Callable[[], Mapping[str, float]]
    """Evaluates the tasks of the validation: "TASK/METRIC" -> value."""


def build_run(loaded: LoadedRecipe, process: Process, *, after: int | None = None) -> Run:
    """Build the stage that is due, from the newest checkpoint; the first one of a process claims the run's folder.

    after: the step at which this process ended the stage before. Raises UserError, on all processes, for whatever keeps
    it from starting.
    """
    recipe, world = loaded.recipe, process.world
    if after is not None:
        if (run := _build_stage(loaded, process, own_checkpoint(recipe, after))) is None:
            where = f"the checkpoint of step {after}, the end of a stage, is damaged"
            raise TemporaryError(f"{where}; the same command resumes from step {process.clock.step}")
        return run
    for stage in stages_of(recipe):
        require_fits_world(stage.recipe.mesh, stage.recipe.batch, nodes=world.nodes, pipeline=stage.recipe.pipeline)
    on_main_first(world, lambda: check_output_folder(recipe))
    checkpoint = on_main(world, lambda: _find_checkpoint(loaded, process))
    if any(stage.recipe.checkpoint.memory_every for stage in stages_of(recipe)):
        from recipes.training.in_memory import newest

        checkpoint = newest(recipe, process, after=step_of(checkpoint)) or checkpoint
    if recipe.profile.trace_steps:
        from recipes.metrics.profile import StepProfiler

        folder, log = recipe.run.folder / PROFILE, process.console.log
        profiler = StepProfiler(recipe.profile, world, folder=folder, clock=process.clock, log=log)
        process = replace(process, profiler=profiler)
    while (run := _build_stage(loaded, process, checkpoint)) is None:
        checkpoint = own_checkpoint(recipe, process.clock.step)
    return run


def _find_checkpoint(loaded: LoadedRecipe, process: Process) -> Path | None:
    """The checkpoint that the first stage of this process begins from. Raises what find_checkpoint() does.

    Locks the run's folder if it exists. If it does not, nothing in it counts: another process may be creating it.
    """
    recipe, names = loaded.recipe, list[str]()
    if process.lock.take(recipe.run.folder, log=process.console.log):
        check_output_folder(recipe)  # again: it may have changed until it was locked
        names = names_in(recipe.run.folder)
        with suppress(OSError):
            (recipe.run.folder / END).unlink()  # of an earlier start
    if not recipe.run.continue_from and not {CHECKPOINTS, SAVED} & {*names}:
        return None
    from recipes.training.resume import find_checkpoint

    return find_checkpoint(loaded, names, log=process.console.log)


def _build_stage(loaded: LoadedRecipe, process: Process, checkpoint: Path | None) -> Run | None:
    """Build the stage that follows this checkpoint; None = the weights of the recipe.

    Returns None if it is damaged, and the next older one, of clock.step now, belongs to another stage.
    """
    stage = stage_of(loaded.recipe, step_of(checkpoint))
    recipe, world, console, clock = stage.recipe, process.world, process.console, process.clock
    weights = weights_for(loaded, checkpoint, world)
    starts_from = weights if recipe.model.weights and checkpoint is None else None
    built = build(recipe, world, weights=starts_from)
    throughput = _throughput(recipe, process)
    _log_header(stage, process, built, throughput, starts_from)
    loader = open_loader(recipe, process, built.mesh, weights, checkpoint, several=at_several_lengths(loaded.recipe))
    tasks: Callable[[], Mapping[str, float]] = dict
    checkpoints: Checkpoints | None = None
    progress: Mapping[str, Any] = {}
    saves = recipe.checkpoint.every > 0 or checkpoint is not None
    if saves or recipe.validation.tasks:
        from recipes.training.resume import describe, resume

        description = describe(recipe, loader, weights, checkpoint, log=console.log)
        if recipe.validation.tasks and not recipe.validation.job:
            tasks = validation_tasks(recipe, process, built, description)
        if saves:
            checkpoints, progress = resume(recipe, built, loader, checkpoint, description, log=console.log)
    clock.step = progress.get("step", 0)
    if stage_of(loaded.recipe, clock.step).number != stage.number:
        loader.close()
        return None
    if checkpoints and recipe.checkpoint.every and clock.step < recipe.run.steps:
        parameters, matrices = built.passes.counted(built.parameters), matrices_of(built.optimizer)
        checkpoints.require_space(parameters, recipe.optimizer, matrices=matrices)
    # Only now: until here a signal ends the process, and a run that could not start leaves nothing behind.
    process.interruption.begin()
    if process.metrics is None:
        _claim_folder(loaded.recipe, process, built, checkpoint)
    if clock.step < recipe.run.steps:  # a finished run reads nothing more, and has its list
        loader.list_bad_rows_in(recipe.run.folder)
    most, spike = recipe.run.max_skipped_steps, recipe.run.loss_spike_z
    guard = StepGuard(built.mesh, device=world.device, max_skipped_steps=most, loss_spike_z=spike)
    guard.restore(progress)
    recorder = Recorder(stage, process, built, loader, guard=guard, throughput=throughput, progress=progress)
    memory = None
    if checkpoints and recipe.checkpoint.memory_every and clock.step < recipe.run.steps:
        from recipes.training.in_memory import memory_of

        memory = memory_of(loaded.recipe, stage, process, built, checkpoint, files=checkpoints.files)
    observers: tuple[Observer, ...] = (process.profiler,) if process.profiler else ()
    beside = process.beside
    if recipe.validation.job and world.is_main:
        from recipes.evaluation.beside import Beside

        job, write = recipe.validation.job, recorder.metrics.write
        beside = beside or Beside(recipe.run.folder, job, log=console.log, write=write)
        observers += (beside,)
    if process.metrics is None:
        process = replace(process, first_step=clock.step, trains_since=time.perf_counter())
    process = replace(process, metrics=recorder.metrics, goodput=recorder.goodput, beside=beside)
    return Run(process, stage, built, loader, checkpoints, memory, guard, recorder, observers, tasks)


def weights_for(loaded: LoadedRecipe, checkpoint: Path | None, world: World) -> "Weights | None":
    """What load() located; looked up again only if that was a checkpoint of this run that has been set aside since, or
    if the run begins as a fork."""
    if checkpoint is not None and not is_in_memory(checkpoint):  # every process reads some of its files
        from recipes.checkpoint.together import wait_for_small_files

        wait_for_small_files(checkpoint, world)
    weights, recipe = loaded.weights, loaded.recipe
    assert weights is not None or not recipe.model.weights, "a recipe whose weights load_run() has not located"
    if checkpoint is not None and is_of_trunk(checkpoint, recipe):
        from recipes.weights.locate import find_weights

        return find_weights(checkpoint)
    if weights is not None and checkpoint is None and recipe.run.folder in weights.path.parents:
        from recipes.weights.locate import initial_weights

        return initial_weights(recipe.model.weights, recipe.run.folder)
    return weights


def _log_header(
    stage: Stage, process: Process, built: Built, throughput: Throughput, starts_from: "Weights | None"
) -> None:
    recipe, device, console = stage.recipe, process.world.device, process.console
    process.clock.name_start("model")  # whatever follows it
    axis = built.mesh.pipeline
    part = "" if axis is None else f" (place {axis.get_local_rank() + 1} of {axis.size()} in its pipeline)"
    process.clock.part = part
    lines = [*run_header(stage, built.mesh.degrees, throughput, built.report), f"  started: {utc_now()}"]
    if device.type == "cuda" and recipe.model.by_transformers:
        lines.append("memory: as train.py RECIPE --check predicts it, which takes longer than a run should wait")
    elif device.type == "cuda" and not recipe.model.uncounted(by_plan=True):
        from recipes.plan.memory import predict, summary

        lines += summary(predict(recipe, built.mesh.degrees), torch.cuda.get_device_properties(device).total_memory)
    for line in lines:
        console.log(line, style=None if line.startswith(" ") else "bold")
    if starts_from is not None:
        console.log(f"weights from {starts_from.path}")
        if recipe.model.upcycle:
            console.log("upcycling: each expert begins as the dense feed-forward of these weights, routers at random")


def _throughput(recipe: Recipe, process: Process) -> Throughput:
    batch, length, world = recipe.batch.global_batch_size, recipe.batch.sequence_length, process.world
    sizes = {"tokens_per_step": batch * length, "sequence_length": length, "devices": world.size}
    return Throughput(recipe.model, **sizes, device=world.device)


def _claim_folder(recipe: Recipe, process: Process, built: Built, checkpoint: Path | None) -> None:
    world, console, done = process.world, process.console, process.clock.step
    about = process.environment(built.mesh, attention=built.attention)
    about |= {"plugins": recipe.versions} if recipe.versions else {}
    for note in on_main(world, lambda: claim_run_folder(recipe, done=done, environment=about, lock=process.lock)):
        console.log(note)
    if world.is_main and not is_in_memory(checkpoint):
        (recipe.run.folder / MEMORY).unlink(missing_ok=True)  # of a start that this one does not go on from
    console.open_log(recipe.run.folder / LOG_FILE)
    if checkpoint is not None and is_of_trunk(checkpoint, recipe):
        from recipes.training.fork import note_origin

        on_main(world, lambda: note_origin(recipe, checkpoint))


def open_loader(
    recipe: Recipe,
    process: Process,
    mesh: Mesh,
    weights: "Weights | None",
    checkpoint: Path | None,
    *,
    several: frozenset[str],
) -> DataLoader:
    """The data of a stage. several: the sources that the whole run reads at several lengths."""

    def tokenizer() -> str | Tokenizer:
        spec = recipe.data.tokenizer
        if checkpoint is not None and spec.startswith("train:"):  # on other text it would be another one
            from recipes.weights.locate import find_weights

            return find_weights(checkpoint).tokenizer
        return weights.tokenizer if weights and spec == FROM_WEIGHTS else spec

    def data_state() -> dict[str, Any]:
        if checkpoint is None:
            return {}
        from recipes.training.same_run import resumed_data_state

        return resumed_data_state(checkpoint)

    pairing = None
    if recipe.data.has_pairs:
        from recipes.weights.pairing import pairing_of

        pairing = pairing_of(recipe.data, recipe.model, weights)
    settings = DataSettings(
        recipe.data,
        recipe.batch,
        seed=recipe.run.seed,
        tokenizer=tokenizer,
        vocabulary=recipe.model.vocabulary,
        validation=recipe.validation.texts,
        pairing=pairing,
        at_several_lengths=several,
    )
    loader = DataLoader(settings, process.world, mesh, resumed_data_state=data_state, log=process.console.log)
    for line in early_notes(recipe, entries=loader.tokenizer.vocabulary):
        process.console.log(line)
    return loader


def validation_tasks(
    recipe: Recipe, process: Process, built: Built, description: "Description"
) -> Callable[[], Mapping[str, float]]:
    """Load the tasks with their data. Returns what evaluates them: "TASK/METRIC" -> value, equal on all processes.

    Raises UserError, on all processes, for a task that is not there or that this model cannot answer. The model looks
    at as many tokens as the run's sequences have: it is not trained for more.
    """
    from recipes.evaluation.tasks import harness
    from recipes.recipe.rules_tasks import require_row

    tests, validation, batch, world = harness(), recipe.validation, recipe.batch, process.world
    tasks = on_main_first(world, lambda: tests.load_tasks(validation.tasks, limit=validation.task_limit or None))
    require_row(recipe.checkpoint.keep_best, tasks.directions)
    model = tests.harness_model(
        tests.Scored(
            built.model,
            built.mesh,
            world.device,
            getattr(torch, recipe.fsdp.param_dtype),
            max_length=batch.sequence_length,
            batch_tokens=batch.micro_batch_size * batch.sequence_length,
            on_batch=process.clock.progressed,
        ),
        description,
    )
    tests.require_answerable(model, tasks)
    return lambda: tests.rows_of(tests.results_of(model, tasks))
