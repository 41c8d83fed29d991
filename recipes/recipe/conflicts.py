"""The plain rules across fields: which field is refused when, why, and what to write instead; and which needs others
to have an effect. Imports no torch."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields

from models.config import FROM_CONFIG, OF_EXPERTS, ModelConfig
from models.registry import PLACES, parts_not_ours
from recipes.data.config import HELD_OUT
from recipes.optimization.config import OPTIMIZERS, OptimizerConfig
from recipes.recipe.fields import COMMAND_LINE, Violation, field_types, sections, states_all, toml, value_of
from recipes.recipe.schema import Recipe

OF_MODEL = " ".join(
    f"model.{one.name}" for one in fields(ModelConfig) if one.name.startswith(OF_EXPERTS) and one.name != "experts"
)


class Unreadable(Exception):
    """A rule has read a field whose value is wrong: what it found before is true, and the rest cannot be known."""


def conflicts(recipe: Recipe, *keys: str) -> Iterator[Violation]:
    """The plain rules that the recipe breaks: all, or those that refuse one of these fields."""
    for key, applies, says in CONFLICTS:
        if not keys or key in keys:
            with suppress(Unreadable):
                if applies(recipe):
                    yield key, says.format_map(vars(recipe))


def _packs_pairs(r: Recipe) -> bool:
    """Whether rows of several pairs are computed by our decoder, which masks them."""
    return r.data.has_pairs and not r.model.by_transformers


def _has_masks(r: Recipe) -> bool:
    return _packs_pairs(r) or r.data.document_mask


def _hides_logits(r: Recipe) -> bool:
    return r.model.by_transformers or "attention" in parts_not_ours(r.model)


def _computes_in_16_bits(r: Recipe) -> bool:
    """Whether attention takes no float32. On a CPU, flash does; only the start knows what device "auto" is."""
    backend, device = r.attention.backend, r.run.device
    return (backend == "cudnn" and device != "cpu") or (backend == "flash" and device == "cuda")


def _splits_backward(r: Recipe) -> bool:
    """Whether stages compute gradients of weights later, for which they need the weights and the graph then.

    With resharding, torch 2.11 to 2.13 has lost gradients in silence; with selective checkpointing it fails in the
    first step. Its schedules do not support compiled modules, and do not see that blocks are.
    """
    return r.mesh.pipeline > 1 and r.pipeline.splits_backward


def _averages_unsaved(r: Recipe) -> bool:
    """Whether a validation averages checkpoints of which one was not saved."""
    every, validated, count = r.checkpoint.every, r.validation.every, r.validation.average
    return count == 1 or bool(count and not (every and validated and validated % every == 0))


def _holds_out_nothing(r: Recipe) -> bool:
    return r.data.validation_fraction == 0 and HELD_OUT in r.validation.texts.values()


ADDRESS = r"(s3|gs)://[^/]"
"""The beginning of a folder at a server."""

Conflict = tuple[str, Callable[[Recipe], object], str]
"""A field that is refused, when that is, and the reason with what to write instead, where {section.field} is a value.

What a row reads is not written down: it raises Unreadable where it reads a value that is wrong itself."""

# fmt: off
CONFLICTS: tuple[Conflict, ...] = (
    ("model.upcycle", lambda r: r.model.upcycle and not r.model.weights,
     "needs the weights of a dense model; write model.weights, or false"),
    ("model.config", lambda r: r.model.config and r.model.name != FROM_CONFIG,
     'has no effect with name = "{model.name}"; remove it, or write name = "from_config" without weights'),
    ("model.config", lambda r: r.model.config and r.model.name == FROM_CONFIG and r.model.weights,
     'has no effect with model.weights; remove it, or write name = "from_config" without weights'),
    ("model.dropout", lambda r: r.model.dropout and not r.model.by_transformers,
     "our decoder has no dropout; write dropout = false"),
    # Models of transformers.
    ("attention.backend", lambda r: r.model.by_transformers
       and r.attention.backend in (("flash", "cudnn", "flash3") if r.model.is_encoder_decoder else ("flash3",)),
     'this model of transformers cannot use "{attention.backend}"; write "auto" or "math"'),
    ("data.document_mask", lambda r: r.data.document_mask and r.model.is_encoder_decoder,
     "is for causal models; an encoder-decoder model pads its pairs; write false"),
    ("batch.sequence_length", lambda r: 0 < getattr(r.model, "positions", 0) < r.batch.sequence_length,
     "exceeds the {model.positions} positions of the model; write at most that"),
    ("mesh.overlap_tensor", lambda r: r.mesh.overlap_tensor and r.mesh.tensor > 1 and r.model.by_transformers,
     "was not tried with models of transformers; write false"),
    # Registered parts.
    ("mesh.tensor", lambda r: r.mesh.tensor > 1 and any(r.model.part(place).column is None for place in PLACES),
     'cuts only parts that say where, but one of attention = "{model.attention}", feed_forward = '
     '"{model.feed_forward}" and norm = "{model.norm}" does not; write 1'),
    ("mesh.context", lambda r: r.mesh.context > 1 and not r.model.part("attention").inner,
     'cuts attention that says where tokens see each other, but "{model.attention}" does not; write 1'),
    ("model.attention", lambda r: _has_masks(r) and not r.model.part("attention").documents,
     '"{model.attention}" lets tokens see other documents; write data.document_mask = false, and no pairs, or another'),
    ("float8.gather_activations", lambda r: r.float8.gather_activations and r.model.part("attention").whole,
     'cannot gather what attention = "{model.attention}" shares in the types of its readers; write false'),
    ("metrics.attention_logits", lambda r: r.metrics.attention_logits and _hides_logits(r),
     'is for our decoder with attention = "default" or "latent"; write false'),
    ("optimizer.qk_clip", lambda r: r.optimizer.qk_clip and (_hides_logits(r) or r.model.qk_norm != "none"),
     'scales queries and keys of our decoder with qk_norm = "none" and attention = "default" or "latent"; write 0'),
    # Kernels of attention: parallel/kernels.py chooses among them.
    ("attention.backend", lambda r: r.attention.backend not in ("auto", "flash3") and _packs_pairs(r),
     'has no effect on pairs, which use their own kernels; write "auto", or "flash3" for GPUs that have it'),
    ("attention.backend", lambda r: r.attention.backend not in ("auto", "flash3") and not _packs_pairs(r)
       and r.data.document_mask,
     'has no effect with document_mask = true, which uses its own kernels; write "auto", or "flash3" for GPUs '
     "that have it"),
    ("attention.backend", lambda r: r.run.device == "cpu" and r.attention.backend in ("cudnn", "flash3")
       and not _has_masks(r),
     'needs CUDA, but run.device = "cpu"; write "auto", "flash" or "math"'),
    ("attention.backend", lambda r: r.run.device == "cpu" and r.attention.backend == "flash3" and _has_masks(r),
     'needs CUDA, but run.device = "cpu"; write "auto"'),
    ("fsdp.param_dtype", lambda r: r.fsdp.param_dtype != "bfloat16" and r.attention.backend == "flash3"
       and not r.model.by_transformers,
     'attention.backend = "flash3" computes in 16 bits; write param_dtype = "bfloat16", or backend = "auto"'),
    ("fsdp.param_dtype", lambda r: r.fsdp.param_dtype == "float32" and _computes_in_16_bits(r),
     'attention.backend = "{attention.backend}" computes in 16 bits on a GPU; write param_dtype = "bfloat16", or '
     'backend = "auto"'),
    # hopper/flash_api.cpp in the sources of FlashAttention.
    ("model.head_width", lambda r: (r.attention.backend == "flash3" and not r.model.by_transformers
       and (r.model.head_width % 8 or r.model.head_width > 256)),
     'attention.backend = "flash3" needs a multiple of 8 up to 256; write backend = "auto"'),
    # cuDNN would align the last queries of a row with its first keys.
    ("attention.backend", lambda r: r.attention.backend == "cudnn" and r.mesh.gathers_tokens,
     'cannot attend from a part of the tokens to all, which mesh.context_by = "gather" needs; write "auto" or '
     '"flash"'),
    ("attention.backend", lambda r: r.attention.backend != "auto" and r.model.attention_sinks and not _has_masks(r),
     '"{attention.backend}" has no effect with model.attention_sinks, which has kernels of its own; write "auto"'),
    ("attention.backend", lambda r: r.attention.backend == "flash3" and r.model.attention_sinks and _has_masks(r),
     '"flash3" was not tried with model.attention_sinks; write "auto"'),
    ("attention.backend", lambda r: r.attention.backend == "cudnn" and r.model.window,
     '"cudnn" has no kernel for model.window = {model.window}; write "auto"'),
    # torch.compile fuses messages of tensor groups with products, on GPUs that read each other's memory.
    ("mesh.overlap_tensor", lambda r: r.mesh.overlap_tensor and r.mesh.tensor > 1 and r.run.device == "cpu",
     'needs CUDA, but run.device = "cpu"; write false'),
    ("mesh.overlap_tensor", lambda r: r.mesh.overlap_tensor and r.mesh.tensor > 1 and r.run.device != "cpu"
       and not r.compile.enabled,
     "is the work of torch.compile, but compile.enabled = false; write false, or compile.enabled = true"),
    # Symmetric memory is NCCL's, and torch has no room beside it for messages of its own kind.
    ("fsdp.symmetric_memory", lambda r: r.fsdp.symmetric_memory and r.run.device == "cpu",
     'needs GPUs, but run.device = "cpu"; write false'),
    ("fsdp.symmetric_memory", lambda r: r.fsdp.symmetric_memory and r.run.device != "cpu"
       and r.fsdp.reduce_dtype == "bfloat16",
     'sums in float32; write reduce_dtype = "float32", or false'),
    ("activation_checkpointing.blocks", lambda r: (r.activation_checkpointing.mode != "none"
       and isinstance(r.activation_checkpointing.blocks, int) and r.activation_checkpointing.blocks > r.model.layers),
     'exceeds the {model.layers} blocks of the model; write at most {model.layers}, a share such as 0.5, or "all"'),
    # Row-wise scales are unknown before a gather.
    ("float8.all_gather", lambda r: r.float8.all_gather and r.float8.recipe != "tensorwise",
     'needs recipe = "tensorwise", not "{float8.recipe}"; write all_gather = false or recipe = "tensorwise"'),
    ("float8.gather_activations", lambda r: r.float8.gather_activations and r.float8.recipe != "tensorwise",
     'needs recipe = "tensorwise", not "{float8.recipe}"; write gather_activations = false or recipe = '
     '"tensorwise"'),
    ("float8.all_gather", lambda r: r.float8.all_gather and r.mesh.tensor > 1,
     "would train to other numbers with mesh.tensor > 1; write all_gather = false"),
    # The kind of GPU is known only when the run starts.
    ("float8.emulate", lambda r: r.float8.recipe != "none" and not r.float8.emulate and r.run.device == "cpu",
     'must be true with run.device = "cpu": CPUs have no float8 matrix units; write emulate = true'),
    # Stages of a pipeline.
    ("pipeline.stages_per_rank", lambda r: r.mesh.pipeline > 1 and r.pipeline.schedule in ("1f1b", "gpipe")
       and r.pipeline.runs != 1,
     '"{pipeline.schedule}" has one stage on each process; write 1, or schedule = "interleaved"'),
    ("pipeline.stages_per_rank", lambda r: r.mesh.pipeline > 1 and r.pipeline.schedule == "zbv"
       and r.pipeline.runs != 2,
     '"zbv" has two stages on each process; write 2'),
    ("pipeline.stages_per_rank", lambda r: r.mesh.pipeline > 1 and r.pipeline.schedule.startswith("interleaved")
       and r.pipeline.runs == 1,
     '"{pipeline.schedule}" needs several stages on each process; write 2 or more, or schedule = "1f1b"'),
    ("fsdp.reshard_after_forward", lambda r: r.fsdp.reshard_after_forward and _splits_backward(r),
     'frees weights that pipeline.schedule = "{pipeline.schedule}" still needs for their gradients; write false, '
     'or schedule = "interleaved"'),
    ("compile.enabled", lambda r: r.compile.enabled and _splits_backward(r),
     'pipeline.schedule = "{pipeline.schedule}" cannot split the backward pass of compiled blocks; write false, '
     'or schedule = "interleaved"'),
    ("activation_checkpointing.mode", lambda r: r.activation_checkpointing.mode == "selective" and _splits_backward(r),
     '"selective" recomputes blocks once, but pipeline.schedule = "{pipeline.schedule}" needs that twice; write '
     '"none" or "full", or schedule = "interleaved"'),
    # Experts.
    ("mesh.expert", lambda r: r.mesh.expert > 1 and not r.model.experts,
     "divides routed experts, but the model has none (model.experts = 0); write 1"),
    ("experts.balance", lambda r: r.experts.moves_biases and r.model.experts and not r.model.router_bias,
     '"bias" moves biases of routers, but model.router_bias = false; write router_bias = true, or balance = "loss"'),
    ("float8.exclude", lambda r: r.model.experts and r.float8.recipe != "none" and "experts" not in r.float8.exclude,
     "torchao (0.18) multiplies experts by multiples of 16 rows only, and tokens are not padded here; add "
     '"experts", so that all other linears are converted'),
    ("float8.all_gather", lambda r: r.float8.all_gather and r.model.experts,
     "was not tried with experts; write false"),
    ("mesh.overlap_tensor", lambda r: r.mesh.overlap_tensor and r.model.experts,
     "was not tried with experts; write false"),
    # Numbers that repeat to the bit; parallel/determinism.py does the rest.
    ("attention.backend", lambda r: r.run.deterministic and r.attention.backend == "cudnn",
     'adds gradients up as they come, and run.deterministic = true; write "auto"'),
    ("attention.backend", lambda r: r.run.deterministic and r.attention.backend == "flash3",
     'need not repeat its gradients (flash-attention #1766), and run.deterministic = true; write "auto"'),
    ("compile.autotune", lambda r: r.run.deterministic and r.compile.autotune,
     "times kernels, so that two starts may choose others, and run.deterministic = true; write false"),
    ("fsdp.symmetric_memory", lambda r: r.run.deterministic and r.fsdp.symmetric_memory,
     "adds up in switches, as messages come, and run.deterministic = true; write false"),
    ("mesh.overlap_tensor", lambda r: r.run.deterministic and r.mesh.overlap_tensor,
     "was never compared to the bit, and run.deterministic = true; write false"),
    # Checkpoints kept forever are among those that are saved, those that are averaged exist, and copies go to a server.
    ("validation.average", _averages_unsaved,
     "needs 2 or more, and a checkpoint of every validated step (checkpoint.every = {checkpoint.every}); write a "
     "multiple of that as validation.every, instead of {validation.every}, or average = 0"),
    ("checkpoint.keep", lambda r: r.validation.average > r.checkpoint.keep
       and r.checkpoint.keep_every != r.checkpoint.every,
     "validation.average = {validation.average} needs as many checkpoints; write keep = {validation.average} or "
     "more"),
    ("checkpoint.remote", lambda r: r.checkpoint.remote and not re.match(ADDRESS, r.checkpoint.remote),
     'is not an address at a server; write one such as "s3://bucket/runs", or "" (run.output names the folder on '
     "this disk)"),
    ("checkpoint.remote", lambda r: r.checkpoint.every == 0 and re.match(ADDRESS, r.checkpoint.remote),
     "needs checkpoints to copy; write checkpoint.every = run.steps or less"),
    ("checkpoint.keep_every", lambda r: r.checkpoint.keep_every
       and (r.checkpoint.every == 0 or r.checkpoint.keep_every % r.checkpoint.every),
     "must be a multiple of checkpoint.every = {checkpoint.every}, or 0 to keep none forever"),
    ("run.node_timeout", lambda r: 0 < r.run.node_timeout < 3,
     "must be 0 (off) or at least 3: launchers say every second that they live"),
    ("checkpoint.memory_every", lambda r: r.checkpoint.memory_every and not r.checkpoint.every,
     "needs checkpoints on the disk, which outlive the nodes; write checkpoint.every = 500, for example"),
    # An export may fail on a full disk.
    ("checkpoint.export_hf", lambda r: r.checkpoint.export_hf and r.checkpoint.every == 0,
     "needs checkpoints, or a failed export loses the run; write every = run.steps"),
    # Validation.
    ("validation.every", lambda r: r.validation.every and _holds_out_nothing(r),
     "needs text, but data.validation_fraction = 0 holds none out; write 0, or give a text that is not trained "
     "on: [validation] source"),
    ("validation.sample_tokens", lambda r: r.validation.sample_tokens and _holds_out_nothing(r),
     "needs text, but data.validation_fraction = 0 holds none out; write 0, or give a text that is not trained "
     "on: [validation] source"),
    ("validation.ladder", lambda r: r.validation.ladder and not r.validation.every,
     'is compared at each validation; write every = 1000, for example, or ladder = ""'),
    ("validation.tasks", lambda r: r.validation.tasks and not (r.validation.every or r.validation.job),
     "are evaluated at each validation, and there is none; write validation.every = 1000, for example"),
    ("validation.job", lambda r: not re.fullmatch(r"(process( \d+(,\d+)*)?|slurm( -.+)?)?", r.validation.job),
     'must be "process", "process" and numbers of GPUs as in "process 6,7", "slurm" and options of sbatch, or ""'),
    ("validation.job", lambda r: r.validation.job and not r.checkpoint.every,
     'evaluates checkpoints, and there are none; write checkpoint.every = 1000, for example, or ""'),
    ("validation.job", lambda r: r.validation.job and r.validation.every and not r.validation.tasks,
     'has nothing to evaluate but losses, which the run does; write validation.every = 0, or job = ""'),
    ("validation.job", lambda r: r.validation.job and not r.validation.every and _holds_out_nothing(r),
     "needs text, but data.validation_fraction = 0 holds none out; give one: [validation] source"),
    ("validation.tasks", lambda r: r.validation.tasks and r.model.is_encoder_decoder,
     "are for models that continue a text, not for encoder-decoder models; omit them"),
)
# fmt: on


def _of_one_optimizer() -> Iterator[tuple[str, Callable[[Recipe], object], str]]:
    """The fields of [optimizer] that not all of them read."""
    for name in (one.name for one in fields(OptimizerConfig)):
        readers = [optimizer for optimizer, facts in OPTIMIZERS.items() if name in facts.reads]
        if readers:
            wanted = f"optimizer.name = {' or '.join(map(toml, readers))}"
            yield f"optimizer.{name}", lambda r, name=name: name in r.optimizer.facts.reads, wanted  # type: ignore[misc]


def _of_plugins(recipe: Recipe) -> Iterator[tuple[str, Callable[[Recipe], object], str]]:
    """The sections of optimizers and schedules of plug-ins."""
    for kind, field in (("optimizer", "name"), ("schedule", "kind")):
        for name in (name for name, entry in recipe.added.get(kind, {}).items() if entry.fields):
            keys = " ".join(key for key in field_types() if key.startswith(f"{name}."))
            wanted = f"{kind}.{field} = {toml(name)}"
            yield keys, lambda r, kind=kind, field=field, name=name: getattr(getattr(r, kind), field) == name, wanted  # type: ignore[misc]


# fmt: off
NEEDS: tuple[tuple[str, Callable[[Recipe], object], str], ...] = (
    (f"{OF_MODEL} experts.balance experts.z_loss", lambda r: r.model.experts, "model.experts = 8 or so"),
    ("experts.loss_weight experts.loss_over", lambda r: r.model.experts and r.experts.adds_loss,
     'experts.balance = "loss" of a model with experts'),
    ("experts.bias_rate", lambda r: r.model.experts and r.experts.moves_biases,
     'experts.balance = "bias" of a model with experts'),
    ("data.border_targets", lambda r: r.data.document_mask and not r.data.has_pairs, "data.document_mask = true"),
    ("model.rope_factor", lambda r: r.model.rope_scaling != "none", 'model.rope_scaling = "linear", for example'),
    ("model.rope_low_frequency_factor model.rope_high_frequency_factor", lambda r: r.model.rope_scaling == "llama3",
     'model.rope_scaling = "llama3"'),
    ("model.rope_original_length", lambda r: r.model.rope_scaling in ("llama3", "yarn"),
     'model.rope_scaling = "llama3" or "yarn"'),
    ("model.rope_beta_fast model.rope_beta_slow model.rope_attention_factor model.rope_truncate",
     lambda r: r.model.rope_scaling == "yarn", 'model.rope_scaling = "yarn"'),
    ("mesh.context_by", lambda r: r.mesh.context > 1, "mesh.context = 2 or more"),
    ("mesh.overlap_tensor float8.gather_activations", lambda r: r.mesh.tensor > 1, "mesh.tensor = 2 or more"),
    ("pipeline.schedule pipeline.stages_per_rank pipeline.split", lambda r: r.mesh.pipeline > 1,
     "mesh.pipeline = 2 or more"),
    ("float8.exclude", lambda r: r.float8.recipe != "none",
     'float8.recipe = "tensorwise", for example'),
    ("activation_checkpointing.blocks", lambda r: r.activation_checkpointing.mode != "none",
     'activation_checkpointing.mode = "selective" or "full"'),
    ("compile.autotune", lambda r: r.compile.enabled, "compile.enabled = true"),
    *_of_one_optimizer(),
    ("schedule.min_lr_ratio", lambda r: r.schedule.kind != "constant" and (r.schedule.kind != "wsd"
       or r.schedule.decay_steps), "a decay, by schedule.kind or schedule.decay_steps"),
    ("schedule.decay", lambda r: r.schedule.kind == "wsd" and r.schedule.decay_steps,
     'schedule.kind = "wsd" and schedule.decay_steps'),
    ("schedule.steps", lambda r: r.schedule.kind != "constant" or r.schedule.warmup_steps % 1,
     "a schedule.kind that decays, or a share as schedule.warmup_steps"),
    ("checkpoint.memory_folder", lambda r: r.checkpoint.memory_every, "checkpoint.memory_every = 10 or so"),
    ("checkpoint.keep checkpoint.asynchronous", lambda r: r.checkpoint.every, "checkpoint.every = 1000 or so"),
    ("metrics.wandb_project", lambda r: r.metrics.wandb, "metrics.wandb = true"),
    ("validation.batches", lambda r: r.validation.every or r.validation.job, "validation.every = 1000 or so"),
    ("validation.source validation.sources", lambda r: r.validation.texts,
     "validation.every = 1000 or so"),
    ("validation.task_limit", lambda r: r.validation.tasks, 'validation.tasks = ["NAME"]'),
    ("profile.after", lambda r: r.profile.trace_steps, "profile.trace_steps = 3 or so"),
)
# fmt: on
"""Fields, when a recipe reads them, and in words what it needs for that."""


def unread(keys: Collection[str], recipes: Sequence[Recipe]) -> Iterator[Violation]:
    """Those of these fields, which were written, that none of these recipes reads.

    A field is refused only where this recipe sets it, to another value than the default; its bases may set what they
    like. float8.emulate, which says something of a machine, is not among them.
    """
    for names, is_read, wanted in (*NEEDS, *_of_plugins(recipes[-1])):
        for key in filter(keys.__contains__, names.split()):
            with suppress(Unreadable):
                section, _, name = key.partition(".")
                default = getattr(sections()[section], name, {})
                if value_of(recipes[-1], key) != default and not any(map(is_read, recipes)):
                    yield key, f"has no effect without {wanted}; write that, or remove it here"


def unread_of_run(
    origins: Mapping[str, str], recipes: Sequence[Recipe], *, file: str, before: Recipe | None
) -> Iterator[Violation]:
    """As unread(), of what flags and the file of this origin set; flags may leave values of the file unread.

    recipes: of each stage. before: without the flags; None if there are none.
    """
    by_flags, by_file = ({key for key, origin in origins.items() if origin == one} for one in (COMMAND_LINE, file))
    yield from unread(by_flags, recipes)
    if not states_all(by_file):
        yield from unread(by_file, [*([before] if before else []), *recipes])
