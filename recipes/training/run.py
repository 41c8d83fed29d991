"""One run in one process: what the launcher starts, and how it ends."""

import gc
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch

from parallel.dist import World, lost_a_peer, start, stop
from parallel.errors import UserError
from recipes.cluster.reports import add_failure
from recipes.cluster.watchdog import SLOW_LIMIT, Watchdog
from recipes.data.text.sources import is_prepared
from recipes.files.exit_codes import CANNOT_WRITE, FAILED, FINISHED, OUT_OF_MEMORY, PREEMPTED, exit_code
from recipes.metrics.clock import START, RunClock
from recipes.recipe.load import LoadedRecipe, to_toml
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import stage_of, stages_of
from recipes.training.build_run import build_run
from recipes.training.console import Console
from recipes.training.interruption import forget_signals
from recipes.training.process import Process
from recipes.training.trainer import Trainer

WITHOUT_PEER = 15.0
"""Seconds until a process that has lost another one shows its traceback, which would hide the other's error: until then
its launcher ends it. After a signal to another node's, that gives it 10 s to end by itself."""


def train(loaded: LoadedRecipe, *, began: float) -> int:
    """Run a recipe in this process, one of those the launcher started.

    began: when the process started, by time.monotonic(). Returns the exit code, see recipes/files/exit_codes.py; leave
    with it, or after an error, at once, as the process group of several may still exist: see stop().
    A UserError that concerns all ranks is printed once, by rank 0.
    """
    folder, limit, imported = loaded.recipe.run.folder, loaded.recipe.run.hang_timeout, time.monotonic()
    world = _join(loaded.recipe)
    clock = RunClock(world.device, began=began)
    clock.name_start("imports", imported)
    watchdog = Watchdog(clock, world, timeout=limit, folder=folder)
    try:
        with Console(silent=not world.is_main) as console:
            if world.size > 1:
                _preflight(loaded.recipe, world, console)
            clock.name_start("joining")
            if loaded.recipe.checkpoint.remote:
                from recipes.training.fetch import fetch_newest

                loaded = fetch_newest(loaded, world, log=console.log)
            code = train_stages(loaded, Process(world, console, clock))
        if code == FINISHED:  # the other codes may be of this rank alone, as after a signal in the midst of a step
            stop()
        return code
    except UserError as error:
        forget_signals()
        if clock.now != START:
            text, code = f"rank {world.rank}: {error}", exit_code(error)
            add_failure(folder, text, clock, rank=world.rank, code=code, error=str(error))
        if world.is_main:
            raise
        # Rank 0 most likely prints the same error, and then the launcher ends the others: give it time to do so.
        time.sleep(10)
        raise type(error)(f"rank {world.rank}: {error}") from None
    except Exception as error:
        forget_signals()
        from recipes.training.out_of_memory import out_of_memory, report

        if cause := out_of_memory(error):
            report(cause, stage_of(loaded.recipe, clock.step).recipe, world, clock)
            return OUT_OF_MEMORY
        if lost_a_peer(error):
            time.sleep(WITHOUT_PEER)
        text = f"rank {world.rank} failed after step {clock.step}\n{traceback.format_exc().rstrip()}"
        add_failure(folder, text, clock, rank=world.rank, code=FAILED, error=f"{type(error).__name__}: {error}")
        raise
    finally:
        if world.size == 1:  # nobody to wait for; whoever called this may train again
            stop()
        watchdog.close()


def _join(recipe: Recipe) -> World:
    limit = recipe.run.hang_timeout
    try:
        return start(
            recipe.run.device,
            seed=recipe.run.seed,
            deterministic=recipe.run.deterministic,
            # The watchdog acts first and knows more: torch's 10 minutes on CUDA are less than a first step may take.
            timeout=timedelta(seconds=SLOW_LIMIT + 2 * limit) if limit else None,
            flight_recorder=recipe.run.folder / "flight-recorder-",
        )
    except Exception as error:
        if lost_a_peer(error):
            time.sleep(WITHOUT_PEER)
        raise


def train_stages(loaded: LoadedRecipe, process: Process) -> int:
    """Train stage after stage, each from the checkpoint at the end of the one before. Returns the exit code."""
    run = build_run(loaded, process)
    while (code := Trainer(run).run()) is None:
        process, step = run.process, run.stage.last
        if run.checkpoints:
            run.checkpoints.finish_copies()
        if run.memory:
            run.memory.end(keep=False)
        del run
        _free_memory()
        run = build_run(loaded, process, after=step)
    if run.checkpoints:
        left = run.process.interruption.leaves.is_set
        if not run.checkpoints.finish_copies(soon=code == PREEMPTED, stop=left) and code == FINISHED:
            code = CANNOT_WRITE
    if run.process.beside:
        run.process.beside.end(finished=code == FINISHED)
    return code


def _free_memory() -> None:
    """Free what the stage that has ended held: its model and moments, and the code compiled for them."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _preflight(recipe: Recipe, world: World, console: Console) -> None:
    from recipes.cluster.links import groups_along
    from recipes.cluster.preflight import preflight

    recipes = [stage.recipe for stage in stages_of(recipe)]
    texts = [text for each in recipes for text in (*each.data.sources, *filter(None, each.validation.texts.values()))]
    cache = None if all(map(is_prepared, texts)) else Path(recipe.data.cache)
    mesh = recipe.mesh
    groups = groups_along(pipeline=mesh.pipeline, context=mesh.context, tensor=mesh.tensor, processes=world.size)
    preflight(recipe.run.folder, world, recipe=to_toml(recipe), cache=cache, groups=groups, log=console.log)
