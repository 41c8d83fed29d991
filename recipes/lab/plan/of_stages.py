"""The plan of a recipe with stages: memory, time and cost of each, and of all. Imports no torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from parallel.errors import UserError
from recipes.lab.plan.plan import Cost, plan
from recipes.lab.plan.scaling import Size
from recipes.lab.plan.screen import Money, about, answers, costs, duration, in_units, layout, number, one
from recipes.lab.plan.world import World, degrees_of
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import Stage, stages_of, tokens_of


@dataclass(frozen=True)
class StagePlan:
    """One stage, and what it will need."""

    stage: Stage
    size: Size

    def cost(self, money: Money) -> Cost:
        """The cost of all its steps."""
        return self.money(money).of(self.size.plan)

    def money(self, money: Money) -> Money:
        return replace(money, tokens=tokens_of(self.stage))

    @property
    def title(self) -> str:
        stage = self.stage
        return f"stage {stage.name}: steps {stage.first + 1:,} to {stage.last:,}"


def plans(recipe: Recipe, world: World, money: Money) -> list[StagePlan]:
    """A plan for each stage. Raises UserError for a number of tokens, which the steps of stages say."""
    if money.tokens is not None:
        raise UserError("--tokens: the stages of this recipe say how many each takes; change their until instead")
    return [
        StagePlan(
            stage, Size(world, plan(stage.recipe, degrees_of(stage.recipe, world), gpu=world.gpu, rates=world.rates))
        )
        for stage in stages_of(recipe)
    ]


def screen(recipe: Recipe, found: Sequence[StagePlan], world: World, money: Money) -> list[str]:
    """Lines for all stages and their sum."""
    lines = about(recipe, world)
    for part in found:
        lines += ["", part.title, *layout(part.size.plan), *answers(part.size.plan)]
        lines += costs(part.size.plan, part.money(money))
    total = _sum(found, money)
    paid = "" if total.money is None else f": {number(total.money)} at {money.price:g} each"
    return [
        *lines,
        "",
        f"all stages: {in_units(total.tokens)} tokens in {duration(total.days)},"
        f" {number(total.gpu_hours)} {one(found[0].size.plan)}-hours{paid}",
    ]


def numbers(found: Sequence[StagePlan], each: Sequence[dict[str, Any]], money: Money) -> dict[str, Any]:
    """The same numbers for scripts. each: the numbers of each stage's plan."""
    stages = [
        {"stage": part.stage.name, "first_step": part.stage.first + 1, "last_step": part.stage.last, **numbers}
        for part, numbers in zip(found, each, strict=True)
    ]
    fits = all(part.size.plan.fits for part in found)
    return {"stages": stages, "fits": fits, "cost": {**asdict(_sum(found, money)), "price": money.price}}


def _sum(found: Sequence[StagePlan], money: Money) -> Cost:
    costs = [part.cost(money) for part in found]
    hours = sum(cost.gpu_hours for cost in costs)
    price = None if money.price is None else money.price * hours
    return Cost(sum(cost.tokens for cost in costs), sum(cost.days for cost in costs), hours, price)
