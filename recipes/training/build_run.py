"""Builds a run that is ready for its first step from a recipe. The order of the calls is the order of the build."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from models.config import FROM_WEIGHTS
from parallel.dist import World, on_main, on_main_first
from parallel.errors import TemporaryError
from parallel.mesh import Mesh
from recipes.data.loader import DataLoader, DataSettings
from recipes.data.text.tokenizer import Tokenizer
from recipes.files.atomic import utc_now
from recipes.files.layout import CHECKPOINTS, LOG_FILE, SAVED
from recipes.files.lock import FolderLock
from recipes.files.reading import names_in
from recipes.metrics.throughput import Throughput
from recipes.optimization.optimizer import matrices_of
from recipes.optimization.skip_steps import StepGuard
from recipes.recipe.load import LoadedRecipe
from recipes.recipe.rules_mesh import require_fits_world
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import Stage, at_several_lengths, stage_of, stages_of
from recipes.training import surroundings
from recipes.training.border import Beginning, FellBack, Kept, Process, Start
from recipes.training.build import Built, build
from recipes.training.console import Console, notes, run_header
from recipes.training.interruption import Interruption
from recipes.training.recorder import Recorder
from recipes.training.run_folder import check_output_folder, claim_run_folder, resumed_data_state

if TYPE_CHECKING:
    from recipes.checkpoint.checkpoints import Checkpoints
    from recipes.metrics.float8_samples import CastSampler
    from recipes.metrics.profile import StepProfiler
    from recipes.training.kept_code import KeptCode
    from recipes.weights.description import Description
    from recipes.weights.locate import Weights


@dataclass(frozen=True)
class Run:
    """Everything that the training loop needs."""

    recipe: Recipe
    process: Process
    built: Built
    loader: DataLoader
    checkpoints: "Checkpoints | None"
    """None for a run that neither saves nor resumes."""
    guard: StepGuard
    recorder: Recorder
    interruption: Interruption
    profiler: "StepProfiler | None"
    sampler: "CastSampler | None"
    code: "KeptCode | None"
    tasks: Callable[[], Mapping[str, float]]
    """Evaluates the tasks of the validation: "TASK/METRIC" -> value."""
    stage: Stage
    """The part of the run that this is, whose steps it takes."""
    start: Start

    @property
    def observers(self) -> "tuple[StepProfiler | CastSampler | KeptCode, ...]":
        """What the recipe asks to watch steps with; each is entered around every step."""
        return tuple(observer for observer in (self.code, self.profiler, self.sampler) if observer is not None)

    @property
    def kept(self) -> Kept:
        """What the next stage takes over."""
        return Kept(
            step=self.stage.last,
            mesh=self.built.mesh,
            interruption=self.interruption,
            metrics=self.recorder.metrics,
            goodput=self.recorder.goodput,
            profiler=self.profiler,
            start=self.start,
        )


def build_run(loaded: LoadedRecipe, process: Process, *, after: Kept | None = None) -> Run:
    """Build the stage that is due, from the newest checkpoint; the first one of a process claims the run's folder.

    after: what the stage before it left. Raises UserError, on all processes, for whatever keeps it from starting.
    """
    recipe, world, console = loaded.recipe, process.world, process.console
    build_stage = partial(_build_stage, loaded, process)
    if after:
        try:
            return build_stage(Beginning.own(recipe, after.step), after=after)
        except FellBack as older:
            where = f"the checkpoint of step {after.step}, the end of a stage, is damaged"
            raise TemporaryError(f"{where}; the same command resumes from step {older.step}") from None
    for stage in stages_of(recipe):
        require_fits_world(stage.recipe.mesh, stage.recipe.batch, nodes=world.nodes, pipeline=stage.recipe.pipeline)
    on_main_first(world, lambda: check_output_folder(recipe))
    lock = FolderLock()  # held for as long as this process lives
    begin = on_main(world, lambda: _find_beginning(loaded, lock, console))
    while True:
        try:
            return build_stage(begin, lock=lock)
        except FellBack as older:
            begin = Beginning.own(recipe, older.step)


def _find_beginning(loaded: LoadedRecipe, lock: FolderLock, console: Console) -> Beginning:
    """What the first stage of this process begins from. Raises what find_beginning() does.

    Locks the run's folder if it exists. If it does not, nothing in it counts: another process may be creating it.
    """
    recipe, names = loaded.recipe, list[str]()
    if lock.take(recipe.run.folder, log=console.log):
        check_output_folder(recipe)  # again: it may have changed until it was locked
        names = names_in(recipe.run.folder)
    if not recipe.run.continue_from and not {CHECKPOINTS, SAVED} & {*names}:
        return Beginning()
    from recipes.training.resume import find_beginning

    return find_beginning(loaded, names, console)


def _weights_for(loaded: LoadedRecipe, begin: Beginning) -> "Weights | None":
    """What load() found; looked up again only if that was a checkpoint of this run that has been set aside since, or if
    the run begins as a fork."""
    found, recipe = loaded.weights, loaded.recipe
    stale = found is not None and begin.checkpoint is None and recipe.run.folder in found.path.parents
    assert found is not None or not recipe.model.weights, "a recipe whose weights load_run() has not located"
    if begin.of_trunk and begin.checkpoint is not None:
        from recipes.weights.locate import find_weights

        return find_weights(begin.checkpoint)
    if stale:
        from recipes.weights.locate import initial_weights

        return initial_weights(recipe.model.weights, recipe.run.folder)
    return found


def _build_stage(
    loaded: LoadedRecipe,
    process: Process,
    begin: Beginning,
    *,
    lock: FolderLock | None = None,
    after: Kept | None = None,
) -> Run:
    """Build the stage that follows this beginning. lock: that of the run's folder, which is claimed; None with `after`.

    Raises FellBack if the checkpoint of this step is damaged and the next older one belongs to another stage.
    """
    stage = stage_of(loaded.recipe, begin.step)
    recipe, world, console, clock = stage.recipe, process.world, process.console, process.clock
    if begin.checkpoint is not None:  # every process reads some of its files
        from recipes.checkpoint.together import wait_for_small_files

        wait_for_small_files(begin.checkpoint, world)
    weights = _weights_for(loaded, begin)
    starts_from = weights if recipe.model.weights and begin.checkpoint is None else None
    built = build(recipe, world, weights=starts_from, mesh=_mesh_of(recipe, world, after))
    clock.part = _part_of_pipeline(built.mesh)
    throughput = surroundings.throughput(recipe, world)
    _log_header(stage, process, built=built, throughput=throughput, starts_from=starts_from)
    loader = _open_data(recipe, process, built.mesh, weights, begin, several=at_several_lengths(loaded.recipe))
    describe = cache(partial(_describe, recipe, loader, weights, begin, console))
    tasks = _validation_tasks(recipe, process, built, describe()) if recipe.validation.tasks else dict
    checkpoints, progress = _resume(recipe, built, loader, describe, begin, console)
    clock.step = progress.get("step", 0)
    if stage_of(loaded.recipe, clock.step).number != stage.number:
        loader.close()
        raise FellBack(clock.step)
    _require_space(checkpoints, built, recipe, done=clock.step)
    # Only now: until here a signal ends the process, and a run that could not start leaves nothing behind.
    interruption = after.interruption if after else Interruption()
    if lock:
        _claim_folder(loaded.recipe, process, built, lock, begin)
    if clock.step < recipe.run.steps:  # a finished run reads nothing more, and has its list
        loader.list_bad_rows_in(recipe.run.folder)
    guard = _guard(recipe, world, built, progress)
    recorder = Recorder(
        recipe, process, built, loader, guard=guard, throughput=throughput, progress=progress, after=after
    )
    recorder.metrics.stage = stage.name
    return Run(
        recipe=recipe,
        process=process,
        built=built,
        loader=loader,
        checkpoints=checkpoints,
        guard=guard,
        recorder=recorder,
        interruption=interruption,
        profiler=after.profiler if after else surroundings.profiler_of(recipe, process),
        sampler=surroundings.sampler_of(recipe, process, built),
        code=surroundings.code_of(recipe, process, built.mesh),
        tasks=tasks,
        stage=stage,
        start=after.start if after else Start(clock.step, recorder.tokens(clock.step), time.perf_counter()),
    )


def _part_of_pipeline(mesh: Mesh) -> str:
    """Words for what this process has of the model; "" without a pipeline."""
    axis = mesh.pipeline
    return f" (place {axis.get_local_rank() + 1} of {axis.size()} in its pipeline)" if axis is not None else ""


def _log_header(
    stage: Stage, process: Process, *, built: Built, throughput: Throughput, starts_from: "Weights | None"
) -> None:
    process.clock.name_start("model")  # whatever follows it
    header, console = run_header(stage, built.mesh.degrees, throughput, built.report), process.console
    started = f"  started: {utc_now()}"
    for line in (*header, started, *surroundings.predicted_memory(stage.recipe, built.mesh, process.world.device)):
        console.log(line, style=None if line.startswith(" ") else "bold")
    if starts_from is not None:
        console.log(f"weights from {starts_from.path}")
        if stage.recipe.model.upcycle:
            console.log("upcycling: each expert begins as the dense feed-forward of these weights, routers at random")


def _require_space(checkpoints: "Checkpoints | None", built: Built, recipe: Recipe, *, done: int) -> None:
    if checkpoints and recipe.checkpoint.every and done < recipe.run.steps:
        parameters, matrices = built.passes.counted(built.parameters), matrices_of(built.optimizer)
        checkpoints.require_space(parameters, recipe.optimizer, matrices=matrices)


def _guard(recipe: Recipe, world: World, built: Built, progress: Mapping[str, Any]) -> StepGuard:
    guard = StepGuard(
        built.mesh,
        device=world.device,
        max_skipped_steps=recipe.run.max_skipped_steps,
        loss_spike_z=recipe.run.loss_spike_z,
    )
    guard.restore(progress)
    return guard


def _mesh_of(recipe: Recipe, world: World, after: Kept | None) -> Mesh | None:
    """The mesh of the stage before, if it fits; None = a new one."""
    degrees = recipe.mesh.fit(world.size, nodes=len(world.nodes))
    return after.mesh if after and after.mesh.degrees == degrees else None


def _claim_folder(recipe: Recipe, process: Process, built: Built, lock: FolderLock, begin: Beginning) -> None:
    world, console, done = process.world, process.console, process.clock.step
    about = surroundings.environment_of(process, built.mesh, attention=built.attention)
    for note in on_main(world, lambda: claim_run_folder(recipe, done=done, environment=about, lock=lock)):
        console.log(note)
    console.open_log(recipe.run.folder / LOG_FILE)
    on_main(world, lambda: begin.note_origin(recipe))


def _describe(
    recipe: Recipe, loader: DataLoader, weights: "Weights | None", begin: Beginning, console: Console
) -> "Description":
    from recipes.weights.locate import find_weights, trained_description

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
    process: Process,
    mesh: Mesh,
    weights: "Weights | None",
    begin: Beginning,
    *,
    several: frozenset[str],
) -> DataLoader:
    """The data of a stage. several: the sources that the whole run reads at several lengths."""

    def tokenizer() -> str | Tokenizer:
        spec = recipe.data.tokenizer
        if begin.checkpoint is not None and spec.startswith("train:"):  # on other text it would be another one
            from recipes.weights.locate import find_weights

            return find_weights(begin.checkpoint).tokenizer
        return weights.tokenizer if weights and spec == FROM_WEIGHTS else spec

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
    resumed = partial(resumed_data_state, begin.checkpoint)
    loader = DataLoader(settings, process.world, mesh, resumed_data_state=resumed, log=process.console.log)
    for line in notes(recipe, entries=loader.tokenizer.vocabulary):
        process.console.log(line)
    return loader


def _resume(
    recipe: Recipe,
    built: Built,
    loader: DataLoader,
    describe: "Callable[[], Description]",
    begin: Beginning,
    console: Console,
) -> "tuple[Checkpoints | None, Mapping[str, Any]]":
    """The checkpoints of a run that saves or resumes, and what the one that it begins from records of the run."""
    if not recipe.checkpoint.every and begin.checkpoint is None:
        return None, {}
    from recipes.training.resume import open_checkpoints, resume

    checkpoints = open_checkpoints(recipe, loader, describe(), console)
    return checkpoints, resume(recipe, built, loader, checkpoints, begin, console)


def _validation_tasks(
    recipe: Recipe, process: Process, built: Built, description: "Description"
) -> Callable[[], Mapping[str, float]]:
    """Load the tasks with their data. Returns what evaluates them: "TASK/METRIC" -> value, equal on all processes.

    Raises UserError, on all processes, for a task that is not there or that this model cannot answer. The model looks
    at as many tokens as the run's sequences have: it is not trained for more.
    """
    from recipes.evaluation.tasks import harness
    from recipes.recipe.rules_tasks import require_row

    tests, validation, batch, world = harness(), recipe.validation, recipe.batch, process.world
    limit = validation.task_limit or None
    tasks = on_main_first(world, lambda: tests.load_tasks(validation.tasks, limit=limit))
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
