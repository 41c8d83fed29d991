"""From a sweep's TOML file to its rows, every one a checked recipe. Imports no torch."""

import hashlib
import itertools
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from recipes.fields import field_types, sections, toml, unknown_key, unknown_section
from recipes.load import CONFIGS, Layer, load, read_toml, shown, to_toml
from recipes.problems import Problem, refusal
from recipes.rules import float8_has_a_device
from recipes.schema import Recipe, RunConfig

SWEEPS = CONFIGS / "sweeps"
LEAST_WINDOWS = 3
"""Fewer have neither a median nor a spread."""
SET_BY_THE_SWEEP = ("run.name", "run.output")
Tables = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """One run of a sweep."""

    label: str
    """Its name, and that of its folder."""
    recipe: Recipe
    overrides: dict[str, Any]
    """Dotted key -> value: what this row says beyond the base and [fixed]."""
    processes: int
    timeout: float
    """Seconds after which the run counts as hung."""

    @property
    def fingerprint(self) -> str:
        """Of everything that the numbers of the row depend on, except code and machine."""
        anywhere = replace(self.recipe, run=replace(self.recipe.run, output=RunConfig().output))
        text = f"{to_toml(anywhere)}\nprocesses = {self.processes}\n"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Sweep:
    """All rows, and how they are run and measured."""

    name: str
    file: str
    base: str
    folder: Path
    rows: tuple[Row, ...]
    skip_steps: int
    """Steps before the first one that is measured."""


def read_sweep(
    path: Path, arguments: Sequence[str] = (), *, output: Path, processes: int, device: str | None = None
) -> Sweep:
    """The sweep of a file. Raises one UserError with everything wrong in it and in all of its rows.

    arguments: overrides of all rows, `--section.field value`, as train.py takes them. processes: of a run, where the
    file does not say. device: what "auto" will be ("cpu" or "cuda"), where it is known.
    """
    if not path.is_file():
        raise UserError(f"{shown(path)} is no file; {_similar(path)}")
    written = read_toml(path)
    file = shown(path)
    settings = _settings(written, file)
    base = path.parent / settings["base"]
    processes = settings.get("processes", processes)
    fixed = nested(settings.get("fixed", {}))
    variants = list(_variants(settings, file))
    _require_known(
        [(f"{file} [fixed]", fixed), *((f"{file} {where}", tables) for where, _, tables, _ in variants)], file
    )
    _require_unique([label for _, label, _, _ in variants], file)
    inside = path.resolve().is_relative_to(SWEEPS)
    name = path.resolve().relative_to(SWEEPS).with_suffix("").as_posix() if inside else path.stem
    folder = output / name
    rows: list[Row] = []
    wrong: dict[str, list[str]] = {}  # message -> the rows that have it
    for where, label, tables, timeout in variants:
        place: Layer = ("the sweep", {"run": {"name": label, "output": str(folder / "runs")}})
        layers = [(f"{file} [fixed]", fixed), (f"{file} {where}", tables), place]
        try:
            recipe = load(base, arguments, over=layers, processes=processes)
            _require_device(recipe, device)
            _require_windows(recipe, settings["skip_steps"])
        except UserError as error:
            wrong.setdefault(str(error), []).append(label)
            continue
        rows.append(Row(label, recipe, dict(dotted(tables)), processes, timeout))
    if wrong:
        count = len(variants) - len(rows)
        head = f"{count} of {len(variants)} rows of {file} cannot run, so none was started"
        raise UserError("\n".join([head, *(f"{', '.join(labels)}: {message}" for message, labels in wrong.items())]))
    return Sweep(
        name=name,
        file=file,
        base=shown(base),
        folder=folder,
        rows=tuple(rows),
        skip_steps=settings["skip_steps"],
    )


def windows(*, steps: int, every: int, skip: int) -> list[tuple[int, int]]:
    """(last step before it, its last step) of every window of steps whose time is measured.

    The loop waits for the device at logged steps alone (step 1, every `every`-th and the last), so the time between
    two of them is known and that of a single step is not. Windows that begin before step `skip` warm up.
    """
    logged = sorted({1, *range(every, steps + 1, every), steps})
    return [(begin, end) for begin, end in itertools.pairwise(logged) if begin >= skip]


def device_count() -> int:
    """GPUs that a run would use; what scripts/run.sh counts, without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return 0 if visible in ("", "-1") else len([name for name in visible.split(",") if name])
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    return len(re.findall(r"^GPU ", found.stdout, flags=re.MULTILINE))


def nested(table: dict[str, Any]) -> Tables:
    """The same values by section; a quoted "section.field" key means what an unquoted one does."""
    found: Tables = {}
    for key, value in table.items():
        section, dot, name = key.partition(".")
        if dot:
            found.setdefault(section, {})[name] = value
        elif isinstance(value, dict):
            found.setdefault(section, {}).update(value)
        else:
            found[key] = value
    return found


def dotted(tables: Tables) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every value."""
    for section, table in tables.items():
        for name, value in table.items():
            yield f"{section}.{name}", value


def _variants(settings: dict[str, Any], file: str) -> Iterator[tuple[str, str, Tables, int]]:
    """(where it is written, label, overrides, timeout) of every row; the last axis turns fastest."""
    if "axes" in settings:
        axes = dict(dotted(_sections_only(nested(settings["axes"]), f"{file} [axes]")))
        for key, values in axes.items():
            if not isinstance(values, list) or not values:
                raise UserError(f"{file}: [axes] {key} = {toml(values)} must be a list of values, one for each row")
        for chosen in itertools.product(*axes.values()):
            values = dict(zip(axes, chosen, strict=True))
            yield "[axes]", _label(values), nested(values), settings["timeout"]
        return
    for number, run in enumerate(settings["runs"], 1):
        tables = nested({key: value for key, value in run.items() if key not in ("name", "timeout")})
        label = run.get("name")
        where = f"[[runs]] {number if label is None else label}"
        if label is None:
            label = _label(dict(dotted(_sections_only(tables, f"{file} {where}"))))
        if not isinstance(label, str) or not label or "/" in label or label.startswith("."):
            raise UserError(f'{file}: {where}: name = {toml(label)} must name a folder; write name = "run_{number}"')
        timeout = run.get("timeout", settings["timeout"])
        if not isinstance(timeout, int) or isinstance(timeout, bool) or timeout < 1:
            raise UserError(f"{file}: {where}: timeout = {toml(timeout)} must be seconds, 1 or more")
        yield where, label, tables, timeout


def _label(values: dict[str, Any]) -> str:
    """Such as "recipe=tensorwise,all_gather=true"."""
    words = (f"{key.partition('.')[2]}={toml(value)}".replace('"', "") for key, value in values.items())
    return ",".join(words).replace("/", "_").replace(" ", "") or "base"


def _settings(written: dict[str, Any], file: str) -> dict[str, Any]:
    """What the file says, checked, with the defaults of what it leaves out."""
    kinds: dict[str, tuple[type, str]] = {
        "base": (str, 'the recipe of all rows, relative to this file: base = "../smollm3_3b_h100.toml"'),
        "processes": (int, "processes per run, 1 or more: processes = 8"),
        "timeout": (int, "seconds after which a run counts as hung, 1 or more: timeout = 1800"),
        "skip_steps": (int, "steps before the first measured one, 1 or more: skip_steps = 10"),
        "fixed": (dict, "a table of overrides of all rows: [fixed]"),
        "axes": (dict, "a table of lists, whose combinations are the rows: [axes]"),
        "runs": (list, "a list of tables, one for each row, with overrides and its own name and timeout: [[runs]]"),
    }
    problems = []
    for key, value in written.items():
        if key not in kinds:
            close = get_close_matches(key, kinds, n=1)
            hint = f"did you mean {close[0]}?" if close else f"a sweep has {', '.join(kinds)}"
            if key in sections():
                hint = f"is a section of a recipe; write it below [fixed] as {key}.FIELD = ..."
            problems.append(Problem(key, hint if key in sections() else f"unknown key; {hint}", toml(value), file))
            continue
        kind, meaning = kinds[key]
        fits = isinstance(value, kind) and not isinstance(value, bool) and not (isinstance(value, int) and value < 1)
        if not fits or (isinstance(value, list) and not all(isinstance(run, dict) for run in value)):
            problems.append(Problem(key, f"must be {meaning}", toml(value), file))
    if "base" not in written:
        problems.append(Problem("base", f"is missing: {kinds['base'][1]}", "", file))
    if ("axes" in written) == ("runs" in written):
        problems.append(Problem("axes, runs", "write one of the two: [axes], or [[runs]] once for each row", "", file))
    elif not written.get("axes", written.get("runs")):
        problems.append(Problem("axes" if "axes" in written else "runs", "is empty, so there is no row", "", file))
    if problems:
        raise refusal(problems, where=file)
    return {"timeout": 1800, "skip_steps": 10, **written}


def _sections_only(tables: Tables, where: str) -> Tables:
    """The tables as they are. Raises UserError for a bare value among them."""
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise refusal([Problem(name, unknown_key(name), toml(table), where)], where=where)
    return tables


def _require_known(layers: Sequence[tuple[str, Tables]], file: str) -> None:
    """Raises one UserError with the keys that no recipe has, each once however many rows have it."""
    problems: dict[tuple[str, str], Problem] = {}
    for where, tables in layers:
        for section, table in tables.items():
            if section not in sections():
                unknown = isinstance(table, dict)
                message = unknown_section(section) if unknown else unknown_key(section)
                problems[where, section] = Problem(f"[{section}]" if unknown else section, message, "", where)
                continue
            if not isinstance(table, dict):
                problems[where, section] = Problem(section, f"is a section; write {section}.FIELD = ...", "", where)
                continue
            for name in table:
                key = f"{section}.{name}"
                if key in SET_BY_THE_SWEEP:
                    problems[where, key] = Problem(key, "is set by the sweep; leave it out", "", where)
                elif key not in field_types():
                    problems[where, key] = Problem(key, unknown_key(key), "", where)
    if problems:
        raise refusal(list(problems.values()), where=file)


def _require_unique(labels: Sequence[str], file: str) -> None:
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise UserError(f"{file}: several rows are called {', '.join(twice)}; give each another name")


def _require_device(recipe: Recipe, device: str | None) -> None:
    """What float8 asks of the device, where the recipe leaves that to the machine and the machine is known."""
    if recipe.run.device == "auto" and device is not None:
        found = [
            Problem(key, "must be true on this machine, which has no GPU; write emulate = true", "false")
            for key, _ in float8_has_a_device(recipe.float8, device=device)
        ]
        if found:
            raise refusal(found, where="float8")


def _require_windows(recipe: Recipe, skip: int) -> None:
    """Raises UserError where too few steps are left to measure."""
    steps, every = recipe.run.steps, recipe.metrics.every
    found = len(windows(steps=steps, every=every, skip=skip))
    if found < LEAST_WINDOWS:
        enough = -(-skip // every) * every + LEAST_WINDOWS * every
        raise refusal(
            [
                Problem(
                    "run.steps",
                    f"leaves {found} windows of metrics.every = {every} steps after skip_steps = {skip}, and the median"
                    f" needs {LEAST_WINDOWS}; write run.steps = {enough} or more, or a smaller metrics.every",
                    str(steps),
                )
            ],
            where="what is measured",
        )


def _similar(path: Path) -> str:
    there = {file.stem: shown(file) for file in sorted(SWEEPS.glob("*.toml"))}
    close = get_close_matches(path.stem, there, n=2)
    if close:
        return f"did you mean {' or '.join(there[stem] for stem in close)}?"
    return f"sweeps are in {shown(SWEEPS)}: {', '.join(there)}"
