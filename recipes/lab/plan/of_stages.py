"""The plan of a recipe with stages: memory, time and cost of each, and of all. Imports no torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from parallel.errors import UserError
from recipes.lab.plan.numbers import numbers_of
from recipes.lab.plan.plan import Plan, TrainingCost, plan
from recipes.lab.plan.screen import Money, about, answers, costs, duration, in_units, layout, number
from recipes.lab.plan.world import World
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import Stage, stages_of, tokens_of


@dataclass(frozen=True)
class StagePlan:
    """One stage, what it will need, and what its cost is computed from."""

    stage: Stage
    plan: Plan
    money: Money

    @property
    def cost(self) -> TrainingCost:
        """The cost of all its steps."""
        return self.money.of(self.plan)


def plans(recipe: Recipe, world: World, money: Money) -> list[StagePlan]:
    """A plan for each stage. Raises UserError for a number of tokens, which the steps of stages say."""
    if money.tokens is not None:
        raise UserError("--tokens: the stages of this recipe say how many each takes; change their until instead")
    return [
        StagePlan(stage, plan(stage.recipe, world), replace(money, tokens=tokens_of(stage)))
        for stage in stages_of(recipe)
    ]


def stages_screen(recipe: Recipe, stages: Sequence[StagePlan]) -> list[str]:
    """Lines for all stages and their sum."""
    lines = about(recipe, stages[0].plan.world, stages[0].plan.time)
    for planned in stages:
        stage = planned.stage
        lines += ["", f"stage {stage.name}: steps {stage.first + 1:,} to {stage.last:,}", *layout(planned.plan)]
        lines += [*answers(planned.plan), *costs(planned.plan, planned.money)]
    total, price = _sum(stages), stages[0].money.price
    paid = "" if total.money is None else f": {number(total.money)} at {price:g} each"
    return [
        *lines,
        "",
        f"all stages: {in_units(total.tokens)} tokens in {duration(total.days)},"
        f" {number(total.gpu_hours)} GPU-hours{paid}",
    ]


def stages_numbers(stages: Sequence[StagePlan]) -> dict[str, Any]:
    """The same numbers for scripts."""
    with_steps = [
        {"stage": one.stage.name, "first_step": one.stage.first + 1, "last_step": one.stage.last}
        | numbers_of(one.plan, one.money)
        for one in stages
    ]
    fits = all(planned.plan.fits for planned in stages)
    return {"stages": with_steps, "fits": fits, "cost": {**asdict(_sum(stages)), "price": stages[0].money.price}}


def _sum(stages: Sequence[StagePlan]) -> TrainingCost:
    costs, price = [planned.cost for planned in stages], stages[0].money.price
    hours = sum(cost.gpu_hours for cost in costs)
    paid = None if price is None else price * hours
    return TrainingCost(sum(cost.tokens for cost in costs), sum(cost.days for cost in costs), hours, paid)
