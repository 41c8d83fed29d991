"""Reads the [[stages]] of a recipe and the command line's --stages.NAME.section.field. Imports no torch."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Annotated, Any

from annotated_types import Ge, Interval

from parallel.errors import listed
from recipes.recipe.fields import (
    Problem,
    Violation,
    accept,
    accepts,
    choose_source,
    complaint,
    describe,
    field_types,
    sections,
    toml,
    unknown_key,
)
from recipes.recipe.paths import settle_paths
from recipes.recipe.schema import Recipe, StageConfig
from recipes.recipe.stages import Stage, stages_of

Until = Annotated[int, Ge(1)] | Annotated[float, Interval(gt=0, le=1)]
"""A step, or a share of run.steps."""
SECTIONS = (
    "data",
    "batch",
    "validation",
    "optimizer",
    "schedule",
    "mesh",
    "pipeline",
    "attention",
    "float8",
    "activation_checkpointing",
    "compile",
    "fsdp",
    "metrics",
)
"""Sections of which a stage may change all fields but those of REASONS."""
FIELDS = (
    "model.rope_theta",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.keep_every",
    "checkpoint.asynchronous",
)
"""Fields of other sections that a stage may change."""
REASONS = {
    "data.tokenizer": "the model knows the tokens of one tokenizer",
    "data.bos": "the model knows documents with or without it",
    "data.validation_fraction": "documents held out of one stage would be trained on in another",
    "data.cache": "a source that goes on is found in the same place",
    "optimizer.name": "a stage begins with the moments of the one before it",
    "optimizer.state_dtype": "a stage begins with the moments of the one before it",
    "optimizer.decay_embeddings": "a stage begins with the optimizer's groups of the one before it",
    "metrics.wandb": "the whole run has one page",
    "metrics.wandb_project": "the whole run has one page",
    "metrics.tensorboard": "the whole run has one page",
}
"""Fields that are the same in the whole run, and why."""


@dataclass
class StageTable:
    """What was written about one stage."""

    name: str
    until: int | float | None
    changes: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Key -> where it was written."""


def split(arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The arguments that are not --stages..., and those of each stage, as they would be written without stages."""
    plain: list[str] = []
    of_stages: dict[str, list[str]] = {}
    words = plain
    for argument in arguments:
        if found := re.match(r"--stages\.([^.=]*)\.?(.*)", argument, re.DOTALL):
            words, argument = of_stages.setdefault(found[1].replace("-", "_"), []), f"--{found[2]}"
        elif argument.startswith("--"):
            words = plain
        words.append(argument)
    return plain, of_stages


def _tables(tables: Any, origin: str) -> tuple[list[StageTable], list[Problem]]:
    """What a file says about stages, and what is wrong. Names and single values are checked, not yet `until`."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        example = 'is a list of tables; write [[stages]], and below it name = "first", until = 1000 and what changes'
        return [], [Problem("stages", example, toml(tables), origin)]
    found: list[StageTable] = []
    problems: list[Problem] = []
    for number, table in enumerate(tables, start=1):
        name = table.get("name")
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
            message = 'must be letters, digits and _, beginning with a letter, such as "long_32k"'
            problems.append(Problem(f"name of stage {number}", message, "" if name is None else toml(name), origin))
            name = f"stage_{number}"
        elif name in (stage.name for stage in found):
            problems.append(Problem(f"stages.{name}", "is there twice; give each stage a name of its own", "", origin))
            name = f"stage_{number}"
        until: Any = table.get("until")
        if until is not None and not accepts(Until, until):
            problems.append(_wrong_until(name, until, origin))
            until = None
        stage = StageTable(name, until)
        found.append(stage)
        for key, value in _flat({key: value for key, value in table.items() if key not in ("name", "until")}):
            if wrong := _refusal(key) or complaint(key, value):
                problems.append(Problem(f"stages.{name}.{key}", wrong, toml(value), origin))
            else:
                stage.changes[key] = accept(field_types()[key], value)
                stage.origins[key] = origin
        problems += choose_source(stage.changes, stage.changes, origin, place=f"stages.{name}.")
    return found, problems


def _override(stages: Sequence[StageTable], of_stages: Mapping[str, Sequence[str]], base: Recipe) -> list[Problem]:
    """Put what the command line says about stages into them; returns what is wrong with it."""
    if not of_stages:
        return []
    from recipes.recipe import command_line  # tyro

    problems: list[Problem] = []
    known = {stage.name: stage for stage in stages}
    for name, arguments in of_stages.items():
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the stages are {listed(known)}" if known else ""
            hint = hint or "the recipe has none; a file adds them with [[stages]]"
            problems.append(Problem(f"--stages.{name}", f"unknown stage; {hint}", "", command_line.ORIGIN))
            continue
        stage, words = known[name], list(arguments)
        flags = [place for place, word in enumerate(words) if word.partition("=")[0] == "--until"]
        for place in reversed(flags):
            _, equals, text = words.pop(place).partition("=")
            if not equals:
                text = words.pop(place) if place < len(words) and not words[place].startswith("--") else ""
            number: Any = _number(text)
            if accepts(Until, number):
                stage.until = number if place == flags[-1] else stage.until
            else:
                problems.append(_wrong_until(name, number, command_line.ORIGIN))
        values, wrong = command_line.parse(words, base)
        for problem in wrong:
            own = problem.message.replace(f"--{problem.key} ", f"--stages.{name}.{problem.key} ")
            problems.append(replace(problem, key=f"stages.{name}.{problem.key}", message=own))
        for key, value in values.items():
            if message := _refusal(key):
                problems.append(Problem(f"stages.{name}.{key}", message, toml(value), command_line.ORIGIN))
            else:
                stage.changes[key], stage.origins[key] = value, command_line.ORIGIN
        problems += choose_source(stage.changes, values, command_line.ORIGIN, place=f"stages.{name}.")
    return problems


@dataclass(frozen=True)
class Read:
    """The stages of a recipe."""

    configs: tuple[StageConfig, ...] = ()
    tables: tuple[StageTable, ...] = ()
    """The stages as they were written."""
    steps: int | None = None
    """The run.steps that the last stage gives; None if it gives none."""
    problems: tuple[Problem, ...] = ()


def read(written: Any, origin: str, of_stages: Mapping[str, Sequence[str]], base: Recipe, *, has_steps: bool) -> Read:
    """The stages as a file and the command line write them.

    Args:
        written: the value of `stages` in the file.
        origin: the file.
        of_stages: arguments of the command line, as split() returns them.
        base: the recipe without stages.
        has_steps: whether run.steps is written; otherwise the last stage says it.
    """
    tables, problems = _tables(written, origin)
    problems += _override(tables, of_stages, base)
    for stage in tables:
        problems += settle_paths(stage.changes, stage.origins, place=f"stages.{stage.name}.")
    if any(problem.key.endswith(".until") or not tables for problem in problems):
        return Read(problems=tuple(problems))
    steps = tables[-1].until if tables and not has_steps else None
    if tables and not has_steps and not isinstance(steps, int):
        message = "is missing; write it below [run], or the last step of the last stage as its until"
        return Read(tables=tuple(tables), problems=(*problems, Problem("run.steps", message, "", origin)))
    configs, wrong = _settle(tables, steps=int(steps or base.run.steps), origin=origin)
    return Read(configs, tuple(tables), int(steps) if steps else None, (*problems, *wrong))


def _settle(stages: Sequence[StageTable], *, steps: int, origin: str) -> tuple[tuple[StageConfig, ...], list[Problem]]:
    """The stages of a run of so many steps, and what is wrong with their order."""
    problems: list[Problem] = []
    settled: list[StageConfig] = []
    before = 0
    for stage in stages:
        is_last = stage is stages[-1]
        until = stage.until if stage.until is not None else steps if is_last else None
        if until is None:
            message = "is missing; write the last step of the stage, or its share of run.steps"
            message += "; only the last stage may omit it"
            problems.append(Problem(f"stages.{stage.name}.until", message, "", origin))
            continue
        step = round(until * steps) if isinstance(until, float) else until
        shown = toml(until) + (f" x {steps} steps = {step}" if isinstance(until, float) else "")
        message = ""
        if step <= before:
            message = f"leaves the stage no step: it begins after step {before}; write more than {before}"
            message += ", and the stages in the order of the run"
        elif is_last and step != steps:
            message = f"must be run.steps = {steps}, since the last stage ends the run; omit until, or change run.steps"
        elif step >= steps and not is_last:
            message = f"must be below run.steps = {steps}, since another stage follows"
        if message:
            problems.append(Problem(f"stages.{stage.name}.until", message, shown, origin))
        else:
            before = step
        settled.append(StageConfig(stage.name, step, stage.changes))
    return (() if problems else tuple(settled)), problems


def violations_of_stages(recipe: Recipe) -> Iterator[Violation]:
    """The rules that a recipe with stages breaks as a whole."""
    stages = stages_of(recipe)
    if any(stage.recipe.checkpoint.every == 0 for stage in stages):
        reason = "a stage begins from the checkpoint at the end of the one before it"
        yield "checkpoint.every", f"must not be 0 in a recipe with stages: {reason}; write the steps between saves"
    fed = [stage for stage in recipe.stages if any(key.startswith(("data.", "batch.")) for key in stage.changes)]
    if fed and any(stage.recipe.data.has_pairs for stage in stages):
        reason = "how far pairs have been read is known for one data and one batch only"
        yield "stages", f"pairs cannot change data or batch, as stage {fed[0].name} does: {reason}; write another run"
    if recipe.validation.ladder:
        yield "validation.ladder", 'predicts runs of one text and length, but this recipe has stages; write ""'
    for key in ("data.text_field", "data.text_documents", "data.shuffle_tokens"):
        yield from _same_for_one_source(stages, key.partition(".")[2])


def _same_for_one_source(stages: Sequence[Stage], name: str) -> Iterator[Violation]:
    """A source that goes on is the same text in the same order."""
    seen: dict[str, tuple[Any, str]] = {}
    for stage in stages:
        value = getattr(stage.recipe.data, name)
        for source in stage.recipe.data.sources:
            then, where = seen.setdefault(source, (value, stage.name))
            if then != value:
                rule = f"is {toml(then)} in stage {where} and {toml(value)} in stage {stage.name}"
                yield f"data.{name}", f"{rule}, which both read {toml(source)}; write the same for both"
                return


def _flat(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The dotted keys and values of one stage's table."""
    for section, value in table.items():
        if section in sections() and isinstance(value, dict):
            yield from ((f"{section}.{name}", item) for name, item in value.items())
        else:
            yield section, value


def _refusal(key: str) -> str | None:
    """Why a stage cannot change this field; None if it can."""
    if key == "base" or key in sections():
        return f"is not a table of fields; write {key}.FIELD = VALUE, such as batch.sequence_length"
    if key not in field_types():
        return unknown_key(key)
    if key in REASONS:
        return f"cannot change in a stage: {REASONS[key]}; write it outside of [[stages]], for the whole run"
    if key in FIELDS or key.partition(".")[0] in SECTIONS:
        return None
    return (
        f"cannot change in a stage; write it outside of [[stages]]. A stage changes fields of {listed(SECTIONS)},"
        f" and {listed(FIELDS)}"
    )


def _wrong_until(name: str, value: Any, origin: str) -> Problem:
    rule = f"must be a step ({describe(Annotated[int, Ge(1)])}) or a share of run.steps (a number > 0 and <= 1)"
    return Problem(
        f"stages.{name}.until", f"{rule}; write for example until = 1000 or until = 0.8", toml(value), origin
    )


def _number(text: str) -> int | float | str:
    """The number in this text; the text if there is none."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
