"""Values that nothing reads: which fields need others to have an effect.

A field is refused only where this recipe sets it, to another value than the default; its bases may set what they like.
float8.emulate, which says something of a machine, is not among them. Imports no torch.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields

from models.config import OF_EXPERTS, ModelConfig
from recipes.optimization.config import OPTIMIZERS, OptimizerConfig
from recipes.recipe.conflicts import Unreadable
from recipes.recipe.fields import COMMAND_LINE, Violation, field_types, sections, states_all, toml, value_of
from recipes.recipe.schema import Recipe

OF_MODEL = " ".join(
    f"model.{one.name}" for one in fields(ModelConfig) if one.name.startswith(OF_EXPERTS) and one.name != "experts"
)


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
    """Those of these fields, which were written, that none of these recipes reads."""
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
