"""The class of recipes that load plug-ins: Recipe with their sections, and with their names among the values of fields.

Imports no torch.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, field, fields, make_dataclass, replace
from functools import cache
from inspect import getsourcelines
from keyword import kwlist
from typing import Any, Literal, get_args, get_type_hints

from parallel.errors import UserError
from recipes.files.border import named
from recipes.plugins.loading import Entry, Plugin, load_plugins
from recipes.recipe.fields import COMMAND_LINE, Problem, Written, accept, describe, field_docs, sections, toml
from recipes.recipe.paths import MODULES, module_at
from recipes.recipe.schema import Recipe

VERSIONS = "plugins.versions"
NAMING = {"optimizer": ("optimizer", "name"), "schedule": ("schedule", "kind"), "tracker": ("metrics", "trackers")}
"""Kind of what is registered -> section and field that name one."""
SUCH = "write a dataclass in which each field has a type, a default of it, and a text below it for --help"


def kind_for(layers: Iterable[tuple[str, Any]], flags: Sequence[tuple[str, Sequence[str]]]) -> type[Recipe]:
    """The class of the recipe of these layers, as of load_run(), and flags: that of the plug-ins which they name last.
    Raises UserError for plug-ins that cannot be loaded; what is no list of texts is refused where fields are read."""
    tables = ((table.get("plugins"), where) for where, table in layers)
    asked = [(table["modules"], where) for table, where in tables if isinstance(table, dict) and "modules" in table]
    modules, where = [([], ""), *asked, *((words, COMMAND_LINE) for key, words in flags if key == MODULES)][-1]
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        return Recipe
    return with_plugins(load_plugins(module_at(module, where) for module in modules))


def settle_versions(run: Written, kind: type[Recipe], *, strict: bool) -> list[Problem]:
    """Put what is loaded among the values; returns what is wrong with the versions that are written there, if that
    counts."""
    found, written = kind.versions, run.values.get(VERSIONS)
    origin = run.origins.get(VERSIONS, COMMAND_LINE)
    run.put({VERSIONS: found}, origin)
    if not strict or written in (None, found):
        return []
    rule = f"does not have the content that is here, {toml(found)}; bring it back, or remove this line to use it"
    return [Problem(VERSIONS, rule, toml(written), origin)]


@cache
def with_plugins(plugins: tuple[Plugin, ...]) -> type[Recipe]:
    """The class of recipes that load these plug-ins. Raises UserError for what no recipe could name or write."""
    if not plugins:
        return Recipe
    added: dict[str, dict[str, Any]] = {}
    classes: dict[str, type] = {}
    for number, entry in enumerate(entry for plugin in plugins for entry in plugin.entries):
        if entry.kind == "optimizer":
            entry = entry._replace(value=replace(entry.value, place=entry.place))
        added.setdefault(entry.kind, {})[entry.name or f"{number}"] = entry
        if entry.fields:
            _require_sound(entry)
            if entry.name in (*dir(Recipe), *sections(Recipe), *classes, *kwlist, "base"):
                raise UserError(f"{entry.place}: there is a section [{entry.name}] already; rename the {entry.kind}")
            classes[entry.name] = entry.fields
    for kind, (section, name) in NAMING.items():
        classes[section] = _naming(sections(Recipe)[section], name, added.get(kind, {}))
    members = [(name, cls, field(default_factory=cls)) for name, cls in classes.items()]
    versions = {plugin.name: plugin.version for plugin in plugins}
    space = {"added": added, "versions": versions, "loads": tuple(plugin.module for plugin in plugins)}
    return make_dataclass("Recipe", members, bases=(Recipe,), namespace=space, frozen=True)


def _naming(section: type, name: str, entries: dict[str, Entry]) -> type:
    """The section, of which a field takes the names of these entries too."""
    hint, default = get_type_hints(section)[name], getattr(section, name)
    ours = get_args(get_args(hint)[0]) if isinstance(default, tuple) else get_args(hint)
    for entry in entries.values():
        if entry.name in ours or not re.fullmatch(r"[a-z][a-z0-9_]*", f"{entry.name}"):
            rule = "is ours" if entry.name in ours else "is no name of lower-case letters, digits and _"
            raise UserError(f"{entry.place}: {entry.kind} {entry.name!r} {rule}; rename it")
    names: Any = Literal[(*ours, *entries)]
    table = getattr(section, "table", {}) | {name: entry.value for name, entry in entries.items()}
    space = {"table": table, "__doc__": section.__doc__}
    members = [(name, tuple[names, ...] if isinstance(default, tuple) else names, default)]
    return make_dataclass(section.__name__, members, bases=(section,), namespace=space, frozen=True)


def _require_sound(entry: Entry) -> None:
    """Raises UserError unless the fields of a plug-in's section are such as those of ours."""
    cls: Any = entry.fields
    place, name = entry.place, ""
    try:
        docs, hints = field_docs(cls), get_type_hints(cls, include_extras=True)
        place = f"{place.rpartition(':')[0]}:{getsourcelines(cls)[1]}"
        for one in fields(cls):
            name = f".{one.name}"
            describe(hints[one.name])
            accept(hints[one.name], one.default if one.default_factory is MISSING else one.default_factory())
            assert one.name in docs, "no text below it"
    except Exception as error:
        raise UserError(f"{place}: fields={getattr(cls, '__name__', cls)}{name}: {named(error)}; {SUCH}") from None
