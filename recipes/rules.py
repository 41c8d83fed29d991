"""Rules that span several fields of a recipe, or check what it names on the disk. Imports no torch."""

import math
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from models.config import ModelConfig, of_transformers
from parallel.config import ActivationCheckpointingConfig, AttentionConfig, CompileConfig, Float8Config, FSDPConfig
from parallel.errors import TemporaryError, UserError
from recipes.checkpoint.config import CheckpointConfig
from recipes.data.config import HELD_OUT, DataConfig
from recipes.evaluation.config import ValidationConfig
from recipes.fields import one_line, toml
from recipes.files.layout import TOKENIZER
from recipes.mesh_rules import (
    Violation,
    batch_divides,
    float8_fits_tensor,
    gather_has_a_kernel,
    mesh_divides_model,
    mesh_fits,
    tensor_can_overlap,
)
from recipes.metrics.config import MetricsConfig, ProfileConfig
from recipes.optimization.config import OptimizerConfig, ScheduleConfig
from recipes.schema import Recipe, RunConfig
from recipes.weights.locate import FROM_WEIGHTS, InitialWeights, differences


def violations(
    recipe: Recipe,
    weights: InitialWeights,
    *,
    processes: int | None = None,
    nodes: int | None = None,
    broken: Collection[str] = frozenset(),
    written: Collection[str] = frozenset(),
) -> Iterator[Violation]:
    """Every rule the recipe breaks.

    Args:
        recipe: all of it.
        weights: what it starts from; looked up only if it names any.
        processes, nodes: their numbers, where they are known.
        broken: fields with invalid values, and sections with unknown keys; rules that read them are skipped.
        written: fields with values of their own, not those of the model size or the schema.
    """
    run, model, data, mesh, float8 = recipe.run, recipe.model, recipe.data, recipe.mesh, recipe.float8
    world = {"processes": processes, "nodes": nodes}
    # (the sections and fields that a rule reads, the rule); a rule is a generator: nothing runs before it is iterated.
    rules = (
        ("run.name", name_is_a_folder(run)),
        ("model", model_is_consistent(model)),
        ("model", weights_fit(model, weights, written=written)),
        ("model data attention batch", from_elsewhere(recipe, weights, written=written)),
        ("data model", data_is_there(data, model=model, weights=weights)),
        ("data validation", validation_has_text(recipe.validation, data=data)),
        ("mesh", mesh_fits(mesh, **world)),
        ("mesh model float8 batch", mesh_divides_model(mesh, model=model, batch=recipe.batch, float8=float8, **world)),
        ("mesh float8", float8_fits_tensor(mesh, float8=float8)),
        ("mesh compile.enabled run.device", tensor_can_overlap(mesh, compile=recipe.compile, device=run.device)),
        ("mesh attention.backend", gather_has_a_kernel(mesh, attention=recipe.attention)),
        (
            "batch.global_batch_size batch.micro_batch_size mesh",
            batch_divides(recipe.batch, mesh=mesh, **world),
        ),
        ("attention data.document_mask run.device", attention_has_a_kernel(recipe)),
        ("attention fsdp.param_dtype model", flash3_fits(recipe.attention, recipe.fsdp, model=model)),
        ("activation_checkpointing model", blocks_can_recompute(recipe.activation_checkpointing, model=model)),
        ("float8.all_gather float8.recipe", float8_gathers(float8)),
        ("float8.recipe float8.emulate run.device", float8_has_a_device(float8, device=run.device)),
        ("compile", autotune_has_a_compiler(recipe.compile)),
        (
            "float8.recipe float8.sample_every compile.enabled run.steps",
            float8_can_be_sampled(float8, compiled=recipe.compile.enabled, steps=run.steps),
        ),
        ("float8.recipe float8.exclude model", float8_fits(float8, model=model)),
        ("checkpoint.export_hf checkpoint.every", export_has_checkpoints(recipe.checkpoint)),
        ("checkpoint.keep_every checkpoint.every", kept_checkpoints_are_saved(recipe.checkpoint)),
        ("schedule run.steps", schedule_fits(recipe.schedule, steps=run.steps)),
        ("optimizer.state_dtype optimizer.betas", moments_can_move(recipe.optimizer)),
        ("metrics.calibrated_by", calibration_is_there(recipe.metrics)),
        ("profile run.steps", profile_fits(recipe.profile, steps=run.steps)),
    )
    for read, found in rules:
        if not any(_overlap(place, key) for place in read.split() for key in broken):
            yield from found


def _overlap(one: str, other: str) -> bool:
    """Whether one of two dotted keys is the other, or a section that holds it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def name_is_a_folder(run: RunConfig) -> Iterator[Violation]:
    """A run has one folder directly below `output`."""
    if "/" in run.name or run.name in (".", ".."):
        yield "run.name", 'is the name of the run folder inside run.output; write a name without "/"'


def model_is_consistent(model: ModelConfig) -> Iterator[Violation]:
    """The fields of the model are consistent with each other."""
    for field, message in model.problems():
        yield f"model.{field}", message


def weights_fit(model: ModelConfig, initial: InitialWeights, *, written: Collection[str]) -> Iterator[Violation]:
    """The weights to start from are intact and have the shape of this model.

    Only rope_theta may differ, if the recipe writes a larger one itself: that is how a context is extended.
    """
    if not model.weights:
        return
    try:
        weights = initial.find()
        if not weights.is_checkpoint:
            _ = weights.stored_tensors
    except TemporaryError:  # not the recipe's fault
        raise
    except UserError as error:
        yield "model.weights", one_line(error)
        return
    if of_transformers(weights.model) and not of_transformers(model):
        remedy = f'write name = "{FROM_WEIGHTS}"'
        yield "model.name", f"is a size of our decoder, but {weights.path} holds a model of transformers; {remedy}"
        return
    for field, theirs in differences(model, weights.model):
        remedy = 'write that, or omit it and write name = "from_weights"'
        if field == "rope_theta":
            if "model.rope_theta" in written and model.rope_theta > theirs:
                continue
            remedy += ", or a larger value to extend the context"
        yield f"model.{field}", f"is {toml(theirs)} in the weights of {weights.path}; {remedy}"


def from_elsewhere(recipe: Recipe, initial: InitialWeights, *, written: Collection[str]) -> Iterator[Violation]:
    """What holds for models that a config.json defines."""
    model = recipe.model
    if model.config or model.dropout or of_transformers(model):
        from recipes.transformers_rules import config_fits, transformers_fits

        yield from config_fits(model, initial, written=written)
        yield from transformers_fits(recipe)


def data_is_there(data: DataConfig, *, model: ModelConfig, weights: InitialWeights) -> Iterator[Violation]:
    """The sources can be read, and the tokenizer fits the model."""
    from recipes.data.text.plain_text import text_documents_problem
    from recipes.data.text.sources import is_prepared, source_problem

    if message := text_documents_problem(data.text_documents):
        yield "data.text_documents", message
    for source in data.sources:
        if is_prepared(source):
            yield from prepared_fits(source, data)
        elif message := source_problem(source):
            yield "data.mixture" if data.mixture else "data.source", message
    if len({Path(source).expanduser().resolve() for source in data.mixture}) < len(data.mixture):
        yield "data.mixture", "names the same source twice; give each source one share"
    if len(data.mixture) > 1:
        from recipes.data.order import mixture_problem

        if message := mixture_problem(data.mixture):
            yield "data.mixture", message
    yield from tokenizer_fits(data.tokenizer, model=model, initial=weights)
    if data.has_pairs or model.is_encoder_decoder:
        from recipes.weights.pairing import pairing_problems

        yield from ((f"data.{field}", message) for field, message in pairing_problems(data, model, weights))


def tokenizer_fits(tokenizer: str, *, model: ModelConfig, initial: InitialWeights) -> Iterator[Violation]:
    """The model has a row for every token, and its weights were trained with this tokenizer."""
    from recipes.data.text.tokenizer import tokenizer_problem

    if model.weights or tokenizer == FROM_WEIGHTS:
        try:
            weights = initial.find()
        except TemporaryError:
            raise
        except UserError as error:
            if not model.weights:
                yield "data.tokenizer", f"needs model.weights or a checkpoint of this run: {one_line(error)}"
            return  # weights_fit reports what is wrong with them
        if tokenizer == FROM_WEIGHTS:
            try:
                _ = weights.tokenizer
            except TemporaryError:
                raise
            except UserError as error:
                yield "data.tokenizer", one_line(error)
            return
        if tokenizer.startswith("train:") and (weights.path / TOKENIZER).is_file():
            problem = "would train a new tokenizer, whose tokens mean nothing to the weights, which have their own"
            yield "data.tokenizer", f'{problem}; write tokenizer = "{FROM_WEIGHTS}"'
            return
    if message := tokenizer_problem(tokenizer, model.vocabulary):
        if of_transformers(model):
            message = message.replace("model.vocabulary", "vocab_size in config.json")
        yield "data.tokenizer", message


def prepared_fits(source: str, data: DataConfig) -> Iterator[Violation]:
    """Prepared tokens were made with this tokenizer and this validation fraction."""
    from recipes.data.tokens.shards import TOKENIZER as TOKENIZER_FILE
    from recipes.data.tokens.shards import open_index

    try:
        index = open_index(source)
    except TemporaryError:
        raise
    except UserError as error:
        yield "data.source", one_line(error).removeprefix("data.source: ")
        return
    if data.tokenizer.startswith("train:"):
        file = toml(f"{source}/{TOKENIZER_FILE}")
        yield "data.tokenizer", f"'{source}' is tokenized already; write tokenizer = {file}"
    if index.validation_fraction != data.validation_fraction:
        share = index.validation_fraction
        yield "data.validation_fraction", f"'{source}' was prepared with {share}; write that or prepare it again"


def validation_has_text(validation: ValidationConfig, *, data: DataConfig) -> Iterator[Violation]:
    """There is text to validate on, and its sources can be read."""
    from recipes.data.text.sources import is_prepared, source_problem
    from recipes.data.tokens.shards import open_index

    if data.validation_fraction == 0 and HELD_OUT in validation.texts.values():
        remedy = "write 0, or give a text that is not trained on: [validation] source"
        for field in ("every", "sample_tokens"):
            if getattr(validation, field):
                problem = "needs text, but data.validation_fraction = 0 holds none out"
                yield f"validation.{field}", f"{problem}; {remedy}"
    field = "validation.sources" if validation.sources else "validation.source"
    for name, source in validation.texts.items():
        if name and not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            yield field, f"{toml(name)} names a column of metrics.jsonl; write letters, digits, and any of _ . - only"
        if source == HELD_OUT:
            continue
        try:
            message = None if is_prepared(source) and open_index(source) else source_problem(source)
        except TemporaryError:
            raise
        except UserError as error:
            message = one_line(error).removeprefix("data.source: ")
        if message:
            yield field, message


def export_has_checkpoints(checkpoint: CheckpointConfig) -> Iterator[Violation]:
    """A failed export, for example on a full disk, must not lose the run."""
    if checkpoint.export_hf and checkpoint.every == 0:
        yield "checkpoint.export_hf", "needs checkpoints, or a failed export loses the run; write every = run.steps"


def kept_checkpoints_are_saved(checkpoint: CheckpointConfig) -> Iterator[Violation]:
    """Checkpoints that are kept forever are among those that are saved."""
    every, keep_every = checkpoint.every, checkpoint.keep_every
    if keep_every and (every == 0 or keep_every % every):
        yield "checkpoint.keep_every", f"must be a multiple of checkpoint.every = {every}, or 0 to keep none forever"


def schedule_fits(schedule: ScheduleConfig, *, steps: int) -> Iterator[Violation]:
    """Warm-up and decay fit into the run."""
    warmup, decay = schedule.phases(steps)
    if decay and schedule.kind != "wsd":
        yield "schedule.decay_steps", f'is for kind = "wsd" only, not "{schedule.kind}"; write decay_steps = 0'
    elif warmup + decay > steps:
        rule = f"warmup_steps {warmup} + decay_steps {decay} = {warmup + decay} must not exceed run.steps = {steps}"
        shares = sum(phase for phase in (schedule.warmup_steps, schedule.decay_steps) if isinstance(phase, float))
        fixed = sum(phase for phase in (schedule.warmup_steps, schedule.decay_steps) if isinstance(phase, int))
        if shares and fixed == 0:
            remedy = "write shares with a sum of at most 1"
        elif shares:  # they grow with the run
            remedy = f"write steps = {math.ceil(fixed / (1 - shares)) + 1} or more, or smaller shares"
        else:
            remedy = f"write steps = {fixed} or more, or shares of the run, such as warmup_steps = 0.1"
        yield f"schedule.{'decay_steps' if decay else 'warmup_steps'}", f"{rule}; {remedy}"


def moments_can_move(optimizer: OptimizerConfig) -> Iterator[Violation]:
    """A bfloat16 moment does not change when an update is below half of its last bit, 1/512 to 1/256 of it."""
    if optimizer.state_dtype == "bfloat16" and max(optimizer.betas) > 0.99:
        rule = f'"bfloat16" would round away the small updates of betas = {toml(optimizer.betas)}'
        remedy = 'write betas of at most 0.99, such as [0.9, 0.95], or state_dtype = "float32"'
        yield "optimizer.state_dtype", f"{rule}; {remedy}"


def calibration_is_there(metrics: MetricsConfig) -> Iterator[Violation]:
    """Else the run would end once the model is built."""
    if metrics.calibrated_by and not os.path.exists(os.path.expanduser(metrics.calibrated_by)):
        yield "metrics.calibrated_by", 'there is no such file; write one of --plan --calibrated-by, or ""'


def profile_fits(profile: ProfileConfig, *, steps: int) -> Iterator[Violation]:
    """The run reaches the steps to trace."""
    last = profile.after + profile.trace_steps
    if profile.trace_steps and last > steps:
        rule = f"after {profile.after} + trace_steps {profile.trace_steps} = {last} is beyond run.steps = {steps}"
        yield "profile.after", f"{rule}; write run.steps = {last} or more, or trace earlier"


def attention_has_a_kernel(recipe: Recipe) -> Iterator[Violation]:
    """Document masks use their own kernels, and some backends need CUDA (see parallel/kernels.py)."""
    attention, data, device = recipe.attention, recipe.data, recipe.run.device
    packs_pairs = data.has_pairs and not of_transformers(recipe.model)
    if (data.document_mask or packs_pairs) and attention.backend not in ("auto", "flash3"):
        where = "on pairs, which use their" if packs_pairs else "with document_mask = true, which uses its"
        rule = f"has no effect {where} own kernels"
        yield "attention.backend", f'{rule}; write "auto", or "flash3" for GPUs that have it'
    elif device == "cpu" and attention.backend in ("cudnn", "flash3"):
        other = '"auto"' if data.document_mask or packs_pairs else '"auto", "flash" or "math"'
        yield "attention.backend", f'needs CUDA, but run.device = "cpu"; write {other}'


def flash3_fits(attention: AttentionConfig, fsdp: FSDPConfig, *, model: ModelConfig) -> Iterator[Violation]:
    """What FlashAttention 3 can compute, forward and backward (hopper/flash_api.cpp in its sources)."""
    if attention.backend != "flash3" or of_transformers(model):
        return
    if fsdp.param_dtype != "bfloat16":
        rule = 'attention.backend = "flash3" computes in 16 bits'
        yield "fsdp.param_dtype", f'{rule}; write param_dtype = "bfloat16", or backend = "auto"'
    if model.head_width % 8 or model.head_width > 256:
        yield "model.head_width", 'attention.backend = "flash3" needs a multiple of 8 up to 256; write backend = "auto"'


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


def float8_can_be_sampled(float8: Float8Config, *, compiled: bool, steps: int) -> Iterator[Violation]:
    """Hooks on the linears count the casts, and a block compiled as one graph runs no hooks."""
    if float8.sample_every == 0:
        return
    if float8.recipe == "none":
        yield "float8.sample_every", 'samples casts, but recipe = "none" makes none; write 0, or a recipe'
    elif compiled:
        message = "needs hooks in the blocks, which compile.enabled = true rules out; write 0, or enabled = false"
        yield "float8.sample_every", message
    elif float8.sample_every > steps:
        yield "float8.sample_every", f"exceeds run.steps = {steps}, so no step would be sampled; write at most {steps}"


def float8_fits(float8: Float8Config, *, model: ModelConfig) -> Iterator[Violation]:
    """Float8 matrix units need widths that are multiples of 16; torchao silently skips other linears.

    Those of a model of transformers are known when it is built: parallel/float8.py counts what it leaves out.
    """
    if float8.recipe == "none" or of_transformers(model):
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
        if width % 16:
            remedy = f'change it to {width + -width % 16}, or write float8.recipe = "none"'
            yield f"model.{field}", f"float8 needs {words} = {width} to be a multiple of 16; {remedy}"
