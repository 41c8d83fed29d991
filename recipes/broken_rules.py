"""Applies the rules across fields to a recipe and to each of its stages. Imports no torch."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from parallel.errors import listed
from recipes.fields import Problem, field_types, toml, value_of
from recipes.mesh_rules import Violation
from recipes.rules import violations
from recipes.schema import Recipe
from recipes.stages import Stage, stages_of
from recipes.weights.locate import InitialWeights

if TYPE_CHECKING:
    from recipes.stage_tables import StageTable

Given = dict[str, tuple[Any, str]]
"""Dotted key -> (value, where it was written)."""


def broken_rules(
    recipe: Recipe,
    weights: InitialWeights,
    given: Given,
    tables: "Sequence[StageTable]",
    *,
    keys: Collection[str],
    elsewhere: bool,
    processes: int | None,
    nodes: int | None,
) -> list[Problem]:
    """The rules that the recipe of any stage breaks. keys: those with other problems, which no rule reads."""
    found: dict[Violation, list[Stage]] = {}
    for stage in stages_of(recipe):
        changes = recipe.stages[stage.number].changes if recipe.stages else {}
        wrong = {key.removeprefix(f"stages.{stage.name}.") for key in keys}
        options: dict[str, Any] = {
            "processes": processes,
            "nodes": nodes,
            "broken": {key if key in field_types() else key.partition(".")[0] for key in wrong},
            "schedule_steps": stage.schedule_span[1],
        }
        if elsewhere:
            broken = violations_elsewhere(stage.recipe, **options)
        else:
            broken = violations(stage.recipe, weights, **options, written=given.keys() | changes.keys())
        for violation in broken:
            found.setdefault(violation, []).append(stage)
    problems: dict[Problem, None] = {}
    for (key, message), (stage, *others) in found.items():
        located = _located(key, message, stage.recipe, given)
        if recipe.stages and (len(others) + 1 < len(recipe.stages) or key in recipe.stages[stage.number].changes):
            also = f"; also in stage {listed(other.name for other in others)}" if others else ""
            origin = tables[stage.number].origins.get(key, located.origin)
            name = f"stages.{stage.name}.{key}"
            located = replace(located, key=name, origin=origin, message=message + also)
        problems[located] = None
    if recipe.stages:
        from recipes.stage_tables import violations_of_stages

        for key, message in violations_of_stages(recipe):
            problems[Problem(key, message) if key == "stages" else _located(key, message, recipe, given)] = None
    return list(problems)


def violations_elsewhere(
    recipe: Recipe,
    *,
    processes: int | None,
    nodes: int | None,
    broken: Collection[str] = frozenset(),
    schedule_steps: int | None = None,
) -> Iterator[Violation]:
    """The rules that a recipe for another machine breaks: without a look at its data, its weights and other files."""
    shape = replace(recipe, model=replace(recipe.model, weights="", config=""))
    unread = InitialWeights("", recipe.run.folder)
    broken = {*broken, "data.source", "metrics"}
    return violations(shape, unread, processes=processes, nodes=nodes, broken=broken, schedule_steps=schedule_steps)


def _located(key: str, message: str, recipe: Recipe, given: Given) -> Problem:
    """A broken rule as a Problem, with the value and where it was written."""
    if key not in field_types():  # a section
        origins = dict.fromkeys(origin for known, (_, origin) in given.items() if known.startswith(f"{key}."))
        return Problem(key, message, "", ", ".join(origins) or "default")
    unwritten = f"size {recipe.model.name}" if key.startswith("model.") else "default"
    return Problem(key, message, toml(value_of(recipe, key)), given[key][1] if key in given else unwritten)
