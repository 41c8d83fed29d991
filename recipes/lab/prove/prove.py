"""`train.py RECIPE --prove`: do these processes compute what one process computes?"""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from parallel.dist import World, on_main, start, stop
from parallel.errors import UserError
from recipes.data.batches import MicroBatch
from recipes.files.exit_codes import FINISHED, WRONG
from recipes.files.layout import CHECKPOINTS, step_folder
from recipes.files.layout import SAVED as NEWEST
from recipes.files.reading import user_path
from recipes.files.screen import say
from recipes.lab.prove.compare import EQUAL, limits_of
from recipes.lab.prove.reference import Alone, Record
from recipes.lab.prove.runs import GRADIENT_BAD, LOSS_BAD, SPIKE, Watched, batches_of, run_twin
from recipes.lab.prove.text import write_words
from recipes.lab.prove.twin import SAVED, STEPS, Twin, elsewhere, twins_of
from recipes.lab.prove.verdict import Comparison, Verdict, compared
from recipes.recipe.load import LoadedRecipe
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import stage_of

PATIENCE = timedelta(minutes=20)
"""How long a process waits for another one, which may compile."""
ENDS_AFTER = 10.0
"""Seconds in which rank 0 says for all what is wrong with a recipe, before the others end."""


def prove(loaded: LoadedRecipe, *, as_json: bool, began: float) -> int:
    """Prove a recipe on the processes that the launcher started, and print the verdict. Returns the exit code."""
    recipe = loaded.recipe
    run = recipe.run
    world = start(run.device, seed=run.seed, deterministic=run.deterministic, timeout=PATIENCE)
    try:
        verdict = verdict_on(recipe, world)
    except UserError:
        time.sleep(0 if world.is_main else ENDS_AFTER)
        raise
    if world.is_main:
        seconds = time.monotonic() - began
        say(verdict.json(seconds) if as_json else verdict.text(seconds))
    stop()
    return FINISHED if verdict.is_proved else WRONG


def verdict_on(recipe: Recipe, world: World) -> Verdict:
    """The verdict on a recipe, the same on all processes. Raises UserError for what cannot be proved."""

    def make() -> str:
        output = user_path(recipe.run.output)
        output.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".prove-", dir=output.resolve()))
        write_words(folder)
        return str(folder)

    if world.device.type == "cpu":
        torch.set_num_threads(1)  # tiny matrices wait for other threads
    folder = Path(on_main(world, make))
    twins, comparisons = [], list[Comparison]()
    try:
        nodes = len(world.nodes)
        for twin in twins_of(recipe, folder, processes=world.size, nodes=nodes, device_type=world.device.type):
            twins.append(twin)
            comparisons += _proof_of(twin, world)
            if comparisons[-1].is_wrong:
                break
    finally:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    return Verdict(recipe, world.size, tuple(twins), tuple(comparisons))


def _proof_of(twin: Twin, world: World) -> Iterator[Comparison]:
    """The comparisons of a twin, up to the first that is wrong: all of them in float32 and eagerly, and if the recipe
    rounds or compiles those with the reference, and to the bit over a resume, as it is."""
    variants = [twin.exact, twin] if twin.rounds or twin.recipe.compile.enabled else [twin.exact]
    for variant in variants:
        for comparison in _comparisons(variant, world, is_exact=variant is variants[0]):
            yield comparison
            if comparison.is_wrong:
                return


def _comparisons(twin: Twin, world: World, *, is_exact: bool) -> Iterator[Comparison]:
    recipe = twin.recipe
    bits = EQUAL if world.device.type == "cpu" or recipe.run.deterministic else limits_of(twin)
    first, alone, comparison = against_one_process(twin, world)
    yield comparison
    if is_exact:
        quiet = replace(recipe.run, name=f"{recipe.run.name}-quiet")
        silent = replace(
            recipe,
            run=quiet,
            validation=replace(recipe.validation, every=0),
            checkpoint=replace(recipe.checkpoint, every=0),
        )
        again = run_twin(silent, world)
        yield compared(f"{twin.precision}: without validation and saving", again, first.record, bits, world, twin.degrees)
    _forget_last(recipe, world)
    resumed = run_twin(recipe, world)
    yield compared(f"{twin.precision}: resumed", resumed, first.record, bits, world, twin.degrees, since=SAVED)
    other = elsewhere(twin) if is_exact else None
    if other is not None:
        _forget_last(recipe, world)
        there = run_twin(other.recipe, world)
        what = f"{twin.precision}: resumed on {other.degrees}"
        yield compared(what, there, alone, limits_of(twin), world, other.degrees, since=SAVED)


def against_one_process(twin: Twin, world: World) -> tuple[Watched, Record, Comparison]:
    """A whole run of a twin, what this process computes for itself, and what they differ in."""
    data = list[Any]()
    run = run_twin(twin.recipe, world, lambda trainer: data.append(batches_of(trainer)))
    alone = _reference(twin, world, *data[0])
    what = f"{twin.precision}: one process"
    return run, alone, compared(what, run, alone, limits_of(twin), world, twin.degrees, is_reference=True)


def _reference(
    twin: Twin, world: World, batches: Sequence[Sequence[MicroBatch]], held_out: Sequence[MicroBatch]
) -> Record:
    """What this process computes for itself."""
    recipe = twin.recipe
    alone = Alone(recipe, world.device, tokens_in_parts=twin.degrees.context)
    skipped = {GRADIENT_BAD, LOSS_BAD} | ({SPIKE} if recipe.run.loss_spike_z else set())
    for step, micro_batches in enumerate(batches, start=1):
        rate = stage_of(recipe, step - 1).learning_rate(step - 1)
        if step in skipped:
            alone.skip(step, rate=rate)
            continue
        alone.step(step, micro_batches, rate=rate)
        if step in (1, STEPS):
            alone.validate(step, held_out)
    losses = alone.record.losses
    alone.record.guard = {SAVED: [1.0], STEPS: [losses[step] for step in sorted(losses) if recipe.run.loss_spike_z and step > SPIKE]}
    return alone.record


def _forget_last(recipe: Recipe, world: World) -> None:
    """Leave a run as it was after its first checkpoint, so that it resumes from there."""

    def remove() -> None:
        shutil.rmtree(step_folder(recipe.run.folder / CHECKPOINTS, STEPS))
        with suppress(FileNotFoundError):
            (recipe.run.folder / NEWEST).unlink()

    on_main(world, remove)
