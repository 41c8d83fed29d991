"""Rules that span several fields of a recipe, or check what it names on the disk, applied to it and to each stage.

The plain ones are rows of conflicts.py. What a rule reads is written down nowhere: it runs on a recipe in which reading
a value that is wrong itself raises, and then it is skipped. Imports no torch.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from models.config import ModelConfig
from models.registry import parts_not_ours
from parallel.config import FSDPConfig
from parallel.errors import listed
from recipes.checkpoint.config import CheckpointConfig
from recipes.files.border import foreign
from recipes.metrics.config import ProfileConfig
from recipes.optimization.config import OptimizerConfig
from recipes.recipe.conflicts import Unreadable, conflicts, unread, unread_of_run
from recipes.recipe.fields import Problem, Violation, Written, field_types, refusal_of, sections, toml, value_of
from recipes.recipe.rules_data import (
    data_is_there,
    needs_are_met,
    text_can_be_cut,
    tokenizer_fits,
    tokens_are_read_as_they_are,
    validation_is_there,
)
from recipes.recipe.rules_mesh import batch_divides, mesh_fits
from recipes.recipe.schema import Recipe, RunConfig
from recipes.recipe.stages import Stage, stages_of

if TYPE_CHECKING:
    from recipes.weights.locate import InitialWeights


def readable(recipe: Recipe, broken: Collection[str]) -> Recipe:
    """The recipe, in which reading one of these fields, or anything of one of these sections, raises Unreadable."""
    wrong: dict[str, set[str]] = {}
    for key in broken:
        section, _, name = key.partition(".")
        known = [name] if name else dir(getattr(recipe, section))
        wrong.setdefault(section, set()).update(name for name in known if not name.startswith("_"))
    return replace(recipe, **{section: _guarded(getattr(recipe, section), names) for section, names in wrong.items()})


def _guarded(section: Any, wrong: Collection[str]) -> Any:
    """The section, of a class below its own, so that its methods and properties read through the guard as well."""

    def read(self: Any, name: str) -> Any:
        if name in wrong:
            raise Unreadable(name)
        return object.__getattribute__(self, name)

    guarded: Any = object.__new__(type(type(section).__name__, (type(section),), {"__getattribute__": read}))
    guarded.__dict__.update(section.__dict__)
    return guarded


def violations(
    recipe: Recipe,
    weights: "InitialWeights | None",
    *,
    processes: int | None = None,
    nodes: int | None = None,
    broken: Collection[str] = (),
    written: Collection[str] = (),
    schedule_steps: int | None = None,
    elsewhere: bool = False,
) -> Iterator[Violation]:
    """Every rule the recipe breaks.

    Args:
        recipe, weights: all of it, and what it starts from; None if it names no weights and no config.
        processes, nodes: their numbers, where they are known.
        broken: fields with invalid values, and sections with unknown keys; rules that read them are skipped.
        written: fields with values of their own, not those of the model size or the schema.
        schedule_steps: those of a stage with a schedule of its own; None = run.steps.
        elsewhere: whether the recipe is for another machine, so that nothing that it names is looked at.
    """
    recipe = readable(recipe, broken)
    model, mesh, world = recipe.model, recipe.mesh, {"processes": processes, "nodes": nodes}
    # Rules are generators: nothing runs, and no field is read, before one is iterated.
    rules = [
        hardware_is_known(recipe.run),
        model_is_consistent(model),
        mesh_fits(mesh, **world),
        shares_are_equal(recipe, **world),
        conflicts(recipe),
        pipeline_fits(recipe, **world),
        experts_fit(recipe, **world),
        batch_divides(recipe.batch, mesh=mesh, **world),
        widths_fit(recipe),
        export_is_possible(recipe.checkpoint, model=model),
        best_is_saved(recipe),
        schedule_fits(recipe, steps=schedule_steps),
        moments_can_move(recipe.optimizer),
        optimizer_fits(recipe.optimizer, fsdp=recipe.fsdp),
        profile_fits(recipe.profile, run=recipe.run),
        parts_are_loaded(recipe),
        *(of_plugin(recipe, entry) for entry in recipe.added.get("rule", {}).values()),
    ]
    if not elsewhere:
        rules += [
            weights_fit(model, weights, written=written),
            text_can_be_cut(recipe.data),
            data_is_there(recipe.data, batch=recipe.batch),
            tokens_are_read_as_they_are(recipe.data, validation=recipe.validation),
            tokenizer_fits(recipe, weights),
            validation_is_there(recipe.validation),
            ladder_is_comparable(recipe),
            needs_are_met(recipe),
        ]
    for rule in rules:
        with suppress(Unreadable):
            yield from rule


def parts_are_loaded(recipe: Recipe) -> Iterator[Violation]:
    """A part that another recipe of this process, or a checkpoint, has loaded is not known to the next start."""
    for place, name in parts_not_ours(recipe.model).items():
        if f"{place}.{name}" not in recipe.added.get("part", {}):
            rule = f'must name the module that registers model.{place} = "{name}", for later starts to find it'
            yield "plugins.modules", f'{rule}; write modules = ["{name}.py"] or so'


def of_plugin(recipe: Recipe, entry: Any) -> Iterator[Violation]:
    """What the rule of a plug-in finds. Raises UserError for one that fails."""
    with foreign(f"{entry.place}: this rule fails", but=Unreadable):
        yield from [(str(key), str(message)) for key, message in entry.value(recipe)]


def broken_rules(
    recipe: Recipe,
    weights: "InitialWeights | None",
    written: Sequence[Written],
    *,
    wrong: Collection[str],
    file: str = "",
    before: Recipe | None = None,
    **options: Any,
) -> list[Problem]:
    """The rules that the recipe of any stage breaks, as problems.

    Args:
        recipe, weights, options: see violations().
        written: what was written of the run, and of each stage.
        wrong: keys with other problems, which no rule reads.
        file: the origin of what the recipe's file sets, which must be read, as what flags set; "" if it need not.
        before: the recipe without the command line, which may leave values of the file unread; None if there is none.
    """
    run, *of_stages = written
    broken_in: dict[Violation, list[Stage]] = {}
    readables: list[Recipe] = []
    for stage in stages_of(recipe):
        changes = recipe.stages[stage.number].changes if recipe.stages else {}
        broken = {key.removeprefix(f"stages.{stage.name}.") for key in wrong}
        # An unknown key may mean any field of its section, and these say what the others of the model are.
        whole = {"model.name", "model.weights", "model.config"}
        broken = {key if key in field_types() and key not in whole else key.partition(".")[0] for key in broken}
        broken &= {*field_types(), *sections()}
        readables.append(readable(stage.recipe, broken))
        rules = violations(
            stage.recipe,
            weights,
            broken=broken,
            written=run.values.keys() | changes.keys(),
            schedule_steps=stage.last - stage.first if stage.own_schedule else None,
            **options,
        )
        for violation in (*rules, *unread(changes.keys(), readables[-1:])):
            broken_in.setdefault(violation, []).append(stage)
    problems: dict[Problem, None] = {}
    if file:
        for key, message in unread_of_run(run.origins, readables, file=file, before=before):
            problems[_located(key, message, recipe, run)] = None
    for (key, message), (stage, *others) in broken_in.items():
        located = _located(key, message, stage.recipe, run)
        if recipe.stages and (len(others) + 1 < len(recipe.stages) or key in recipe.stages[stage.number].changes):
            also = f"; also in stage {listed(other.name for other in others)}" if others else ""
            origin = of_stages[stage.number].origins.get(key, located.origin)
            located = replace(located, key=f"stages.{stage.name}.{key}", origin=origin, message=message + also)
        problems[located] = None
    if recipe.stages:
        from recipes.recipe.stage_tables import violations_of_stages

        for key, message in violations_of_stages(recipe):
            problems[Problem(key, message) if key == "stages" else _located(key, message, recipe, run)] = None
    return list(problems)


def _located(key: str, message: str, recipe: Recipe, run: Written) -> Problem:
    """A broken rule as a Problem, with the value and where it was written."""
    if key not in field_types():  # a section
        origins = dict.fromkeys(origin for known, origin in run.origins.items() if known.startswith(f"{key}."))
        return Problem(key, message, "", ", ".join(origins) or "default")
    unwritten = f"size {recipe.model.name}" if key.startswith("model.") else "default"
    return Problem(key, message, toml(value_of(recipe, key)), run.origins.get(key, unwritten))


def schedule_fits(recipe: Recipe, *, steps: int | None) -> Iterator[Violation]:
    """The schedule fits so many steps (None = those of the run), warm-up and decay fit into it; a plug-in's works."""
    schedule, steps = recipe.schedule, steps or recipe.run.steps
    name = "schedule.steps" if schedule.steps else "run.steps"
    if 0 < schedule.steps < steps:
        yield "schedule.steps", f"is less than the {steps} steps that are trained by it; write more, or 0"
    steps = schedule.steps or steps
    warmup, decay = schedule.phases(steps)
    if decay and schedule.kind != "wsd":
        yield "schedule.decay_steps", f'is for kind = "wsd" only, not "{schedule.kind}"; write decay_steps = 0'
    elif warmup + decay > steps:
        rule = f"warmup_steps {warmup} + decay_steps {decay} = {warmup + decay} must not exceed {name} = {steps}"
        shares = sum(phase for phase in (schedule.warmup_steps, schedule.decay_steps) if isinstance(phase, float))
        fixed = sum(phase for phase in (schedule.warmup_steps, schedule.decay_steps) if isinstance(phase, int))
        if shares and fixed == 0:
            remedy = "write shares with a sum of at most 1"
        elif shares:  # they grow with the run
            remedy = f"write steps = {math.ceil(fixed / (1 - shares)) + 1} or more, or smaller shares"
        else:
            remedy = f"write steps = {fixed} or more, or shares of the run, such as warmup_steps = 0.1"
        yield f"schedule.{'decay_steps' if decay else 'warmup_steps'}", f"{rule}; {remedy}"
    elif entry := recipe.added.get("schedule", {}).get(schedule.kind):
        with foreign(f"{entry.place}: this schedule fails", but=Unreadable):
            for step in {0, warmup, (warmup + steps) // 2, steps - 1} - {steps}:
                schedule.learning_rate(step, peak=1.0, steps=steps, fields=recipe.fields_of("schedule", schedule.kind))


def moments_can_move(optimizer: OptimizerConfig) -> Iterator[Violation]:
    """A bfloat16 moment does not change when an update is below half of its last bit, 1/512 to 1/256 of it."""
    reads = optimizer.facts.reads
    if optimizer.state_dtype != "bfloat16" or "state_dtype" not in reads:
        return
    if max(optimizer.betas) > 0.99:
        rule = f'"bfloat16" would round away the small updates of betas = {toml(optimizer.betas)}'
        remedy = 'write betas of at most 0.99, such as [0.9, 0.95], or state_dtype = "float32"'
        yield "optimizer.state_dtype", f"{rule}; {remedy}"
    elif "momentum" in reads and optimizer.momentum > 0.99:
        rule = f'"bfloat16" would round away the small updates of momentum = {optimizer.momentum:g}'
        remedy = 'write a momentum of at most 0.99, such as 0.95, or state_dtype = "float32"'
        yield "optimizer.state_dtype", f"{rule}; {remedy}"


def optimizer_fits(optimizer: OptimizerConfig, *, fsdp: FSDPConfig) -> Iterator[Violation]:
    """Whole matrices are multiplied on the device."""
    if optimizer.facts.orthogonalizes and fsdp.cpu_offload:
        rule = f'would leave the matrix products of optimizer.name = "{optimizer.name}" to the host\'s processor'
        yield "fsdp.cpu_offload", f'{rule}; write false, or name = "adamw"'


# Rules that most recipes do not meet import what they need only for those.


def hardware_is_known(run: RunConfig) -> Iterator[Violation]:
    """--check and --plan know the memory of some GPUs."""
    if run.hardware:
        from recipes.metrics.hardware import MEMORY, hardware_of

        if hardware_of("", written=run.hardware) is None:
            known = listed((name.lower() for name in MEMORY), last="or")
            rule = 'names no number of known GPUs; write one such as "8xh100" or "48x8h100"'
            yield "run.hardware", f"{rule}, with {known}"


def model_is_consistent(model: ModelConfig) -> Iterator[Violation]:
    """The fields of the model are consistent with each other."""
    yield from ((f"model.{field}", message) for field, message in model.problems())


def weights_fit(
    model: ModelConfig, initial: "InitialWeights | None", *, written: Collection[str]
) -> Iterator[Violation]:
    """What holds for models that weights or a config.json define."""
    if initial is not None and (model.weights or model.config):
        from recipes.recipe import rules_weights

        yield from rules_weights.weights_fit(model, initial, written=written)
        yield from rules_weights.config_fits(model, initial, written=written)


def shares_are_equal(recipe: Recipe, **world: int | None) -> Iterator[Violation]:
    """What holds for processes that share sequences or matrices."""
    mesh, float8 = recipe.mesh, recipe.float8
    if mesh.tensor > 1 or mesh.context > 1 or float8.recipe != "none":
        from recipes.recipe.rules_axes import mesh_divides_model

        yield from mesh_divides_model(mesh, model=recipe.model, batch=recipe.batch, float8=float8, **world)


def widths_fit(recipe: Recipe) -> Iterator[Violation]:
    """What holds for matrices in float8."""
    if recipe.float8.recipe != "none":
        from recipes.recipe.rules_axes import float8_fits

        yield from float8_fits(recipe.float8, model=recipe.model)


def pipeline_fits(recipe: Recipe, *, processes: int | None, nodes: int | None) -> Iterator[Violation]:
    """What holds for the stages of a pipeline."""
    if recipe.mesh.pipeline > 1:
        from recipes.recipe.rules_axes import stages_can_run

        yield from stages_can_run(recipe, processes=processes, nodes=nodes)


def experts_fit(recipe: Recipe, **world: int | None) -> Iterator[Violation]:
    """What holds for routed experts."""
    if recipe.model.experts:
        from recipes.recipe.rules_axes import experts_can_run

        yield from experts_can_run(recipe, **world)


def ladder_is_comparable(recipe: Recipe) -> Iterator[Violation]:
    """The run validates what the ladder predicts."""
    if path := recipe.validation.ladder:
        from recipes.recipe.rules_ladder import ladder_for

        if refused := refusal_of(lambda: ladder_for(recipe, path)):
            yield "validation.ladder", f'{refused}; write the ladder.json of a ladder of this recipe, or ""'


def export_is_possible(checkpoint: CheckpointConfig, *, model: ModelConfig) -> Iterator[Violation]:
    """Hugging Face's formats have everything of the model."""
    if checkpoint.export_hf:
        from models.hf import beyond_hf

        if problem := beyond_hf(model):
            yield "checkpoint.export_hf", f"cannot export model.{problem}; write export_hf = false"


def best_is_saved(recipe: Recipe) -> Iterator[Violation]:
    """What the best checkpoint is chosen by is known when it is saved."""
    if recipe.checkpoint.keep_best:
        from recipes.recipe.rules_tasks import best_problems

        yield from (
            ("checkpoint.keep_best", message) for message in best_problems(recipe.checkpoint, recipe.validation)
        )


def profile_fits(profile: ProfileConfig, *, run: RunConfig) -> Iterator[Violation]:
    """The run reaches the steps to trace."""
    last = profile.after + profile.trace_steps
    if profile.trace_steps and last > run.steps:
        rule = f"after {profile.after} + trace_steps {profile.trace_steps} = {last} is beyond run.steps = {run.steps}"
        yield "profile.after", f"{rule}; write run.steps = {last} or more, or trace earlier"
