"""The evaluation of a run's checkpoints beside it, by processes of their own: `scripts/evaluate.py RUN --pending`."""

import json
import os
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import Any

from parallel.config import AttentionConfig, CompileConfig, MeshConfig, PipelineConfig
from parallel.dist import World, on_main, start, stop
from parallel.errors import UserError
from recipes.checkpoint.files import read_manifest
from recipes.evaluation.beside import BEGAN, FAILED, RESULT, copied, uncopied, waiting
from recipes.evaluation.config import TASK
from recipes.evaluation.losses import mean_loss
from recipes.files.atomic import Lines, utc_now
from recipes.files.exit_codes import FINISHED
from recipes.files.layout import CHECKPOINTS, EVALUATIONS, METRICS, RECIPE, step_folder
from recipes.files.lock import FolderLock, alone
from recipes.files.reading import logged_rows
from recipes.files.screen import say
from recipes.metrics.clock import RunClock
from recipes.plugins.loading import activate
from recipes.recipe.load import load
from recipes.recipe.rules_mesh import require_fits_world
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import at_several_lengths, stage_of
from recipes.training.build import build
from recipes.training.build_run import open_loader, validation_tasks
from recipes.training.console import Console
from recipes.training.process import Process
from recipes.training.resume import describe
from recipes.training.run_folder import Report, step_of
from recipes.weights.locate import find_weights


def evaluate_waiting(folder: Path, modules: list[str], *, device: str, attempts: int) -> int:
    """Evaluate the checkpoints of a run that have no result and have failed less often than this, one after the other.

    Waits while another process does so. Results go to evaluations.jsonl, and to metrics.jsonl: by the run itself, if it
    goes on. modules: plug-ins, if moved. Returns the exit code. Raises UserError if this is no run that asks for it.
    """
    recipe = load(folder / RECIPE, ["--plugins.modules", *modules] * bool(modules), rules=False)
    activate(recipe.loads)
    if not recipe.validation.job:
        raise UserError(f'{folder}: the recipe.toml of this run has validation.job = "": nothing waits')
    world = start(device, seed=0, timeout=timedelta(days=7))  # rank 0 may wait for long, and the others for it
    lines, tried = Lines(folder / EVALUATIONS, log=say), set[int]()

    def note(step: int, kind: str, value: Any) -> None:
        if world.is_main:
            lines.append(json.dumps({"step": step, kind: value, "time": utc_now()}))

    def begin() -> int | None:
        if (step := next((step for step in waiting(folder, attempts) if step not in tried), None)) is not None:
            say(f"evaluating step {step} on {world.size} x {world.device.type}")
            note(step, BEGAN, os.getpid())
        return step

    with alone(folder / ".evaluating") if world.is_main else nullcontext():
        for step, row in {row["step"]: row for row in logged_rows(folder / EVALUATIONS)}.items():
            if BEGAN in row:  # nobody else evaluates
                note(step, FAILED, "the process that evaluated it was ended")
        while (step := on_main(world, begin)) is not None:
            tried.add(step)
            try:
                checkpoint = step_folder(folder / CHECKPOINTS, step)
                identity = checkpoint.stat().st_ino
                columns = evaluate(recipe, checkpoint, world)
                if checkpoint.stat().st_ino == identity:  # else a run that began anew has made another one
                    note(step, RESULT, columns)
            except Exception as error:
                note(step, FAILED, f"{type(error).__name__}: {error}".splitlines()[0])
                if world.size > 1 or not isinstance(error, UserError):  # on this process alone, perhaps
                    raise
                say(error)
    stop()
    if world.is_main:
        with suppress(UserError):  # the run goes on, and copies them
            (lock := FolderLock()).take(folder, log=say)
            rows = [row | {"time": utc_now()} for row in uncopied(logged_rows(folder / EVALUATIONS), copied(folder))]
            Lines(folder / METRICS, log=say).append(*map(json.dumps, rows))
            lock.release()
            if rows and recipe.metrics.picture:
                Report(folder).write(log=say)
    return FINISHED


def evaluate(recipe: Recipe, checkpoint: Path, world: World) -> dict[str, Any]:
    """The columns of metrics.jsonl of the validation of a checkpoint, as the run would have them at its step."""
    manifest = read_manifest(checkpoint)
    several, stage = at_several_lengths(recipe), stage_of(recipe, step_of(checkpoint) - 1)
    recipe = _here(stage.recipe, world)
    require_fits_world(recipe.mesh, recipe.batch, nodes=world.nodes)
    process, weights = Process(world, Console(silent=True), RunClock(world.device)), find_weights(checkpoint)
    built = build(recipe, world, weights=weights)
    loader = open_loader(recipe, process, built.mesh, weights, checkpoint, several=several)
    found = dict[str, float]()
    try:
        texts = {} if recipe.validation.every else loader.validation_batches(recipe.validation.batches)
        for name, text in texts.items():
            found[f"validation_loss/{name}" if name else "validation_loss"] = mean_loss(
                built.model, text, mesh=built.mesh
            )
        if recipe.validation.tasks:
            description = describe(recipe, loader, weights, checkpoint, log=process.console.log)
            scores = validation_tasks(recipe, process, built, description)()
            found |= {f"{TASK}{name}": score for name, score in scores.items()}
    finally:
        loader.close()
    about = {"tokens": manifest.state["progress"].get("tokens")} | ({"stage": stage.name} if stage.name else {})
    return about | {name: value if isfinite(value) else None for name, value in found.items()}


def _here(recipe: Recipe, world: World) -> Recipe:
    """The recipe for these processes: the same numbers, up to rounding, whatever mesh and machine the run has."""
    on_cpu = world.device.type == "cpu"
    float8 = replace(recipe.float8, all_gather=False, gather_activations=False)
    return replace(
        recipe,
        mesh=MeshConfig(),
        pipeline=PipelineConfig(),
        compile=CompileConfig(),
        attention=AttentionConfig() if on_cpu else recipe.attention,
        float8=replace(float8, emulate=float8.emulate or on_cpu),
        fsdp=replace(recipe.fsdp, symmetric_memory=False, cpu_offload=False),
    )
