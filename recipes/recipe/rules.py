"""Rules that span several fields of a recipe, or check what it names on the disk, applied to it and to each stage.

Imports no torch.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from models.config import OF_EXPERTS, ModelConfig
from parallel.config import ActivationCheckpointingConfig, AttentionConfig, CompileConfig, Float8Config, FSDPConfig
from parallel.errors import listed
from parallel.float8_limits import UNIT, fit
from recipes.checkpoint.config import CheckpointConfig
from recipes.evaluation.config import ValidationConfig
from recipes.metrics.config import ProfileConfig
from recipes.recipe.fields import Problem, Violation, field_types, refusal_of, sections, toml, value_of
from recipes.recipe.rules_data import data_is_there, needs_are_met, validation_is_possible
from recipes.recipe.rules_mesh import (
    batch_divides,
    float8_fits_tensor,
    gather_has_a_kernel,
    mesh_divides_model,
    mesh_fits,
    tensor_can_overlap,
)
from recipes.recipe.rules_optimizer import moments_can_move, optimizer_fits, schedule_fits
from recipes.recipe.rules_weights import weights_fit
from recipes.recipe.schema import Recipe, RunConfig
from recipes.recipe.stages import Stage, stages_of

if TYPE_CHECKING:
    from recipes.recipe.stage_tables import StageTable
    from recipes.weights.locate import InitialWeights


Given = dict[str, tuple[Any, str]]
"""Dotted key -> (value, where it was written)."""


@dataclass(frozen=True)
class Written:
    """What files and the command line say of a recipe."""

    given: Given
    tables: "Sequence[StageTable]"
    """What they say of each stage."""
    wrong: Collection[str]
    """Keys with other problems, which no rule reads."""


def broken_rules(
    recipe: Recipe,
    written: Written,
    weights: "InitialWeights | None",
    *,
    elsewhere: bool,
    processes: int | None,
    nodes: int | None,
) -> list[Problem]:
    """The rules that the recipe of any stage breaks, as problems. The keyword arguments are as in load_run()."""
    given = written.given
    found: dict[Violation, list[Stage]] = {}
    for stage in stages_of(recipe):
        changes = recipe.stages[stage.number].changes if recipe.stages else {}
        wrong = {key.removeprefix(f"stages.{stage.name}.") for key in written.wrong}
        wrong = {key if key in field_types() else key.partition(".")[0] for key in wrong}
        options: dict[str, Any] = {
            "processes": processes,
            "nodes": nodes,
            "broken": wrong & {*field_types(), *sections()},
            "schedule_steps": stage.schedule_span[1],
            "written": given.keys() | changes.keys(),
        }
        one = stage.recipe
        broken = violations_elsewhere(one, **options) if elsewhere else violations(one, weights, **options)
        for violation in broken:
            found.setdefault(violation, []).append(stage)
    problems: dict[Problem, None] = {}
    for (key, message), (stage, *others) in found.items():
        located = _located(key, message, stage.recipe, given)
        if recipe.stages and (len(others) + 1 < len(recipe.stages) or key in recipe.stages[stage.number].changes):
            also = f"; also in stage {listed(other.name for other in others)}" if others else ""
            origin = written.tables[stage.number].origins.get(key, located.origin)
            name = f"stages.{stage.name}.{key}"
            located = replace(located, key=name, origin=origin, message=message + also)
        problems[located] = None
    if recipe.stages:
        from recipes.recipe.stage_tables import violations_of_stages

        for key, message in violations_of_stages(recipe):
            problems[Problem(key, message) if key == "stages" else _located(key, message, recipe, given)] = None
    return list(problems)


def violations_elsewhere(recipe: Recipe, *, broken: Collection[str] = (), **options: Any) -> Iterator[Violation]:
    """The rules that a recipe for another machine breaks: without a look at its data, its weights and other files.

    broken, options: as in violations().
    """
    model = replace(recipe.model, weights="", config="", upcycle=recipe.model.upcycle and not recipe.model.weights)
    return violations(replace(recipe, model=model), None, broken={*broken, "data.source", "metrics"}, **options)


def _located(key: str, message: str, recipe: Recipe, given: Given) -> Problem:
    """A broken rule as a Problem, with the value and where it was written."""
    if key not in field_types():  # a section
        origins = dict.fromkeys(origin for known, (_, origin) in given.items() if known.startswith(f"{key}."))
        return Problem(key, message, "", ", ".join(origins) or "default")
    unwritten = f"size {recipe.model.name}" if key.startswith("model.") else "default"
    return Problem(key, message, toml(value_of(recipe, key)), given[key][1] if key in given else unwritten)


def violations(
    recipe: Recipe,
    weights: "InitialWeights | None",
    *,
    processes: int | None = None,
    nodes: int | None = None,
    broken: Collection[str] = frozenset(),
    written: Collection[str] = frozenset(),
    schedule_steps: int | None = None,
) -> Iterator[Violation]:
    """Every rule the recipe breaks.

    Args:
        recipe, weights: all of it, and what it starts from; None if it names no weights and no config.
        processes, nodes: their numbers, where they are known.
        broken: fields with invalid values, and sections with unknown keys; rules that read them are skipped.
        written: fields with values of their own, not those of the model size or the schema.
        schedule_steps: those of the schedule, if a stage has its own; None = run.steps.
    """
    run, model, data, mesh, float8 = recipe.run, recipe.model, recipe.data, recipe.mesh, recipe.float8
    world = {"processes": processes, "nodes": nodes}
    # (the sections and fields that a rule reads, the rule); a rule is a generator: nothing runs before it is iterated.
    rules = (
        ("run.name run.hardware", name_and_hardware_are_usable(run)),
        ("model", model_is_consistent(model)),
        ("model", weights_fit(model, weights, written=written)),
        ("model data attention batch", from_elsewhere(recipe, weights, written=written)),
        ("data model batch", data_is_there(data, length=recipe.batch.sequence_length, model=model, weights=weights)),
        ("data validation model", validation_is_possible(recipe.validation, data=data, model=model)),
        ("data validation model batch", ladder_is_comparable(recipe)),
        ("mesh", mesh_fits(mesh, **world)),
        ("mesh model float8 batch", mesh_divides_model(mesh, model=model, batch=recipe.batch, float8=float8, **world)),
        ("mesh float8", float8_fits_tensor(mesh, float8=float8)),
        ("mesh compile.enabled run.device", tensor_can_overlap(mesh, compile=recipe.compile, device=run.device)),
        ("mesh pipeline model batch fsdp compile activation_checkpointing float8", pipeline_fits(recipe, **world)),
        ("mesh model fsdp float8 experts", experts_fit(recipe, written=written, **world)),
        ("mesh attention.backend model", gather_has_a_kernel(mesh, attention=recipe.attention, model=recipe.model)),
        ("batch.global_batch_size batch.micro_batch_size mesh", batch_divides(recipe.batch, mesh=mesh, **world)),
        ("attention data.document_mask run.device", attention_has_a_kernel(recipe)),
        ("attention fsdp.param_dtype model", flash3_fits(recipe.attention, recipe.fsdp, model=model)),
        ("fsdp run.device", memory_is_symmetric(recipe.fsdp, device=run.device)),
        ("attention fsdp.param_dtype run.device", attention_has_16_bits(recipe)),
        ("activation_checkpointing model", blocks_can_recompute(recipe.activation_checkpointing, model=model)),
        ("float8.all_gather float8.recipe", float8_gathers(float8)),
        ("float8.recipe float8.emulate run.device", float8_has_a_device(float8, device=run.device)),
        ("compile", autotune_has_a_compiler(recipe.compile)),
        ("run.deterministic attention compile fsdp mesh", bits_can_repeat(recipe)),
        ("float8 compile.enabled run.steps", float8_can_be_sampled(recipe)),
        ("float8.recipe float8.exclude model", float8_fits(float8, model=model)),
        ("checkpoint.export_hf checkpoint.every model", export_is_possible(recipe.checkpoint, model=model)),
        ("checkpoint validation", kept_checkpoints_are_saved(recipe.checkpoint, recipe.validation)),
        ("schedule run.steps", schedule_fits(recipe.schedule, steps=schedule_steps or run.steps)),
        ("optimizer", moments_can_move(recipe.optimizer)),
        ("optimizer fsdp.cpu_offload", optimizer_fits(recipe.optimizer, fsdp=recipe.fsdp)),
        ("metrics data validation float8 model.weights checkpoint", needs_are_met(recipe)),
        ("profile run.steps", profile_fits(recipe.profile, steps=run.steps)),
    )
    for read, found in rules:
        if not any(_overlap(place, key) for place in read.split() for key in broken):
            yield from found


def _overlap(one: str, other: str) -> bool:
    """Whether one of two dotted keys is the other, or a section that holds it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def bits_can_repeat(recipe: Recipe) -> Iterator[Violation]:
    """Loads its rules only where a recipe asks for equal bits."""
    if recipe.run.deterministic:
        from recipes.recipe.rules_determinism import what_repeats_no_bits

        yield from what_repeats_no_bits(recipe)


def pipeline_fits(recipe: Recipe, *, processes: int | None, nodes: int | None) -> Iterator[Violation]:
    """What holds for the stages of a pipeline."""
    if recipe.mesh.pipeline > 1:
        from recipes.recipe.rules_pipeline import stages_can_run

        yield from stages_can_run(recipe, processes=processes, nodes=nodes)


def experts_fit(recipe: Recipe, *, written: Collection[str], **world: int | None) -> Iterator[Violation]:
    """What holds for routed experts, and for what was written of them."""
    is_written = any(key.startswith(tuple(f"model.{one}" for one in OF_EXPERTS)) for key in written)
    if recipe.model.experts or recipe.mesh.expert > 1 or is_written:
        from recipes.recipe.rules_experts import experts_can_run, fields_of_experts_have_an_effect

        yield from experts_can_run(recipe, **world)
        yield from fields_of_experts_have_an_effect(recipe.model, written=written)


def ladder_is_comparable(recipe: Recipe) -> Iterator[Violation]:
    """The run validates what the ladder predicts."""
    if path := recipe.validation.ladder:
        from recipes.recipe.rules_ladder import ladder_for

        if refused := refusal_of(lambda: ladder_for(recipe, path)):
            yield "validation.ladder", f'{refused}; write the ladder.json of a ladder of this recipe, or ""'
        elif not recipe.validation.every:
            yield "validation.ladder", 'is compared at each validation; write every = 1000, for example, or ladder = ""'


def name_and_hardware_are_usable(run: RunConfig) -> Iterator[Violation]:
    """A run has one folder directly below `output`; --check and --plan know the memory of some GPUs."""
    if "/" in run.name or run.name in (".", ".."):
        yield "run.name", 'is the name of the run folder inside run.output; write a name without "/"'
    if run.hardware:
        from recipes.metrics.hardware import MEMORY, hardware_of

        if hardware_of("", written=run.hardware) is None:
            known = listed((name.lower() for name in MEMORY), last="or")
            rule = 'names no number of known GPUs; write one such as "8xh100" or "48x8h100"'
            yield "run.hardware", f"{rule}, with {known}"


def model_is_consistent(model: ModelConfig) -> Iterator[Violation]:
    """The fields of the model are consistent with each other."""
    for field, message in model.problems():
        yield f"model.{field}", message


def from_elsewhere(
    recipe: Recipe, initial: "InitialWeights | None", *, written: Collection[str]
) -> Iterator[Violation]:
    """What holds for models that a config.json defines."""
    model = recipe.model
    if model.config or model.dropout or model.by_transformers:
        from recipes.recipe.rules_transformers import config_fits, transformers_fits

        yield from config_fits(model, initial, written=written)
        yield from transformers_fits(recipe)


def export_is_possible(checkpoint: CheckpointConfig, *, model: ModelConfig) -> Iterator[Violation]:
    """A failed export, for example on a full disk, must not lose the run; nor may it be of another model."""
    if checkpoint.export_hf and not model.by_transformers:
        from models.hf import beyond_hf

        if problem := beyond_hf(model):
            yield "checkpoint.export_hf", f"cannot export model.{problem}; write export_hf = false"
    if checkpoint.export_hf and checkpoint.every == 0:
        yield "checkpoint.export_hf", "needs checkpoints, or a failed export loses the run; write every = run.steps"


def kept_checkpoints_are_saved(checkpoint: CheckpointConfig, validation: ValidationConfig) -> Iterator[Violation]:
    """Checkpoints kept forever are among those that are saved, the best is known, and copies go to a server."""
    if checkpoint.keep_best:
        from recipes.recipe.rules_tasks import best_problems

        for message in best_problems(checkpoint, validation):
            yield "checkpoint.keep_best", message
    every, keep_every, place = checkpoint.every, checkpoint.keep_every, checkpoint.remote
    validated, count = validation.every, validation.average
    if count == 1 or (count and not (every and validated and validated % every == 0)):
        problem = f"needs 2 or more, and a checkpoint of every validated step (checkpoint.every = {every});"
        remedy = f"write a multiple of that as validation.every, instead of {validated}, or average = 0"
        yield "validation.average", f"{problem} {remedy}"
    if count > checkpoint.keep and keep_every != every:
        yield "checkpoint.keep", f"validation.average = {count} needs as many checkpoints; write keep = {count} or more"
    if place and not re.match(r"(s3|gs)://[^/]", place):
        problem = "is not an address at a server; write one such as"
        yield "checkpoint.remote", f'{problem} "s3://bucket/runs", or "" (run.output names the folder on this disk)'
    elif place and every == 0:
        yield "checkpoint.remote", "needs checkpoints to copy; write checkpoint.every = run.steps or less"
    if keep_every and (every == 0 or keep_every % every):
        yield "checkpoint.keep_every", f"must be a multiple of checkpoint.every = {every}, or 0 to keep none forever"


def profile_fits(profile: ProfileConfig, *, steps: int) -> Iterator[Violation]:
    """The run reaches the steps to trace."""
    last = profile.after + profile.trace_steps
    if profile.trace_steps and last > steps:
        rule = f"after {profile.after} + trace_steps {profile.trace_steps} = {last} is beyond run.steps = {steps}"
        yield "profile.after", f"{rule}; write run.steps = {last} or more, or trace earlier"


def attention_has_a_kernel(recipe: Recipe) -> Iterator[Violation]:
    """Document masks use their own kernels, and some backends need CUDA (see parallel/kernels.py)."""
    attention, data, device = recipe.attention, recipe.data, recipe.run.device
    packs_pairs = data.has_pairs and not recipe.model.by_transformers
    if (data.document_mask or packs_pairs) and attention.backend not in ("auto", "flash3"):
        where = "on pairs, which use their" if packs_pairs else "with document_mask = true, which uses its"
        rule = f"has no effect {where} own kernels"
        yield "attention.backend", f'{rule}; write "auto", or "flash3" for GPUs that have it'
    elif device == "cpu" and attention.backend in ("cudnn", "flash3"):
        other = '"auto"' if data.document_mask or packs_pairs else '"auto", "flash" or "math"'
        yield "attention.backend", f'needs CUDA, but run.device = "cpu"; write {other}'


def flash3_fits(attention: AttentionConfig, fsdp: FSDPConfig, *, model: ModelConfig) -> Iterator[Violation]:
    """What FlashAttention 3 can compute, forward and backward (hopper/flash_api.cpp in its sources)."""
    if attention.backend != "flash3" or model.by_transformers:
        return
    if fsdp.param_dtype != "bfloat16":
        rule = 'attention.backend = "flash3" computes in 16 bits'
        yield "fsdp.param_dtype", f'{rule}; write param_dtype = "bfloat16", or backend = "auto"'
    if model.head_width % 8 or model.head_width > 256:
        yield "model.head_width", 'attention.backend = "flash3" needs a multiple of 8 up to 256; write backend = "auto"'


def memory_is_symmetric(fsdp: FSDPConfig, *, device: str) -> Iterator[Violation]:
    """Symmetric memory is NCCL's, and torch has no room beside it for messages of its own kind."""
    if fsdp.symmetric_memory and device == "cpu":
        yield "fsdp.symmetric_memory", 'needs GPUs, but run.device = "cpu"; write false'
    elif fsdp.symmetric_memory and fsdp.reduce_dtype == "bfloat16":
        yield "fsdp.symmetric_memory", 'sums in float32; write reduce_dtype = "float32", or false'


def attention_has_16_bits(recipe: Recipe) -> Iterator[Violation]:
    """On GPUs, flash and cuDNN kernels take no float32; on a CPU, flash does. The start knows what "auto" is."""
    backend, device = recipe.attention.backend, recipe.run.device
    on_gpu = backend == "cudnn" or (backend == "flash" and device == "cuda")
    if on_gpu and device != "cpu" and recipe.fsdp.param_dtype == "float32":
        rule = f'attention.backend = "{backend}" computes in 16 bits on a GPU'
        yield "fsdp.param_dtype", f'{rule}; write param_dtype = "bfloat16", or backend = "auto"'


def blocks_can_recompute(checkpointing: ActivationCheckpointingConfig, *, model: ModelConfig) -> Iterator[Violation]:
    """A number of blocks says what recomputes, and the model has as many."""
    blocks, layers = checkpointing.blocks, model.layers
    if checkpointing.mode == "none" and blocks != "all":
        remedy = 'write mode = "selective" or "full", or blocks = "all"'
        yield "activation_checkpointing.blocks", f'has no effect with mode = "none"; {remedy}'
    elif isinstance(blocks, int) and blocks > layers:
        rule = f"exceeds the {layers} blocks of the model"
        yield "activation_checkpointing.blocks", f'{rule}; write at most {layers}, a share such as 0.5, or "all"'


def float8_gathers(float8: Float8Config) -> Iterator[Violation]:
    """Row-wise scales are unknown before the all-gather."""
    if float8.all_gather and float8.recipe != "tensorwise":
        remedy = 'write all_gather = false or recipe = "tensorwise"'
        yield "float8.all_gather", f'needs recipe = "tensorwise", not "{float8.recipe}"; {remedy}'


def float8_has_a_device(float8: Float8Config, *, device: str) -> Iterator[Violation]:
    """CPUs have no float8 matrix units. (The kind of GPU is known only when the run starts.)"""
    if float8.recipe != "none" and not float8.emulate and device == "cpu":
        reason = "CPUs have no float8 matrix units"
        yield "float8.emulate", f'must be true with run.device = "cpu": {reason}; write emulate = true'


def autotune_has_a_compiler(compile: CompileConfig) -> Iterator[Violation]:
    """Only compiled code chooses between kernels."""
    if compile.autotune and not compile.enabled:
        yield "compile.autotune", "times kernels while compiling, but enabled = false; write false, or enabled = true"


def float8_can_be_sampled(recipe: Recipe) -> Iterator[Violation]:
    """Hooks on the linears count the casts, and a block compiled as one graph runs no hooks."""
    float8, steps = recipe.float8, recipe.run.steps
    if float8.sample_every == 0:
        return
    if float8.recipe == "none":
        yield "float8.sample_every", 'samples casts, but recipe = "none" makes none; write 0, or a recipe'
    elif recipe.compile.enabled:
        message = "needs hooks in the blocks, which compile.enabled = true rules out; write 0, or enabled = false"
        yield "float8.sample_every", message
    elif float8.sample_every > steps:
        yield "float8.sample_every", f"exceeds run.steps = {steps}, so no step would be sampled; write at most {steps}"


def float8_fits(float8: Float8Config, *, model: ModelConfig) -> Iterator[Violation]:
    """Float8 matrix units need widths that are multiples of 16; torchao silently skips other linears.

    Those of a model of transformers are known when it is built: parallel/float8.py counts what it leaves out.
    """
    if float8.recipe == "none" or model.by_transformers:
        return
    widths = {
        "width": ("width", model.width),
        "feed_forward_width": ("feed_forward_width", model.feed_forward_width),
        "heads": ("heads x head_width", model.heads * model.head_width),
        "key_value_heads": ("key_value_heads x head_width", model.key_value_heads * model.head_width),
    }
    if not model.tied_embeddings and "lm_head" not in float8.exclude:
        widths["vocabulary"] = ("vocabulary, the width of lm_head,", model.vocabulary)
    for field, (words, width) in widths.items():
        if not fit([width]):
            remedy = f'change it to {width + -width % UNIT}, or write float8.recipe = "none"'
            yield f"model.{field}", f"float8 needs {words} = {width} to be a multiple of {UNIT}; {remedy}"
