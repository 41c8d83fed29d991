"""Rules of the sections [optimizer] and [schedule]. Imports no torch."""

import math
from collections.abc import Iterator

from parallel.config import FSDPConfig
from recipes.files.border import foreign
from recipes.optimization.config import OptimizerConfig
from recipes.recipe.conflicts import Unreadable
from recipes.recipe.fields import Violation, toml
from recipes.recipe.schema import Recipe


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
