"""What train.py --check prints: a summary, as comments, and the resolved recipe below it. Imports no torch."""

import os
import signal
import sys
from contextlib import suppress

from parallel.config import MeshDegrees
from parallel.errors import UserError
from recipes.files.units import size
from recipes.load import to_toml
from recipes.mesh_rules import advice, batch_divides, fitted_mesh, micro_batches
from recipes.metrics.hardware import Hardware, hardware_of
from recipes.plan.memory import FULL, Prediction, predict, summary
from recipes.plan.world import devices
from recipes.schema import Recipe
from recipes.training.run_folder import check_output_folder

FORCE = "FORCE"
"""The environment variable with which a job's check refuses what cannot fit ("0"), or only warns, as without it."""
LARGEST_DEVICE = 192e9
"""Bytes; no device that the recipes name has more."""


def check(recipe: Recipe, *, processes: int | None, nodes: int | None) -> None:
    """Print them; all of standard output is TOML. Raises UserError if the run's folder cannot be used.

    Also, in a job's check, if the recipe is predicted not to fit the GPUs.
    """
    check_output_folder(recipe)
    hardware = hardware_of(recipe.run.name) if recipe.run.device != "cpu" else None
    degrees = _degrees(recipe, processes, nodes, hardware)
    prediction = _prediction(recipe, degrees, hardware)
    moments = 8 if recipe.optimizer.state_dtype == "float32" else 4
    states = recipe.model.num_params() * (8 + moments) // degrees.copy
    on = "1 process" if degrees.processes == 1 else f"{degrees.processes:,} processes"
    other = "" if processes else "; for other numbers: --check --processes N --nodes M"
    lines = [
        *_work(recipe),
        f"on {on}: {degrees}; parameters, gradients and moments take {size(states)} per process{other}",
        *_memory(recipe, prediction, hardware),
        f"batch: {recipe.batch.global_batch_size:,} sequences = {micro_batches(recipe.batch, degrees)}",
        *_parts(recipe),
    ]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is not an error
    lines = ["".join(c if c.isprintable() else "?" for c in line) for line in lines]  # as TOML wants comments
    print("".join(f"# {line}\n" for line in lines) + "\n" + to_toml(recipe), end="")
    for line in advice(recipe.mesh, float8=recipe.float8):
        print(line, file=sys.stderr)
    peak = prediction.peak if prediction else 0
    if prediction and os.environ.get(FORCE) == "0":
        _refuse_what_cannot_fit(peak, hardware)
    if hardware and peak > FULL * hardware.memory:
        print(
            f"warning: {size(peak)} of memory are predicted, more than {FULL:.0%} of the {size(hardware.memory)} of an"
            f" {hardware.gpu}, of which fragmentation needs some; docs/running.md lists what saves memory",
            file=sys.stderr,
        )
    elif states > LARGEST_DEVICE:
        print(
            f"warning: parameters, gradients and moments take {size(states)} per process on {on}, more than any device"
            " has; shard over more of them (--check --processes N tells for N)",
            file=sys.stderr,
        )


def _refuse_what_cannot_fit(peak: int, hardware: Hardware | None) -> None:
    """Raises UserError if this machine's GPUs, or else those in the name of the recipe, have fewer bytes in all."""
    found = [*devices(), *([(hardware.gpu, hardware.memory)] if hardware else [])]
    for name, memory in found[:1]:
        if peak > memory:
            raise UserError(
                f"{size(peak)} of memory are predicted per process, but {name} has {size(memory)}; docs/running.md"
                f" lists what saves memory, and with {FORCE}=1 in its environment the job starts nevertheless"
            )


def _degrees(recipe: Recipe, processes: int | None, nodes: int | None, hardware: Hardware | None) -> MeshDegrees:
    """Of these numbers, or of those in the name of the recipe where they fit it, or of the fewest that do."""
    if processes is None and hardware is not None:
        numbers = {"processes": hardware.processes, "nodes": hardware.nodes}
        with suppress(UserError):
            if not any(batch_divides(recipe.batch, mesh=recipe.mesh, **numbers)):
                return fitted_mesh(recipe.mesh, **numbers)
    return fitted_mesh(recipe.mesh, processes, nodes)


def _prediction(recipe: Recipe, degrees: MeshDegrees, hardware: Hardware | None) -> Prediction | None:
    """Of a GPU's memory; None for a recipe of CPUs, and for one that nothing says the GPU of."""
    asked = recipe.run.device == "cuda" or hardware is not None or os.environ.get(FORCE) == "0"
    return predict(recipe, degrees) if asked and recipe.run.device != "cpu" else None


def _memory(recipe: Recipe, prediction: Prediction | None, hardware: Hardware | None) -> list[str]:
    """What a GPU is predicted to hold; nothing for a recipe that is not made for one."""
    if prediction is None or (recipe.run.device != "cuda" and hardware is None):
        return []
    return summary(prediction, hardware.memory if hardware else None)


def _work(recipe: Recipe) -> list[str]:
    """What is trained, and how long."""
    run, batch = recipe.run, recipe.batch
    size, length = batch.global_batch_size, batch.sequence_length
    tokens = size * length
    amount = f"{size:,} x {length:,} = {tokens:,} tokens, {run.steps * tokens:,} in all"
    if recipe.model.is_encoder_decoder:
        amount = f"{size:,} pairs, at most {length:,} tokens of a prompt and {recipe.data.answer_length:,} of an answer"
    elif recipe.data.has_pairs:
        amount = f"{size:,} x {length:,} tokens with padding"
    warmup, decay = recipe.schedule.phases(run.steps)
    schedule = f"warm-up {warmup:,}" + (f", final decay {decay:,}" if recipe.schedule.kind == "wsd" else "")
    return [
        f"{run.name}: {recipe.model.name} with {recipe.model.num_params():,} parameters",
        *([f"model: {recipe.model.computed_by}"] if recipe.model.name.startswith("from_") else []),
        f"steps: {run.steps:,} of {amount}; learning rate {recipe.optimizer.lr:g}, {recipe.schedule.kind}, {schedule}",
    ]


def _parts(recipe: Recipe) -> list[str]:
    """What each part of the recipe does, one line each."""
    data, validation, checkpoint, float8 = recipe.data, recipe.validation, recipe.checkpoint, recipe.float8
    texts = ", ".join(validation.texts.values()) or f"{data.validation_fraction:g} of the documents"
    forever = f", and those of every {checkpoint.keep_every:,} steps" if checkpoint.keep_every else ""
    kind = "off" if float8.recipe == "none" else float8.recipe
    layers, recomputed = recipe.model.layers, len(recipe.activation_checkpointing.recomputed(recipe.model.layers))
    attention = "inside documents" if data.document_mask else "over whole sequences"
    attention = "inside pairs" if data.has_pairs else attention
    where = f" in {recomputed} of {layers} blocks" if 0 < recomputed < layers else ""
    return [
        f"compute: {recipe.fsdp.param_dtype}, float8 {kind}, activation checkpointing"
        f" {recipe.activation_checkpointing.mode}{where}, compile {'on' if recipe.compile.enabled else 'off'}",
        f"text: {', '.join(data.sources)}; tokenizer {data.tokenizer}; attention {attention}",
        f"validation: every {validation.every:,} steps, on {texts}" if validation.every else "validation: none",
        f"checkpoints: every {checkpoint.every:,} steps, of which the newest {checkpoint.keep} are kept{forever}"
        if checkpoint.every
        else "checkpoints: none; nothing is saved, the weights are gone when the run ends",
    ]
