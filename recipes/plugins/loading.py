"""Imports the modules that a recipe names in [plugins], and keeps what each of them registers.

All that a process remembers of plug-ins is _IMPORTED and _importing, and what is found without a recipe, by the name of
a file or source alone: recipes/files/added.py. Imports no torch.
"""

import hashlib
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata, util
from pathlib import Path
from traceback import extract_stack, extract_tb
from typing import Any, NamedTuple

from models.registry import put
from parallel.errors import UserError, listed
from recipes.files.added import AGAIN, FORMATS, SOURCES, Adding
from recipes.files.border import foreign
from recipes.files.reading import fault, user_path
from recipes.files.screen import say
from recipes.files.version import of_package

GROUP = "shardwright.plugins"
OPTION = "--plugins.modules"  # of commands that read checkpoints, which load these first
WHERE: dict[str, Any] = {"nargs": "+", "default": [], "help": "where plug-ins of a checkpoint are now, as in recipes"}


class Entry(NamedTuple):
    """What a plug-in registers."""

    kind: str
    """The function of register.py that was called, such as "optimizer"."""
    name: str
    value: Any
    fields: type | None
    """The dataclass of its own section, if it has one."""
    place: str
    """FILE:LINE of the call."""


@dataclass(eq=False)
class Plugin:
    """One module, as it was imported."""

    name: str
    module: str
    """An absolute path, a dotted name, or the name of an entry point."""
    version: str
    """Of its package or its __version__, if any, and a hash of its content."""
    entries: list[Entry] = field(default_factory=list)


_IMPORTED: dict[tuple[str, str], Plugin] = {}
"""By module and hash of its content."""
_importing: list[Plugin] = []


def load_plugins(modules: Iterable[str]) -> tuple[Plugin, ...]:
    """The plug-ins of these modules, each imported once in a process, unless its content has changed. Raises UserError
    for one that cannot be imported, and for two that give the same name to different things."""
    plugins = tuple(dict.fromkeys(map(_plugin, modules)))
    seen: dict[tuple[str, str], str] = {}
    for plugin in plugins:
        names = [("plug-in", plugin.name, plugin.module), *((one.kind, one.name, one.place) for one in plugin.entries)]
        for kind, name, place in names:
            if seen.get((kind, name), place) != place and kind != "rule":
                raise UserError(f"{place}: {kind} {name!r} exists already: {seen[kind, name]}; rename one of them")
            seen[kind, name] = place
        for entry in plugin.entries:
            put(entry.kind, entry.name, entry.value)
    return plugins


def activate(modules: Sequence[str], versions: Mapping[str, str] | None = None) -> None:
    """Make formats and sources of these plug-ins, and of no others, what this process reads. Raises UserError if they
    have not these versions."""
    plugins = load_plugins(modules)
    found = {plugin.name: plugin.version for plugin in plugins}
    if versions not in (None, found):
        raise UserError(f"plug-ins have changed since the run began: {versions} then, {found} now; start it again")
    AGAIN[:] = [partial(activate, tuple(modules), found)] if modules else []
    for kind, table in (("format", FORMATS), ("source", SOURCES)):
        table.clear()
        for plugin in plugins:
            version = f"{plugin.name} {plugin.version}"
            table |= {one.name: Adding(one.value, version) for one in plugin.entries if one.kind == kind}


def load_recorded(modules: Sequence[str], versions: Mapping[str, str], *, file: Path) -> Iterator[UserError]:
    """Load the plug-ins of a checkpoint, or take those of the names that this process has loaded from where they are
    now, and say if the content has changed since. Yields why one cannot be loaded."""
    here = {plugin.name: plugin for plugin in _IMPORTED.values()}
    for module, (name, then) in zip(modules, versions.items(), strict=True):
        try:
            if (now := (here.get(name) or load_plugins([module])[0]).version) != then:
                say(f"{file}: its plug-in {name} was {then}, and is {now} now", to=2)
        except UserError as error:
            remedy = f"write where it is now, such as {OPTION} there/{Path(module).name}"
            yield type(error)(f"{file}: its run had the plug-in {name}: {error}; {remedy}")


def add(kind: str, name: str, value: Any, fields: type | None = None) -> None:
    """Keep what the plug-in that is being imported registers. Of a module that somebody else imports, keep nothing."""
    if _importing:
        here = str(Path(__file__).parent)
        call = next(frame for frame in reversed(extract_stack()) if not frame.filename.startswith(here))
        _importing[-1].entries.append(Entry(kind, name, value, fields, f"{call.filename}:{call.lineno}"))


def _plugin(module: str) -> Plugin:
    if module.endswith(".py"):
        file = user_path(module).absolute()
        return _imported(Plugin(file.stem, str(file), ""), str(file), [file])
    points = {point.name: point for point in metadata.entry_points(group=GROUP)}
    name = point.module if (point := points.get(module)) else module
    with foreign(f"plugins.modules: {module!r}"):
        top = util.find_spec(name.partition(".")[0]) if name.partition(".")[0] else None
    if top is None or top.origin is None:
        known = f" (there are {listed(points)})" if points else ""
        rule = f'is no installed module, and no entry point of the group "{GROUP}"{known}'
        raise UserError(f"plugins.modules: {module!r} {rule}; install it, or write a file that ends in .py")
    is_package = top.submodule_search_locations is not None
    files = sorted(Path(top.origin).parent.rglob("*.py")) if is_package else [Path(top.origin)]
    version = point.dist.version if point and point.dist else of_package(name.partition(".")[0])
    return _imported(Plugin(module, module, version or ""), name, files)


def _imported(plugin: Plugin, module: str, files: Sequence[Path]) -> Plugin:
    """The plug-in, which has the version of its package as yet, after the import of this module, or file."""
    digest = hashlib.sha256()
    for file in files:
        try:
            digest.update(f"{file.name}\0".encode() + file.read_bytes())
        except OSError as error:
            raise fault(f"plugins.modules: {file} cannot be read", error) from None
    key = plugin.module, digest.hexdigest()[:16]
    if key in _IMPORTED:
        return _IMPORTED[key]
    _importing.append(plugin)
    try:
        with foreign(f"plug-in {plugin.name}", but=()), redirect_stdout(sys.stderr):  # --check prints TOML
            if module == str(files[0]):
                spec = util.spec_from_file_location(f"shardwright_plugin_{plugin.name}_{key[1]}", module)
                assert spec is not None and spec.loader is not None, module
                imported = sys.modules[spec.name] = util.module_from_spec(spec)
                spec.loader.exec_module(imported)
            elif module in sys.modules:  # imported by somebody else, who registered nothing
                imported = importlib.reload(sys.modules[module])
            else:
                imported = importlib.import_module(module)
            assert plugin.entries, "it registers nothing; call a function of recipes/plugins/register.py"
    except UserError as error:
        raise UserError(f"{_line(error, {str(file) for file in files}) or module}: {error}") from error
    finally:
        _importing.pop()
    plugin.version = f"{getattr(imported, '__version__', None) or plugin.version} {key[1]}".strip()
    return _IMPORTED.setdefault(key, plugin)


def _line(error: BaseException, files: set[str]) -> str:
    """FILE:LINE of the plug-in at which its import ended; "" if it did not begin."""
    cause = error.__cause__
    places = [(at.filename, at.lineno) for one in (error, cause) if one for at in extract_tb(one.__traceback__)]
    places += [(cause.filename or "", cause.lineno)] if isinstance(cause, SyntaxError) else []
    return next((f"{file}:{line}" for file, line in reversed(places) if file in files), "")
