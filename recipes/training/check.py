"""What train.py --check prints: a summary, as comments, the resolved recipe and the verdict. Imports no torch."""

import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from models.hf import export_of
from parallel.config import MeshDegrees
from parallel.errors import TemporaryError, UserError, listed
from parallel.float8_limits import advice
from recipes.data.history import epoch_lines
from recipes.data.text.pair_format import PairFormat
from recipes.data.text.rows import first_problem
from recipes.data.text.sources import is_hub, is_prepared, is_token_files
from recipes.data.tokens.shards import open_index
from recipes.data.tokens.token_files import token_files
from recipes.files.exit_codes import FINISHED
from recipes.files.layout import CHECKPOINTS, checkpoint_steps
from recipes.files.reading import is_remote
from recipes.files.screen import say
from recipes.files.units import size
from recipes.metrics.hardware import Hardware, hardware_of
from recipes.plan.hardware import devices
from recipes.plan.memory import FULL, Prediction, predict, summary
from recipes.plan.messages import matrix_params
from recipes.plan.stages import parts
from recipes.recipe.fields import Problem, refusal, toml
from recipes.recipe.load import LoadedRecipe, load, load_run, to_toml
from recipes.recipe.rules_mesh import batch_divides
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import Stage, stages_of, tokens_of
from recipes.training.run_folder import check_output_folder, step_of

NAMED = 5
"""Sources named that were not opened."""
UNSEEN = ("later rows", "held-out texts", "tasks", "GPUs", "room on the disk")
FORCE = "FORCE"
"""The environment variable with which a job's check refuses what cannot fit ("0"), or only warns, as without it."""
HERE = "PROCESSES_HERE"
"""What scripts/run.sh would start here, for recipes that name no other hardware."""
LARGEST_DEVICE = 192e9
"""Bytes; no device that the recipes name has more."""


def check(path: str, arguments: Sequence[str], *, processes: int | None, nodes: int | None) -> int:
    """Print the summary, the recipe and the verdict; all of standard output is TOML. Returns the exit code.

    Raises UserError, whose last line is the verdict, for everything wrong with the recipe, if the run's folder cannot
    be used, if a first row cannot be read and, in a job's check, if the recipe is predicted not to fit the GPUs.
    """
    try:
        started = nodes
        if processes and nodes and nodes > 1:
            processes, nodes = _without_spares(path, arguments, processes, nodes)
        loaded = load_run(path, arguments, processes=processes, nodes=nodes)
        for name in ("spare_nodes", "least_nodes"):
            if started == 1 and getattr(loaded.recipe.run, name):
                raise UserError(f"run.{name}: needs several nodes; to start on one, write --run.{name} 0")
        if processes and nodes and (least := loaded.recipe.run.least_nodes):
            _require_least(least, path, arguments, processes=processes, nodes=nodes)
        run, here = loaded.recipe.run, os.environ.get(HERE, "")
        if processes is None and here and not hardware_of(run.name, written=run.hardware):
            processes = int(here)
            loaded = load_run(path, arguments, processes=processes, kind=type(loaded.recipe))
        verdict = look_at_first_rows(loaded)
        _print(loaded.recipe, processes, nodes, loaded.origins)
    except TemporaryError:
        raise
    except UserError as error:
        count = re.match("[0-9,]+ problems? in .*", str(error))
        raise UserError(f"{error}\nrefused: {count[0] if count else '1 problem'}") from None
    say(f"# {verdict}")
    return FINISHED


def _without_spares(path: str, arguments: Sequence[str], processes: int, nodes: int) -> tuple[int, int]:
    """The processes and the nodes of these that train. Raises UserError if none does."""
    spare = 0
    with suppress(UserError):  # the whole check says what is wrong with the recipe
        spare = load(path, arguments, rules=False, only=("run",)).run.spare_nodes
    if spare >= nodes:
        raise UserError(f"run.spare_nodes = {spare}: must be fewer than the {nodes} nodes; start more, or write less")
    return processes // nodes * (nodes - spare), nodes - spare


def _require_least(least: int, path: str, arguments: Sequence[str], *, processes: int, nodes: int) -> None:
    """Raises UserError unless run.least_nodes of these nodes could train the recipe."""
    if least > nodes:
        raise UserError(f"run.least_nodes = {least}: more than the {nodes} nodes that train; write {nodes} or fewer")
    processes = processes // nodes * least
    try:
        recipe = load(path, arguments, processes=processes, nodes=least, elsewhere=True)
        if os.environ.get(FORCE) != "1":
            hardware = _hardware(recipe)
            peak = max(Facts.of(stage, processes, least, hardware).peak for stage in stages_of(recipe))
            _refuse_what_cannot_fit(peak, hardware)
    except UserError as error:
        what = f"run.least_nodes = {least}: {processes} processes on so few nodes cannot train the recipe; write more"
        raise UserError(f"{what}, or mend this:\n{error}") from None


def look_at_first_rows(loaded: LoadedRecipe) -> str:
    """The verdict on a recipe whose sources can be read, with what was not looked at. Raises UserError for others."""
    opened, unread, problems = set(), set(), set()
    unseen: dict[str, None] = {}
    for stage in stages_of(loaded.recipe):
        data = stage.recipe.data
        unseen |= dict.fromkeys(_of_the_built_model(stage.recipe))
        fields: str | PairFormat = data.text_field
        if data.has_pairs:
            from recipes.weights.pairing import pairing_of

            fields = pairing_of(data, stage.recipe.model, loaded.weights).format
        for source in {*data.sources, *filter(None, stage.recipe.validation.texts.values())}:
            if is_hub(source) or is_remote(source) or is_prepared(source):
                unread.add(source)
            elif (source, fields, data.text_documents) not in opened:
                opened.add((source, fields, data.text_documents))
                try:
                    if bad := first_problem(source, text_field=fields, text_documents=data.text_documents):
                        say(f"warning: the first row is bad: {bad}", to=2)
                except TemporaryError:
                    raise
                except UserError as error:
                    key = "data.source" if source in data.sources else "validation.source"
                    problems.add(Problem(key, str(error).removeprefix("data.source: "), toml(source)))
    if problems:
        raise refusal(sorted(problems, key=str), where="the first rows")
    others = [*sorted(unread)[:NAMED], *([f"{len(unread) - NAMED:,} other sources"] if len(unread) > NAMED else [])]
    return (
        f"ok: sources whose first row was read: {len(opened):,}; not looked at: {listed([*others, *unseen, *UNSEEN])}"
    )


def _of_the_built_model(recipe: Recipe) -> Iterator[str]:
    """What was not looked at of a built model of transformers. Raises UserError for what the run refuses of it."""
    if recipe.model.by_transformers:
        from recipes.training.build import plain_model

        model = plain_model(recipe, device_type=recipe.run.device)
        if recipe.float8.recipe != "none":
            from parallel.float8 import chosen_linears

            chosen_linears(model, recipe.float8, device_type=recipe.run.device)
        if not recipe.model.weights:
            yield "whether all its tensors get initial values"
        if recipe.compile.enabled and recipe.activation_checkpointing.mode != "none" and recipe.run.device == "auto":
            yield "whether its compiled blocks recompute the same numbers on a CPU"


def _print(recipe: Recipe, processes: int | None, nodes: int | None, origins: Mapping[str, str] | None) -> None:
    """Print all but the verdict. origins: see LoadedRecipe. Raises UserError."""
    check_output_folder(recipe)
    trunk = _trunk(recipe, origins)
    hardware = _hardware(recipe)
    stages = [Facts.of(stage, processes, nodes, hardware) for stage in stages_of(recipe)]
    other = "" if processes else "; for other numbers: --check --processes N --nodes M"
    lines = [*_head(recipe), *trunk, *_lines_of_stages(stages, other), *_epochs(recipe)]
    lines += dict.fromkeys(note for one in stages if (note := one.recipe.data.shares_note))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is not an error
    lines = ["".join(c if c.isprintable() else "?" for c in line) for line in lines]  # as TOML wants comments
    say("".join(f"# {line}\n" for line in lines) + "\n" + to_toml(recipe), end="", whole=True)
    for line in dict.fromkeys(line for one in stages for line in advice(one.recipe.mesh, float8=one.recipe.float8)):
        say(line, to=2)
    # The fullest of all stages decides whether the run fits.
    full = max(stages, key=lambda stage: (stage.peak, stage.states))
    if full.prediction and os.environ.get(FORCE) == "0":
        _refuse_what_cannot_fit(full.peak, hardware)
    if hardware and full.peak > FULL * hardware.memory:
        say(
            f"warning: {size(full.peak)} of memory are predicted, more than {FULL:.0%} of the {size(hardware.memory)}"
            f" of an {hardware.gpu}, of which the allocator needs some; docs/runbook.md lists what saves memory",
            to=2,
        )
    elif full.states > LARGEST_DEVICE:
        say(
            f"warning: parameters, gradients and moments take {size(full.states)} per process on {full.on}, more than"
            " any device has; shard over more of them (--check --processes N tells for N)",
            to=2,
        )


def _hardware(recipe: Recipe) -> Hardware | None:
    return hardware_of(recipe.run.name, written=recipe.run.hardware) if recipe.run.device != "cpu" else None


def _trunk(recipe: Recipe, origins: Mapping[str, str] | None) -> list[str]:
    """What a fork continues from. Raises UserError if it cannot; a fork with checkpoints of its own resumes."""
    if not recipe.run.continue_from or checkpoint_steps(recipe.run.folder / CHECKPOINTS):
        return []
    from recipes.training.fork import find_trunk

    checkpoint = find_trunk(recipe, log=lambda line: say(line, to=2), origins=origins)
    return [f"continues from {checkpoint}, after {step_of(checkpoint):,} of the steps"]


def _refuse_what_cannot_fit(peak: int, hardware: Hardware | None) -> None:
    """Raises UserError if this machine's GPUs, or else those in the name of the recipe, have fewer bytes in all."""
    found = [*devices(), *([(hardware.gpu, hardware.memory)] if hardware else [])]
    for name, memory in found[:1]:
        if peak > memory:
            raise UserError(
                f"{size(peak)} of memory are predicted per process, but {name} has {size(memory)}; docs/runbook.md"
                f" lists what saves memory, and with {FORCE}=1 in its environment the job starts nevertheless"
            )


def _degrees(recipe: Recipe, processes: int | None, nodes: int | None, hardware: Hardware | None) -> MeshDegrees:
    """The degrees for these numbers, or for those in the name of the recipe if they fit it, or for the fewest."""
    if processes is None and hardware is not None:
        numbers = {"processes": hardware.processes, "nodes": hardware.nodes}
        with suppress(UserError):
            if not any(batch_divides(recipe.batch, mesh=recipe.mesh, **numbers)):
                return recipe.mesh.fit(hardware.processes, nodes=hardware.nodes)
    return recipe.mesh.fit(processes, nodes=nodes)


@dataclass(frozen=True)
class Facts:
    """What --check finds out about a stage, before it prints anything."""

    stage: Stage
    hardware: Hardware | None
    """What the name of the recipe says that it runs on; None if it says nothing."""
    degrees: MeshDegrees
    states: int
    """Bytes of parameters, gradients and moments of a process."""
    saved: int
    """Those without gradients, which are saved."""
    prediction: Prediction | None
    """That of a GPU's memory; None for a recipe for CPUs, or if nothing says that it is for GPUs."""

    @classmethod
    def of(cls, stage: Stage, processes: int | None, nodes: int | None, hardware: Hardware | None) -> "Facts":
        recipe = stage.recipe
        degrees = _degrees(recipe, processes, nodes, hardware)
        parameters, optimizer = recipe.model.num_params(), recipe.optimizer
        matrices = matrix_params(recipe.model) if optimizer.facts.orthogonalizes else 0
        moments = optimizer.state_bytes(parameters, 0, matrices=(matrices, 0)) // degrees.copy
        saved = 4 * parameters // degrees.copy + moments
        if degrees.pipeline > 1:
            kept = replace(recipe, fsdp=replace(recipe.fsdp, cpu_offload=False))
            found = [part.state for _, part in parts(kept, degrees)]
            saved, moments = max((state["parameters"] + state["moments"], state["moments"]) for state in found)
        asked = recipe.run.device == "cuda" or hardware is not None or os.environ.get(FORCE) == "0"
        asked = asked and not recipe.model.uncounted(by_plan=True)
        prediction = predict(recipe, degrees) if asked and recipe.run.device != "cpu" else None
        return cls(stage, hardware, degrees, 2 * saved - moments, saved, prediction)

    @property
    def recipe(self) -> Recipe:
        return self.stage.recipe

    @property
    def on(self) -> str:
        return "1 process" if self.degrees.processes == 1 else f"{self.degrees.processes:,} processes"

    @property
    def peak(self) -> int:
        """Bytes that a GPU is predicted to hold; 0 without a prediction."""
        return self.prediction.peak if self.prediction else 0


def _lines_of_stages(stages: Sequence[Facts], other: str) -> list[str]:
    """What is trained on what; for later stages only what differs from the stage before."""
    found: list[str] = []
    before: list[str] = []
    for facts in stages:
        recipe, degrees, hardware = facts.recipe, facts.degrees, facts.hardware
        states = f"parameters, gradients and moments take {size(facts.states)} per process"
        lines = [f"on {facts.on}: {degrees}; {states}{other}"]
        if facts.prediction and (recipe.run.device == "cuda" or hardware):  # made for GPUs
            lines += summary(facts.prediction, hardware.memory if hardware else None)
        if degrees.pipeline > 1:
            lines.append(f"pipeline: {recipe.pipeline.schedule}, {recipe.pipeline_stages(degrees.pipeline)}")
        lines.append(f"batch: {recipe.batch.global_batch_size:,} sequences = {recipe.batch.divided(degrees)}")
        lines += _parts(recipe)
        if every := recipe.checkpoint.memory_every:
            most = f"{size(4 * facts.saved)} of {recipe.checkpoint.memory_folder} per process"
            lines.append(f"copies: every {every:,} steps, of two steps in two nodes each: at most {most}")
        indent = "  " if facts.stage.name else ""
        found += [_steps(facts.stage), *(f"{indent}{line}" for line in lines if line not in before)]
        before = lines
    return found


def _head(recipe: Recipe) -> Iterator[str]:
    """What is trained."""
    tokens = sum(tokens_of(stage) for stage in stages_of(recipe))
    total = f"; {recipe.run.steps:,} steps, {tokens:,} tokens in {len(recipe.stages)} stages" if recipe.stages else ""
    yield f"{recipe.run.name}: {recipe.model.name} with {recipe.model.parameters}{total}"
    if recipe.model.name.startswith("from_"):
        yield f"model: {recipe.model.computed_by}"
    yield f"export: {export_of(recipe.model)}"


def _epochs(recipe: Recipe) -> Iterator[str]:
    """How often prepared sources are read; the lengths of others are unknown."""
    epochs: dict[str, float | None] = {}
    for stage in stages_of(recipe):
        sources, pairs = stage.recipe.data.sources, stage.recipe.data.has_pairs
        for name in (name for name in sources if not (pairs or is_hub(name) or is_remote(name)) and is_prepared(name)):
            share = sources[name] / sum(sources.values())
            if is_token_files(name):
                length = sum(file.tokens for file in token_files(name))
            else:
                length = sum(shard.train for shard in open_index(name).shards)
            epochs[name] = (epochs.get(name) or 0.0) + tokens_of(stage) * share / length
    yield from epoch_lines(epochs, by=f"step {recipe.run.steps}")


def _steps(stage: Stage) -> str:
    """How long a stage is, and its learning rate."""
    recipe, count = stage.recipe, stage.last - stage.first
    batch, optimizer, schedule = recipe.batch, recipe.optimizer, recipe.schedule
    length = batch.sequence_length
    amount = f"{batch.global_batch_size:,} x {length:,} = {batch.global_batch_size * length:,} tokens"
    amount += f", {tokens_of(stage):,} in all"
    if recipe.model.is_encoder_decoder:
        pairs = f"{batch.global_batch_size:,} pairs, at most {length:,} tokens of a prompt"
        amount = f"{pairs} and {recipe.data.answer_length:,} of an answer"
    elif recipe.data.has_pairs:
        amount = f"{batch.global_batch_size:,} x {length:,} tokens with padding"
    warmup, decay = schedule.phases(stage.schedule_span[1])
    phases = f"warm-up {warmup:,}" + (f", final decay {decay:,}" if schedule.kind == "wsd" else "")
    phases += f", of {schedule.steps:,} steps" if schedule.steps else ""
    share = optimizer.matrix_share
    by = optimizer.name.capitalize()
    matrices = f" ({optimizer.lr * share:g} of matrices, by {by})" if share else ""
    if not stage.name:
        return f"steps: {count:,} of {amount}; learning rate {optimizer.lr:g}{matrices}, {schedule.kind}, {phases}"
    rates = f"{stage.learning_rate(stage.first):.3g} to {stage.learning_rate(stage.last - 1):.3g}"
    rates += f", for matrices {share:g} times that, by {by}" if share not in (0, 1) else ""
    over = "over the stage" if stage.own_schedule else "over the run"
    return (
        f"stage {stage.name}: steps {stage.first + 1:,} to {stage.last:,}, each of {amount}; learning rate {rates}"
        f" ({schedule.kind} {over}, {phases})"
    )


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
