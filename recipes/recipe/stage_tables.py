"""Reads the [[stages]] of a recipe and the command line's --stages.NAME.section.field. Imports no torch."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Interval

from parallel.errors import listed
from recipes.recipe.fields import (
    COMMAND_LINE,
    LARGEST,
    Problem,
    Violation,
    Written,
    accepts,
    describe,
    field_types,
    sections,
    toml,
    unknown_key,
    with_values,
)
from recipes.recipe.paths import settle_paths
from recipes.recipe.schema import Recipe, StageConfig
from recipes.recipe.stages import Stage, stages_of

if TYPE_CHECKING:
    from recipes.recipe.command_line import Flags

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
    "checkpoint.memory_every",
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
    "optimizer.decay_norms": "a stage begins with the optimizer's groups of the one before it",
    "validation.job": "the whole run has one queue",
    "metrics.wandb": "the whole run has one page",
    "metrics.wandb_project": "the whole run has one page",
    "metrics.tensorboard": "the whole run has one page",
}
"""Fields that are the same in the whole run, and why."""


def _tables(tables: Any, origin: str) -> tuple[list[Written], list[Problem]]:
    """What a file says about stages, and what is wrong. Names and single values are checked, not yet `until`."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        example = 'is a list of tables; write [[stages]], and below it name = "first", until = 1000 and what changes'
        return [], [Problem("stages", example, toml(tables), origin)]
    found: list[Written] = []
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
        if until is not None and not accepts(Until, until) and not _tokens(until):
            problems.append(_wrong_until(name, until, origin))
            until = None
        found.append(stage := Written(name, until))
        changes = {key: value for key, value in table.items() if key not in ("name", "until")}
        problems += stage.read(dict(_flat(changes)), origin, _refusal)
    return found, problems


def _override(stages: Sequence[Written], of_stages: Mapping[str, "Flags"], base: Recipe) -> list[Problem]:
    """Put what the command line says about stages into them; returns what is wrong with it."""
    if not of_stages:
        return []
    from recipes.recipe import command_line  # tyro

    problems: list[Problem] = []
    known = {stage.name: stage for stage in stages}
    for name, flags in of_stages.items():
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the stages are {listed(known)}" if known else ""
            hint = hint or "the recipe has none; a file adds them with [[stages]]"
            problems.append(Problem(f"--stages.{name}", f"unknown stage; {hint}", "", COMMAND_LINE))
            continue
        stage = known[name]
        for words in [words for key, words in flags if key == "until"]:
            number: Any = _number(" ".join(words))
            if accepts(Until, number) or _tokens(number):
                stage.until = number
            else:
                problems.append(_wrong_until(name, number, COMMAND_LINE))
        values, wrong = command_line.parse([flag for flag in flags if flag[0] != "until"], base)
        for problem in wrong:
            message = problem.message.replace(f"--{problem.key} ", f"--{stage.prefix}{problem.key} ")
            problems.append(replace(problem, key=stage.prefix + problem.key, message=message))
        for key in [*values]:
            if refused := _refusal(key):
                problems.append(Problem(stage.prefix + key, refused, toml(values.pop(key)), COMMAND_LINE))
        problems += stage.put(values, COMMAND_LINE)
    return problems


def read_stages(
    tables: Any, origin: str, of_stages: Mapping[str, "Flags"], base: Recipe, run: Written
) -> tuple[tuple[StageConfig, ...], list[Written], list[Problem]]:
    """The stages as a file and the command line write them: settled, as they were written, and what is wrong.

    Args:
        tables, origin: the value of `stages` in the file, and the file.
        of_stages: the flags of each stage.
        base: the recipe without stages.
        run: what is written of the run; without run.steps, it gets that of the last stage.
    """
    stages, problems = _tables(tables, origin)
    problems += _override(stages, of_stages, base)
    for stage in stages:
        problems += settle_paths(stage)
    if any(problem.key.endswith(".until") or not stages for problem in problems):
        return (), stages, problems
    if problem := _count_tokens(stages, base, run.values.get("run.steps"), origin):
        return (), stages, [*problems, problem]
    if "run.steps" not in run.values:
        steps = stages[-1].until
        if not isinstance(steps, int):
            message = "is missing; write it below [run], or the last step of the last stage as its until"
            return (), stages, [*problems, Problem("run.steps", message, "", origin)]
        run.put({"run.steps": steps}, origin)
    configs, wrong = _settle(stages, steps=run.values["run.steps"], origin=origin)
    return configs, stages, problems + wrong


def _tokens(until: Any) -> float:
    """The tokens in "2.5e9 tokens"; 0 for anything else."""
    number = _number(until.removesuffix(" tokens")) if isinstance(until, str) and until.endswith(" tokens") else 0
    return number if isinstance(number, int | float) and 0 < number < LARGEST else 0


def _count_tokens(stages: Sequence[Written], base: Recipe, steps: int | None, origin: str) -> Problem | None:
    """Replace each `until` that counts the tokens of the run by the nearest step. Returns what is wrong.

    steps: run.steps, without which shares of it are unknown.
    """
    step = tokens = 0
    for stage in stages:
        batch = with_values(base, {key: value for key, value in stage.values.items() if key.startswith("batch.")}).batch
        each = batch.global_batch_size * batch.sequence_length
        message = ""
        if stage.until is None and stage is not stages[-1]:
            message = "is missing; write its last step, or its share of run.steps; only the last stage may omit it"
        elif (amount := _tokens(stage.until)) and step < 0:
            message = "counts tokens after a stage that ends with a share of the steps; write steps there, or here"
        elif 0 < amount <= tokens:
            message = f"leaves the stage no step: those before it have {tokens:,} tokens; write more"
        if message:
            return Problem(f"stages.{stage.name}.until", message, toml(stage.until) if stage.until else "", origin)
        stage.until = step + round((amount - tokens) / each) if amount else stage.until
        until = round(stage.until * steps) if isinstance(stage.until, float) and steps else stage.until
        step, tokens = (until, tokens + (until - step) * each) if isinstance(until, int) else (-1, 0)
    return None


def _settle(stages: Sequence[Written], *, steps: int, origin: str) -> tuple[tuple[StageConfig, ...], list[Problem]]:
    """The stages of a run of so many steps, and what is wrong with their order."""
    problems: list[Problem] = []
    settled: list[StageConfig] = []
    before = 0
    for stage in stages:
        is_last = stage is stages[-1]
        until = steps if stage.until is None else stage.until
        assert not isinstance(until, str), "_count_tokens() puts a step there"
        step = round(until * steps) if isinstance(until, float) else until
        shown = toml(until) + (f" x {steps} steps = {step}" if isinstance(until, float) else "")
        message = ""
        if step <= before:
            message = f"leaves the stage no step: it begins after step {before}; write more, and stages in their order"
        elif is_last and step != steps:
            message = f"must be run.steps = {steps}, since the last stage ends the run; omit until, or change run.steps"
        elif step >= steps and not is_last:
            message = f"must be below run.steps = {steps}, since another stage follows"
        if message:
            problems.append(Problem(f"stages.{stage.name}.until", message, shown, origin))
        else:
            before = step
        settled.append(StageConfig(stage.name, step, stage.values))
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
    if key in FIELDS or (section := key.partition(".")[0]) in SECTIONS or section not in sections(Recipe):
        return None
    return (
        f"cannot change in a stage; write it outside of [[stages]]. A stage changes fields of {listed(SECTIONS)},"
        f" and {listed(FIELDS)}"
    )


def _wrong_until(name: str, value: Any, origin: str) -> Problem:
    rule = f"must be a step ({describe(Annotated[int, Ge(1)])}) or a share of run.steps (a number > 0 and <= 1)"
    example = 'write for example until = 1000, until = 0.8 or until = "2.5e9 tokens"'
    return Problem(f"stages.{name}.until", f"{rule} or tokens of the run; {example}", toml(value), origin)


def _number(text: str) -> int | float | str:
    """The number in this text; the text if there is none."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
