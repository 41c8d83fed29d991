"""What recipe fields accept: types and ranges in words, checks of single values, documentation. Imports no torch."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w
from annotated_types import Interval, MinLen
from pydantic import ConfigDict, TypeAdapter, ValidationError

from parallel.errors import TemporaryError, UserError
from recipes.files.reading import shorten
from recipes.recipe.schema import ONE_OR_SEVERAL, Recipe

TYPE_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
COMMAND_LINE = "command line"
"""Where a value was written that no file has."""
LARGEST = 2**63
"""Integers of TOML are smaller."""
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
"""Attribute of a range of annotated_types -> its sign."""


@cache
def sections() -> dict[str, type]:
    """Section name -> its dataclass, in the order of the recipe."""
    hints = get_type_hints(Recipe)
    return {field.name: hints[field.name] for field in fields(Recipe) if is_dataclass(hints[field.name])}


@cache
def field_types() -> dict[str, Any]:
    """Dotted key, such as "batch.micro_batch_size" -> the annotation of its field."""
    return {
        f"{section}.{name}": annotation
        for section, cls in sections().items()
        for name, annotation in get_type_hints(cls, include_extras=True).items()
    }


def value_of(recipe: Recipe, key: str) -> Any:
    """The value at a dotted key."""
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with these values at these dotted keys."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return replace(recipe, **{section: replace(getattr(recipe, section), **own) for section, own in sections.items()})


def toml(value: Any) -> str:
    """The value in TOML syntax, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key)


def describe(annotation: Any) -> str:
    """Type and range in words: "an integer >= 1", "one of "a", "b"", "a list of 2, each a number > 0"."""
    if get_origin(annotation) is Annotated:
        base, *limits = get_args(annotation)
        if any(isinstance(limit, MinLen) for limit in limits):
            return "a non-empty string"
        given = [(sign, getattr(limit, bound, None)) for limit in limits for bound, sign in BOUNDS.items()]
        return f"{describe(base)} {' and '.join(f'{sign} {bound}' for sign, bound in given if bound is not None)}"
    if get_origin(annotation) is Union:  # of numbers, or of numbers and a string
        kinds = [
            list(map(toml, get_args(kind))) if get_origin(kind) is Literal else [describe(kind)]
            for kind in get_args(annotation)
        ]
        return " or ".join(word for words in kinds for word in words)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(toml, get_args(annotation)))
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        length = "a list" if items[-1] is Ellipsis else f"a list of {len(items)}"
        return f"{length}, each {describe(items[0])}"
    if get_origin(annotation) is dict:
        return f"a table of names, each with {describe(get_args(annotation)[1])}"
    return TYPE_WORDS[annotation]


def accept(annotation: Any, value: Any) -> Any:
    """The value as the field stores it. Raises ValidationError when its type or range is wrong.

    Strict: 1 is a valid float, but true and 1e3 are not integers, "3e-4" is not a float, and nan and inf are refused.
    """
    if get_origin(annotation) is tuple and isinstance(value, list):
        value = tuple(value)
    if beyond_toml(value):
        TypeAdapter(Annotated[int, Interval(gt=-LARGEST, lt=LARGEST)]).validate_python(LARGEST)  # raises
    return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False)).validate_python(value, strict=True)


def accepts(annotation: Any, value: Any) -> bool:
    """Whether the field accepts this value."""
    with suppress(ValidationError):
        accept(annotation, value)
        return True
    return False


def complaint(key: str, value: Any, *, flag: bool = False) -> str | None:
    """What is wrong with the value and what to write instead, or None. flag: from the command line, lists as words."""
    try:
        accept(field_types()[key], value)
        return None
    except ValidationError as error:
        from recipes.recipe.synonyms import wrong_value

        kinds = [found["type"] for found in error.errors()]  # of each type that the field accepts
        return wrong_value(key, value, kinds, flag=flag)


def beyond_toml(value: Any) -> bool:
    """Whether this is, or has in it, an integer that is none in TOML."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return any(isinstance(item, int) and abs(item) >= LARGEST for item in items)


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string below it in the class body."""
    (body,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: below.value.value
        for field, below in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


MOST_PROBLEMS = 100
"""So many are printed."""
Violation = tuple[str, str]
"""(dotted key, the broken rule and what to write instead)."""


@dataclass(frozen=True)
class Problem:
    """A key, what is wrong with it and what to write instead."""

    key: str
    """A dotted key such as "batch.micro_batch_size", or a section."""
    message: str
    """The rule and the remedy."""
    written: str = ""
    """The value as written; empty if it adds nothing."""
    origin: str = ""
    """The file it comes from, or "command line"."""

    def __str__(self) -> str:
        written = f" = {shorten(self.written)}" if self.written else ""
        origin = f"   ({self.origin})" if self.origin else ""
        body = textwrap.fill(self.message, 96, break_long_words=False, break_on_hyphens=False)  # 100 with the indent
        return textwrap.indent(shorten(self.key) + written + origin, "  ") + "\n" + textwrap.indent(body, "    ")


@dataclass
class Written:
    """What files and the command line say of a run, or of one of its [[stages]]."""

    name: str = ""
    """Of the stage; "" for the run."""
    until: int | float | None = None
    """Of the stage."""
    values: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> value."""
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted key -> where the value was written."""

    @property
    def prefix(self) -> str:
        """What the names of problems begin with."""
        return f"stages.{self.name}." if self.name else ""

    def read(self, table: Mapping[str, Any], origin: str, refusal: Callable[[str], str | None]) -> list[Problem]:
        """Put a file's values, by dotted key, over the others; returns what is wrong with those that are left out.

        refusal: what is wrong with a key; None if nothing is.
        """
        problems, right = [], {}
        for key, value in table.items():
            if wrong := refusal(key) or complaint(key, value):
                problems.append(Problem(self.prefix + key, wrong, toml(value), origin))
            else:
                right[key] = accept(field_types()[key], value)
        return problems + self.put(right, origin)

    def put(self, values: Mapping[str, Any], origin: str) -> list[Problem]:
        """Put valid values over the others, where one source and several replace each other; returns what is wrong
        where both are among them."""
        self.values |= values
        self.origins |= dict.fromkeys(values, origin)
        problems = []
        for one, several in ONE_OR_SEVERAL:
            if one in values and values.get(several):
                message = f"cannot be given together with {one} in the same place; remove one of them"
                problems.append(Problem(self.prefix + several, message, "", origin))
            elif one in values or several in values:
                self.remove(several if one in values else one)
        return problems

    def remove(self, key: str) -> None:
        self.values.pop(key, None)
        self.origins.pop(key, None)


def one_line(error: UserError) -> str:
    """The text of an error that lists things line by line, joined into one line."""
    head, *lines = str(error).split("\n")
    return " ".join([head, "; ".join(line.strip() for line in lines)]).strip()


def refusal_of(look: Callable[[], object]) -> str:
    """The text of the UserError that `look` raises, as one line; "" if it raises none. Raises TemporaryErrors: they are
    not the recipe's fault."""
    try:
        look()
    except TemporaryError:
        raise
    except UserError as error:
        return one_line(error)
    return ""


def refusal(problems: Sequence[Problem], *, where: str) -> UserError:
    """One error for all problems, with the text of the first MOST_PROBLEMS."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems):,} problems"
    shown, more = problems[:MOST_PROBLEMS], len(problems) - MOST_PROBLEMS
    rest = [f"  and {more:,} more"] if more > 0 else []
    return UserError("\n".join([f"{count} in {where}", *map(str, shown), *rest]))
