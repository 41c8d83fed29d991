"""The stages of a run: which steps each has, and the recipe that they are trained with. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Any

from recipes.recipe.fields import with_values
from recipes.recipe.schema import ONE_OR_SEVERAL, Recipe, StageConfig


@dataclass(frozen=True)
class Stage:
    """The steps first + 1 to last of a run."""

    name: str
    """"" for the only stage of a recipe without [[stages]]."""
    number: int
    """Index of the stage, from 0."""
    first: int
    """Steps of the run that are completed when the stage begins."""
    last: int
    """Steps of the run that are completed when the stage ends."""
    recipe: Recipe
    """What the stage trains with: a recipe without stages, whose run.steps is that of the whole run."""
    own_schedule: bool = False
    """Whether the schedule is over the stage's steps, not over the run's."""

    @property
    def schedule_span(self) -> tuple[int, int]:
        """The steps before the schedule begins, and the steps that it is made for."""
        first, steps = (self.first, self.last - self.first) if self.own_schedule else (0, self.recipe.run.steps)
        return first, self.recipe.schedule.steps or steps

    def learning_rate(self, step: int) -> float:
        """The learning rate of optimizer step `step` (from 0) of the run."""
        before, steps = self.schedule_span
        schedule, fields = self.recipe.schedule, self.recipe.fields_of("schedule", self.recipe.schedule.kind)
        return schedule.learning_rate(step - before, peak=self.recipe.optimizer.lr, steps=steps, fields=fields)


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    """All stages; a recipe without stages is a single one."""
    if not recipe.stages:
        return (Stage("", 0, 0, recipe.run.steps, recipe),)
    borders = [0, *(stage.until for stage in recipe.stages)]
    return tuple(
        Stage(
            stage.name,
            number,
            first,
            stage.until,
            _changed(recipe, stage),
            own_schedule=any(key.startswith("schedule.") for key in stage.changes),
        )
        for number, (first, stage) in enumerate(zip(borders, recipe.stages, strict=False))
    )


def stage_of(recipe: Recipe, step: int) -> Stage:
    """The stage of the step that follows `step` completed ones; after the last step, the last stage."""
    stages = stages_of(recipe)
    return next((stage for stage in stages if step < stage.last), stages[-1])


def tokens_of(stage: Stage) -> int:
    """Tokens of all its steps, with padding where there is any."""
    batch = stage.recipe.batch
    return (stage.last - stage.first) * batch.global_batch_size * batch.sequence_length


def at_several_lengths(recipe: Recipe) -> frozenset[str]:
    """The sources that stages read at different sequence lengths."""
    lengths: dict[str, set[int]] = {}
    for stage in stages_of(recipe):
        for source in stage.recipe.data.sources:
            lengths.setdefault(source, set()).add(stage.recipe.batch.sequence_length)
    return frozenset(source for source, found in lengths.items() if len(found) > 1)


def _changed(recipe: Recipe, stage: StageConfig) -> Recipe:
    """The recipe with the stage's values in place of its own."""
    # One source replaces several; several replace one wherever there are any.
    replaced: dict[str, Any] = {several: {} for one, several in ONE_OR_SEVERAL if one in stage.changes}
    # A schedule of its own is as long as the stage, unless that says so, too.
    own = {"schedule.steps": 0} if any(key.startswith("schedule.") for key in stage.changes) else {}
    return replace(with_values(recipe, replaced | own | stage.changes), stages=())
