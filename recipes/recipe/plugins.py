"""The class of recipes that load plug-ins: Recipe with their sections, and with their names among the values of fields.

Imports no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from functools import cache
from inspect import getsourcelines
from typing import Any, Literal, get_type_hints

from pydantic import ValidationError

from parallel.errors import UserError
from recipes.files.border import named
from recipes.metrics.config import TRACKERS, MetricsConfig
from recipes.optimization.config import OPTIMIZERS, SCHEDULES, OptimizerConfig, ScheduleConfig
from recipes.plugins.loading import Entry, Plugin, load_plugins
from recipes.recipe.fields import COMMAND_LINE, Problem, Written, accept, describe, field_docs, sections, toml
from recipes.recipe.paths import MODULES, module_at
from recipes.recipe.schema import Recipe

VERSIONS = "plugins.versions"


def kind_for(layers: Iterable[tuple[str, Any]], flags: Sequence[tuple[str, Sequence[str]]]) -> type[Recipe]:
    """The class of the recipe of these layers, as of load_run(), and flags: that of the plug-ins which they name last.
    Raises UserError for plug-ins that cannot be loaded; what is no list of texts is refused where fields are read."""
    asked = [(tables["plugins"].get("modules", []), where) for where, tables in layers if _is_table(tables, "plugins")]
    asked += [(words, COMMAND_LINE) for key, words in flags if key == MODULES]
    modules, where = asked[-1] if asked else ([], "")
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        return Recipe
    return with_plugins(load_plugins(module_at(module, where) for module in modules))


def settle_versions(run: Written, kind: type[Recipe], *, strict: bool) -> list[Problem]:
    """Put what is loaded among the values; returns what is wrong with the versions that are written there, if that
    counts."""
    found, written = kind.versions, run.values.get(VERSIONS)
    problems = []
    if strict and written is not None and written != found:
        rule = f"does not have the content that is here, {toml(found)}; bring it back, or remove this line to use it"
        problems.append(Problem(VERSIONS, rule, toml(written), run.origins[VERSIONS]))
    if found or written:
        run.put({VERSIONS: found}, run.origins.get(MODULES, COMMAND_LINE))
    return problems


@cache
def with_plugins(plugins: tuple[Plugin, ...]) -> type[Recipe]:
    """The class of recipes that load these plug-ins. Raises UserError for fields that no recipe could have."""
    if not plugins:
        return Recipe
    added: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(entry for plugin in plugins for entry in plugin.entries):
        added.setdefault(entry.kind, {})[entry.name or f"{number}"] = entry
    own: dict[str, type] = {}
    for entry in (entry for entries in added.values() for entry in entries.values() if entry.fields):
        _require_sound(entry)
        if entry.name in (*sections(Recipe), *own, "base", "stages"):
            raise UserError(f"{entry.place}: there is a section [{entry.name}] already; rename the {entry.kind}")
        own[entry.name] = entry.fields
    values = {kind: {name: entry.value for name, entry in entries.items()} for kind, entries in added.items()}
    for name, entry in added.get("optimizer", {}).items():
        values["optimizer"][name] = entry.value.at(entry.place)
    optimizers, schedules = OPTIMIZERS | values.get("optimizer", {}), values.get("schedule", {})
    trackers = Literal[tuple([*TRACKERS, *values.get("tracker", {})])]  # type: ignore[misc]
    classes = {
        "optimizer": _changed(OptimizerConfig, "name", Literal[tuple(optimizers)], optimizers),  # type: ignore[misc]
        "schedule": _changed(ScheduleConfig, "kind", Literal[(*SCHEDULES, *schedules)], schedules),  # type: ignore[misc]
        "metrics": _changed(MetricsConfig, "trackers", tuple[trackers, ...], {}),  # type: ignore[valid-type]
        **own,
    }
    versions = {plugin.name: plugin.version for plugin in plugins}
    members = [(name, cls, field(default_factory=cls)) for name, cls in classes.items()]
    spaces = {"added": added, "versions": versions, "loads": tuple(plugin.module for plugin in plugins)}
    return make_dataclass("Recipe", members, bases=(Recipe,), namespace=spaces, frozen=True)


def _changed(section: type, name: str, annotation: Any, table: Any) -> type:
    """The section, of which a field has this annotation, and `table` is this one."""
    default = next(one.default for one in fields(section) if one.name == name)
    space = {"table": table, "__doc__": section.__doc__}
    return make_dataclass(
        section.__name__, [(name, annotation, default)], bases=(section,), namespace=space, frozen=True
    )


def _require_sound(entry: Entry) -> None:
    """Raises UserError unless the fields of a plug-in's section are such as those of ours."""
    cls, what = entry.fields, "a frozen dataclass with a default and a text below each field"
    if not (isinstance(cls, type) and is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise UserError(f"{entry.place}: fields={cls!r} must be {what}")
    try:
        place, docs = f"{entry.place.rpartition(':')[0]}:{getsourcelines(cls)[1]}", field_docs(cls)
        hints = get_type_hints(cls, include_extras=True)
    except (OSError, TypeError, NameError, ValueError, AssertionError) as error:
        raise UserError(f"{entry.place}: fields={cls.__name__} must be {what}: {named(error)}") from None
    for one in fields(cls):
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        try:
            describe(hints[one.name])
            accept(hints[one.name], default)
        except (KeyError, TypeError, AttributeError, IndexError):
            raise UserError(f"{place}: {cls.__name__}.{one.name} has a type that no recipe can write") from None
        except ValidationError:
            is_missing = default is MISSING
            fault = "has no default" if is_missing else f"= {default!r} is not {describe(hints[one.name])}"
            raise UserError(f"{place}: {cls.__name__}.{one.name} {fault}; write {what}") from None
        if one.name not in docs:
            raise UserError(f"{place}: {cls.__name__}.{one.name} has no text below it, which --help prints; write one")


def _is_table(tables: Any, name: str) -> bool:
    return isinstance(tables.get(name), dict) and "modules" in tables[name]
