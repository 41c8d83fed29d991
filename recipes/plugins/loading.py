"""Imports the modules that a recipe names in [plugins], and keeps what each of them registers.

All that a process remembers of plug-ins is here: which content of a module was imported (_IMPORTED), and which plug-in
is being imported (_importing). What is found by name alone, without a recipe, stands in ADDED (recipes/files/added.py).
Imports no torch.
"""

import hashlib
import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from importlib import metadata, util
from pathlib import Path
from traceback import extract_stack, extract_tb
from typing import Any

from parallel.errors import UserError, listed
from recipes.files.added import ADDED
from recipes.files.border import foreign
from recipes.files.reading import fault, user_path
from recipes.files.screen import say
from recipes.files.version import of_package

GROUP = "shardwright.plugins"
HERE = str(Path(__file__).parent)


@dataclass(frozen=True)
class Entry:
    """What a plug-in registers under one name."""

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
    """What a recipe names: an absolute path, or a dotted name."""
    version: str
    """Of its package or its __version__, if any, and a hash of its content."""
    entries: list[Entry] = field(default_factory=list)


_IMPORTED: dict[tuple[str, str], Plugin] = {}
_importing: list[Plugin] = []


def load_plugins(modules: Iterable[str]) -> tuple[Plugin, ...]:
    """The plug-ins of these modules, each imported once in a process, unless its content has changed. Raises UserError
    for one that cannot be imported, and for two that give the same name to different things."""
    plugins = tuple(dict.fromkeys(map(_plugin, modules)))
    seen: dict[tuple[str, str], Entry] = {}
    names: dict[str, Plugin] = {}
    for plugin in plugins:
        if (other := names.setdefault(plugin.name, plugin)) is not plugin:
            raise UserError(f"plug-ins {other.module} and {plugin.module} are both called {plugin.name}; rename one")
        for entry in plugin.entries:
            if (first := seen.setdefault((entry.kind, entry.name), entry)) is not entry and entry.kind != "rule":
                raise UserError(f"{entry.place}: {entry.kind} {entry.name!r} exists already: {first.place}; rename it")
    return plugins


def activate(modules: Sequence[str]) -> None:
    """Make formats and sources of these plug-ins, and of no others, what this process reads."""
    plugins = load_plugins(modules)
    ADDED.clear()
    for plugin in plugins:
        for entry in plugin.entries:
            if entry.kind in ("format", "source"):
                ADDED.put(entry.kind, entry.name, entry.value, version=f"{plugin.name} {plugin.version}")
    ADDED.again = partial(activate, tuple(modules))


def load_recorded(modules: Sequence[str], versions: Mapping[str, str], *, file: Path) -> None:
    """Load what the model of a checkpoint was built with, and tell if its content has changed since."""
    for plugin in load_plugins(modules):
        if plugin.version != versions.get(plugin.name):
            say(f"{file}: plug-in {plugin.name} was {versions.get(plugin.name)}, and is {plugin.version}", to=2)


def add(kind: str, name: str, value: Any, fields: type | None = None) -> None:
    """Keep what the plug-in that is being imported registers; a module that is imported by others registers nothing."""
    if _importing:
        call = next(frame for frame in reversed(extract_stack()) if not frame.filename.startswith(HERE))
        _importing[-1].entries.append(Entry(kind, name, value, fields, f"{call.filename}:{call.lineno}"))


def _plugin(module: str) -> Plugin:
    if module.endswith(".py"):
        file = user_path(module).absolute()
        try:
            content = file.read_bytes()
        except OSError as error:
            raise fault(f"plugins.modules: {file} cannot be read", error) from None
        return _imported(file.stem, str(file), [(file, content)], file)
    points = {point.name: point.module for point in metadata.entry_points(group=GROUP)}
    name = points.get(module, module)
    try:
        top = util.find_spec(name.partition(".")[0])
    except ValueError:
        top = None
    if top is None or top.origin is None:
        close = get_close_matches(module, points, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "write a file that ends in .py, or install it"
        known = f"; entry points there are {listed(points)}" if points and not close else ""
        raise UserError(f"plugins.modules: {module!r} is no installed module, and no entry point; {hint}{known}")
    files = sorted(Path(top.origin).parent.rglob("*.py")) if top.submodule_search_locations else [Path(top.origin)]
    return _imported(module, name, [(file, file.read_bytes()) for file in files])


def _imported(name: str, module: str, content: Sequence[tuple[Path, bytes]], file: Path | None = None) -> Plugin:
    """The plug-in of a module of this content. file: of a module that is no part of a package."""
    digest = hashlib.sha256(b"".join(f"{path.name}\0".encode() + text for path, text in content)).hexdigest()[:16]
    if (module, digest) in _IMPORTED:
        return _IMPORTED[module, digest]
    plugin = Plugin(name, module, digest)
    _importing.append(plugin)
    try:
        with foreign(f"plug-in {name}"):
            if file is not None:
                spec = util.spec_from_file_location(f"shardwright_plugin_{name}_{digest}", file)
                assert spec is not None and spec.loader is not None, file
                imported = sys.modules[spec.name] = util.module_from_spec(spec)
                spec.loader.exec_module(imported)
            elif module in sys.modules:  # imported by somebody else, who registered nothing
                imported = importlib.reload(sys.modules[module])
            else:
                imported = importlib.import_module(module)
    except UserError as error:
        raise UserError(f"{_line(error, [str(path) for path, _ in content], module)}: {error}") from error
    finally:
        _importing.pop()
    version = getattr(imported, "__version__", None) or (None if file else of_package(module.partition(".")[0]))
    plugin.version = f"{version} {digest}" if version else digest
    _IMPORTED[module, digest] = plugin
    return plugin


def _line(error: BaseException, files: Sequence[str], module: str) -> str:
    """FILE:LINE of the plug-in at which its import ended."""
    cause = error.__cause__
    if isinstance(cause, SyntaxError):
        return f"{cause.filename}:{cause.lineno}"
    frames = [frame for one in (cause, error) if one for frame in extract_tb(one.__traceback__)]
    return next((f"{frame.filename}:{frame.lineno}" for frame in reversed(frames) if frame.filename in files), module)
