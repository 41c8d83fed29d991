"""What recipe fields accept: types and ranges in words, checks of single values, documentation. Imports no torch."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w
from annotated_types import Interval, MinLen
from pydantic import ConfigDict, TypeAdapter, ValidationError

from models.registry import unregistered
from parallel.errors import TemporaryError, UserError, listed
from recipes.files.reading import shorten, toml_table
from recipes.recipe.schema import ONE_OR_SEVERAL, Recipe

TYPE_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
VALUE_WORDS = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "a list", dict: "a table"}
EXAMPLES = {
    "data.mixture": {"web.jsonl": 0.7, "code.jsonl": 0.3},
    "plugins.modules": ["lion.py"],
    "plugins.versions": {"lion": "1.0 0123456789abcdef"},
    "validation.sources": {"web": "held-out/web.jsonl", "code": "held-out/code.jsonl"},
}
"""Examples for fields whose default is not a useful one."""
COMMAND_LINE = "command line"
"""Where a value was written that no file has."""
BEFORE = {"data.border_targets": True}
"""What runs did before a field existed whose default is something else. A run that goes on keeps its value."""
LARGEST = 2**63
"""Integers of TOML are smaller."""
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
"""Attribute of a range of annotated_types -> its sign."""

_kind: ContextVar[Any] = ContextVar("_kind", default=Recipe)


@contextmanager
def recipes_of(kind: type[Recipe]) -> Iterator[None]:
    """Inside, sections and fields are those of this class: Recipe, or what with_plugins() makes of it."""
    token = _kind.set(kind)
    try:
        yield
    finally:
        _kind.reset(token)


def default_recipe() -> Recipe:
    """The recipe in which nothing is written."""
    return _kind.get()()


def sections(kind: Any = None) -> dict[str, type]:
    """Section name -> its dataclass, in the order of the recipe. kind: None = that of recipes_of()."""
    return _sections(kind or _kind.get())


def field_types(kind: Any = None) -> dict[str, Any]:
    """Dotted key, such as "batch.micro_batch_size" -> the annotation of its field. kind: see sections()."""
    return _field_types(kind or _kind.get())


@cache
def _sections(kind: Any) -> dict[str, type]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if is_dataclass(hints[field.name])}


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    return {
        f"{section}.{one.name}": get_type_hints(cls, include_extras=True)[one.name]
        for section, cls in _sections(kind).items()
        for one in fields(cls)
    }


def value_of(recipe: Recipe, key: str) -> Any:
    """The value at a dotted key."""
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)


def states_all(keys: Collection[str]) -> bool:
    """Whether a file with these dotted keys is the recipe.toml of a run, which states what was in effect."""
    known = {key for key in field_types() if not key.startswith("model.")}
    return len(known.intersection(keys)) >= 45  # as many as the first version wrote; people write less than 30


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
    if _beyond(value):
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
    annotation = field_types()[key]
    try:
        accept(annotation, value)
        return _several_as_one(key, value, flag=flag) or unregistered(key.removeprefix("model."), value)
    except ValidationError as error:
        from recipes.recipe.synonyms import is_wish

        kinds = [found["type"] for found in error.errors()]  # of each type that the field accepts
    rule = f"must be {describe(annotation)}"
    if "finite_number" in kinds:
        rule = rule.replace("a number", "a finite number")
    of_right_type = any("_than" in kind or kind == "finite_number" for kind in kinds)
    of_right_type = of_right_type or (get_origin(annotation) is tuple and isinstance(value, list))
    if kinds[0].endswith("_type") and not flag and not of_right_type:
        rule += f", and {shorten(toml(value))} is {VALUE_WORDS.get(type(value), 'a ' + type(value).__name__)}"
    if _beyond(value):
        rule += f" and < {LARGEST}" if of_right_type else ""
    close = [candidate for candidate in _readings(annotation, value) if accepts(annotation, candidate)]
    if not close and (is_wish(value) or annotation is bool or get_origin(annotation) is Literal):
        return rule  # says all that there is; the default would be one answer to any wish
    instead = close[0] if close else EXAMPLES.get(key, value_of(default_recipe(), key))
    example = "" if close else "for example "
    if flag:
        instead = [word for item in instead.items() for word in item] if isinstance(instead, dict) else instead
        words = instead if isinstance(instead, list | tuple) else [instead]
        typed = " ".join(str(word).lower() if isinstance(word, bool) else str(word) for word in words)
        return f"{rule}; write {example}--{key} {typed}".rstrip()
    return f"{rule}; write {example}{key.partition('.')[2]} = {toml(instead)}"


def _several_as_one(key: str, value: Any, *, flag: bool) -> str | None:
    """What is wrong with a list of texts of which one is a list itself, as "a, b" or "['a', 'b']"; None if nothing."""
    texts = value if isinstance(value, list | tuple) else []
    if not any(isinstance(text, str) and re.search(r"[,\[\]]", text) for text in texts):
        return None
    words = [word for text in texts for word in re.findall(r"[^\s,'\"\[\]]+", text)]
    instead = f"--{key} {' '.join(words)}" if flag else f"{key.partition('.')[2]} = {toml(words)}"
    return f"has a list written as one text; write {instead}"


def _readings(annotation: Any, value: Any) -> list[Any]:
    """What the user may have meant by a value of the wrong type, most likely first."""
    from recipes.recipe.synonyms import meanings

    choices = get_args(annotation) if get_origin(annotation) is Union else (annotation,)
    words = [word for choice in choices if get_origin(choice) is Literal for word in get_args(choice)]
    readings = meanings(value, words if choices == (annotation,) else ())
    if isinstance(value, str):
        for text in (value, value.lower()):  # "3e-4", "True"
            with suppress(ValueError):
                readings.append(toml_table(f"v = {text}")["v"])
        readings += get_close_matches(value.lower(), words, n=1, cutoff=0.5)
    readings += [int(x) for x in (value, *readings) if isinstance(x, float) and x.is_integer()]  # 1e3
    if get_origin(annotation) is tuple and not isinstance(value, list | dict):
        readings += [[x] for x in (value, *readings)]
    elif isinstance(value, list) and len(value) == 1:
        readings += value
    if isinstance(value, int | float):
        readings += [str(value), *([bool(value)] if value in (0, 1) else [])]
    return readings


def _beyond(value: Any) -> bool:
    """Whether this is, or has in it, an integer that is none in TOML."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return any(isinstance(item, int) and abs(item) >= LARGEST for item in items)


def unknown_section(name: str) -> str:
    """The message for a [section] that does not exist."""
    if message := _of_other_programs(name, "section"):
        return message
    from recipes.recipe.synonyms import SECTIONS

    close = [SECTIONS[_normal(name)]] if _normal(name) in SECTIONS else []
    close = close or get_close_matches(_normal(name), sections(), n=1)
    hint = f"did you mean [{close[0]}]?" if close else f"the sections are {listed(sections())}"
    return f"unknown section; {hint}"


def unknown_key(key: str) -> str:
    """The message for a dotted or bare key that does not exist."""
    from recipes.recipe.synonyms import GONE

    if key in GONE:
        return f"is gone; {GONE[key]}"
    section, _, name = _normal(key).rpartition(".")
    if name == "base":
        return 'unknown key; base = "other.toml" belongs in a file, above its first [section]'
    if name in sections() and not section:
        return f"is a section; its keys are {listed(key for key in field_types() if key.startswith(name + '.'))}"
    if message := _of_other_programs(name, "key"):
        return message
    names = {known: known.partition(".")[2] for known in field_types()}
    of_section = {bare: known for known, bare in names.items() if known.startswith(section + ".")}
    if name in of_section:
        return f"unknown key; did you mean {of_section[name]}?"
    elsewhere = [known for known, bare in names.items() if bare == name]
    if not elsewhere and (close := get_close_matches(name, of_section, n=1)):
        elsewhere = [of_section[close[0]]]
    if not elsewhere:
        close = get_close_matches(name, set(names.values()), n=2, cutoff=0.7)
        elsewhere = [known for known, bare in names.items() if bare in close]
    if elsewhere:
        return f"unknown key; did you mean {listed(elsewhere, last='or')}?"
    if of_section:
        return f"unknown key; [{section}] has {listed(of_section)}"
    return f"unknown key; every key belongs to a section: {listed(sections())}"


def _of_other_programs(name: str, what: str) -> str | None:
    """The message for what other programs call learning_rate, tp, cp_size, pp, ...; None for other names."""
    from recipes.recipe.synonyms import FIELDS

    name = _normal(name)
    field = FIELDS.get(name) or FIELDS.get(re.sub("(_degree|_size)?$", "", name, count=1))
    return f"unknown {what}; did you mean {field}?" if field else None


def _normal(name: str) -> str:
    return name.replace("-", "_").lower()


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
    until: int | float | str | None = None
    """Of the stage; a text for tokens."""
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
