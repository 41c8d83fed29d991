"""`train.py RECIPE --prove`: do these processes compute what one process computes?"""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from models.hf import beyond_hf
from parallel.dist import World, on_main, start, stop
from parallel.errors import UserError
from recipes.data.batches import MicroBatch
from recipes.files.exit_codes import FINISHED, WRONG
from recipes.files.layout import CHECKPOINTS, EXPORT, step_folder
from recipes.files.layout import SAVED as NEWEST
from recipes.files.reading import user_path
from recipes.files.screen import say
from recipes.lab.prove.compare import EQUAL, limits_of
from recipes.lab.prove.reference import Alone
from recipes.lab.prove.runs import GRADIENT_BAD, LOSS_BAD, SPIKE, Watched, read_all, run_twin
from recipes.lab.prove.text import WORDS, write_words
from recipes.lab.prove.twin import SAVED, STEPS, Twin, elsewhere, twins_of
from recipes.lab.prove.verdict import Comparison, Verdict, alike, compared
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
    bits = EQUAL if world.device.type == "cpu" or twin.recipe.run.deterministic else limits_of(twin)
    proof = against_one_process(twin, world)
    twin, first, alone = proof.twin, proof.run, proof.alone
    yield proof.comparison
    recipe = twin.recipe
    if is_exact and (parity := _parity(twin, alone, world)):
        yield parity
    if is_exact:
        quiet = replace(recipe.run, name=f"{recipe.run.name}-quiet")
        silent = replace(
            recipe,
            run=quiet,
            validation=replace(recipe.validation, every=0, average=0),
            checkpoint=replace(recipe.checkpoint, every=0),
        )
        again = run_twin(silent, world)
        yield compared(
            f"{twin.precision}: without validation and saving", again, first.record, bits, world, twin.degrees
        )
    _forget_last(recipe, world)
    resumed = run_twin(recipe, world)
    yield compared(f"{twin.precision}: resumed", resumed, first.record, bits, world, twin.degrees, since=SAVED)
    other = elsewhere(twin) if is_exact else None
    if other is not None:
        _forget_last(recipe, world)
        there = run_twin(other.recipe, world)
        what = f"{twin.precision}: resumed on {other.degrees}"
        yield compared(what, there, alone.record, limits_of(twin), world, other.degrees, since=SAVED)


class Proof(NamedTuple):
    """A run of a twin, and what one process makes of it."""

    twin: Twin
    """With a limit of gradient norms that clips some of its steps."""
    run: Watched
    alone: Alone
    comparison: Comparison


def against_one_process(twin: Twin, world: World) -> Proof:
    """Train a twin from its first step to its last, and compare that with what this process computes for itself."""
    data = read_all(twin, world)
    if twin.recipe.optimizer.grad_clip:
        norms = _reference(twin.clipped(0.0), world, *data).record.norms.values()
        twin = twin.clipped(world.messages.from_main(float(f"{median(norms):.3g}")))
    run, alone = run_twin(twin.recipe, world), _reference(twin, world, *data)
    what = f"{twin.precision}: one process"
    comparison = compared(what, run, alone.record, limits_of(twin), world, twin.degrees, is_reference=True)
    return Proof(twin, run, alone, comparison)


def _reference(
    twin: Twin, world: World, batches: Sequence[Sequence[MicroBatch]], held_out: Sequence[MicroBatch]
) -> Alone:
    recipe = twin.recipe
    alone, judges = Alone(recipe, world.device, tokens_in_parts=twin.degrees.context), recipe.run.loss_spike_z > 0
    skipped = {GRADIENT_BAD, LOSS_BAD, *([SPIKE] if judges else [])}
    for step, micro_batches in enumerate(batches, start=1):
        rate = stage_of(recipe, step - 1).learning_rate(step - 1)
        if step in skipped:
            alone.skip(step, rate=rate)
            continue
        alone.step(step, micro_batches, rate=rate)
        if step in (1, STEPS):
            alone.validate(step, held_out)
    judged = [loss for step, loss in sorted(alone.record.losses.items()) if judges and step > SPIKE]
    alone.record.guard = {SAVED: [1.0], STEPS: judged}
    return alone


def _parity(twin: Twin, alone: Alone, world: World) -> Comparison | None:
    """The same weights in transformers, which has code of its own; None without it or the model's family."""
    model = twin.recipe.model
    if model.by_transformers or beyond_hf(model) or find_spec("transformers") is None:
        return None

    def look() -> float:
        from models.transformers import read_folder
        from recipes.weights.convert import export_checkpoint

        folder = twin.recipe.run.folder / EXPORT
        export_checkpoint(step_folder(twin.recipe.run.folder / CHECKPOINTS, STEPS), folder)
        theirs = read_folder(folder, dtype=torch.float32, device=world.device).eval()
        tokens = torch.arange(twin.recipe.batch.sequence_length, device=world.device)[None] * 7 % WORDS
        with torch.no_grad():
            logits = theirs(tokens).logits
        return float((alone.logits(tokens) - logits).norm() / logits.norm())

    return alike("the same weights in transformers", on_main(world, look))


def _forget_last(recipe: Recipe, world: World) -> None:
    """Leave a run as it was after its first checkpoint, so that it resumes from there."""

    def remove() -> None:
        shutil.rmtree(step_folder(recipe.run.folder / CHECKPOINTS, STEPS))
        with suppress(FileNotFoundError):
            (recipe.run.folder / NEWEST).unlink()

    on_main(world, remove)
