"""Command-line overrides, `--section.field value`, and --help, both parsed by tyro. Imports no torch."""

import signal
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import field, make_dataclass
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Any

import tyro

from parallel.errors import UserError
from recipes.files.screen import say
from recipes.recipe.fields import (
    COMMAND_LINE,
    Problem,
    accept,
    complaint,
    default_recipe,
    field_types,
    sections,
    toml,
    unknown_key,
    unknown_section,
    value_of,
)
from recipes.recipe.schema import Recipe

OPTIONS = ("check", "plan", "show", "processes", "nodes", "help")
"""Options of train.py itself."""
OF_PLAN = ("gpu", "tokens", "price", "json", "calibrated_by", "search", "numerics", "write")
"""Options of --plan alone."""
Flags = list[tuple[str, list[str]]]
"""(dotted key, its words), in the order of the command line."""


def parse(flags: Flags, defaults: Recipe) -> tuple[dict[str, Any], list[Problem]]:
    """The values given, by dotted key, and what is wrong with the invalid ones.

    A value that equals the default counts as given too: it overrides the model size.
    """
    groups, problems = _groups(flags)
    parsed = _quietly([word for words in groups.values() for word in words], defaults)
    values: dict[str, Any] = {}
    for key, words in groups.items():
        own = parsed or _quietly(words, defaults)  # tyro stops at the first error, so parse each flag alone
        value = value_of(own, key) if own else " ".join(words).removeprefix(f"--{key}").removeprefix("=")
        message = complaint(key, value, flag=True)
        if own is None:
            message = message or "takes one value; put a value with spaces in quotes"
            problems.append(Problem(key, message, value, COMMAND_LINE))
        elif message:
            problems.append(Problem(key, message, toml(value), COMMAND_LINE))
        else:
            values[key] = accept(field_types()[key], value)
    return values, problems


def split_section(arguments: list[str]) -> tuple[list[str], str]:
    """The other arguments of --help, and the section that the last one names; "" if it names none."""
    named = arguments[-1].strip("[]") if arguments else ""
    if named in sections():
        return arguments[:-1], named
    if len(arguments) == 1 and not Path(named).exists() and "did you mean" in (message := unknown_section(named)):
        raise UserError(f"--help {named}: {message}")
    return arguments, ""


def print_help(recipe: Recipe | None, *, usage: str, section: str = "") -> None:
    """Print every field, grouped by section, with its documentation and its value in the recipe (None: the default).

    section: the only one to print.
    """
    description = "Train a recipe. The end of this text lists the forms of the command."
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is not an error
    with suppress(SystemExit):
        _tyro(["--help"], recipe or default_recipe(), [section] if section else sections(), description=description)
    say(usage)


def split(arguments: Sequence[str]) -> tuple[Flags, dict[str, Flags], list[Problem]]:
    """The flags about the whole run, those of each stage (--stages.NAME.section.field), and what precedes them."""
    flags: Flags = []
    of_stages: dict[str, Flags] = {}
    problems = []
    words: list[str] | None = None
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, value = argument[2:].partition("=")
            key, words, target = flag.replace("-", "_"), [value] if equals else [], flags
            if key.startswith("stages."):
                name, _, key = key.removeprefix("stages.").partition(".")
                target = of_stages.setdefault(name, [])
            target.append((key, words))
        elif words is not None:
            words.append(argument)
        else:
            message = f"unexpected; after the recipe, write --section.field value or --{', --'.join(OPTIONS)}"
            problems.append(Problem(argument, message, "", COMMAND_LINE))
    return flags, of_stages, problems


def _groups(flags: Flags) -> tuple[dict[str, list[str]], list[Problem]]:
    """Dotted key -> its words for tyro (of a repeated flag, the last), and problems with unknown flags."""
    groups, problems = {}, []
    for key, values in flags:
        if (annotation := field_types().get(key)) is None:
            from recipes.recipe.synonyms import FIELDS

            close = [] if key in FIELDS else get_close_matches(key, (*OPTIONS, *OF_PLAN), n=1)
            message = f"unknown; did you mean --{close[0]}?" if close else unknown_key(key)
            message = f"needs --plan{' or --prove' * (key == 'json')}" if key in OF_PLAN else message
            problems.append(Problem(key, message, " ".join(values), COMMAND_LINE))
            continue
        if annotation is bool:
            # As in TOML, and a flag alone switches on.
            values = [{"true": "True", "false": "False"}.get(value, value) for value in values] or ["True"]
        # The first value is attached, or tyro would take one with a leading hyphen for a flag.
        groups[key] = [f"--{key}={values[0]}", *values[1:]] if values else [f"--{key}"]
    return groups, problems


def _quietly(words: list[str], defaults: Recipe) -> Recipe | None:
    """The recipe, or None if tyro cannot parse the words; its own message is dropped in favour of ours."""
    with suppress(SystemExit), redirect_stderr(StringIO()):
        return _tyro(words, defaults)
    return None


def _tyro(words: list[str], defaults: Recipe, names: Iterable[str] | None = None, **options: Any) -> Recipe:
    names = names or sections()
    # All but the stages, which are not a section: recipes/recipe/stage_tables.py reads their arguments.
    kind = make_dataclass("Recipe", [(name, sections()[name], field()) for name in names], frozen=True)
    return tyro.cli(
        kind,
        prog="train.py RECIPE",
        args=words,
        default=kind(**{name: getattr(defaults, name) for name in names}),
        use_underscores=True,  # as in recipe files
        config=(tyro.conf.FlagConversionOff,),  # --compile.enabled True, which scripts can generate
        **options,
    )
