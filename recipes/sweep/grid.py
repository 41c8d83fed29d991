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
from recipes.fields import Problem, field_types, refusal, sections, toml, unknown_key, unknown_section, value_of
from recipes.load import CONFIGS, Layer, load, read_toml, shown, to_toml
from recipes.rules import float8_has_a_device
from recipes.schema import Recipe, RunConfig

SWEEPS = CONFIGS / "sweeps"
LEAST_WINDOWS = 3
"""Fewer have neither a median nor a spread."""
SET_BY_THE_SWEEP = ("run.name", "run.output")
LONGEST_LABEL = 200
"""Bytes. File systems take 255; endings and numbers come behind it."""
Tables = dict[str, dict[str, Any]]
Variant = tuple[str, str, Tables, int]
"""(where it is written, label, overrides, timeout) of a row."""


@dataclass(frozen=True)
class Row:
    """One run of a sweep."""

    label: str
    """Its name, and that of its folder."""
    recipe: Recipe
    overrides: dict[str, Any]
    """Dotted key -> value, the one that runs, of what the file says of this row beyond the base and [fixed]."""
    processes: int
    skip_steps: int
    """Steps before the first one that is measured."""
    timeout: float
    """Seconds after which the run counts as hung."""

    @property
    def fingerprint(self) -> str:
        """Of everything that the numbers of the row depend on, except code and machine."""
        anywhere = replace(self.recipe, run=replace(self.recipe.run, output=RunConfig().output))
        text = f"{to_toml(anywhere)}\nprocesses = {self.processes}\nskip_steps = {self.skip_steps}\n"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Sweep:
    """All rows, and how they are run and measured."""

    name: str
    file: str
    base: str
    folder: Path
    rows: tuple[Row, ...]


def read_sweep(
    path: Path, arguments: Sequence[str] = (), *, output: Path, processes: int, device: str | None = None
) -> Sweep:
    """The sweep of a file. Raises one UserError with everything wrong in it and in all of its rows.

    arguments: overrides of all rows, `--section.field value`, as train.py takes them. processes: of a run, where the
    file does not say. device: what "auto" will be ("cpu" or "cuda"), where it is known. A key that the command line
    sets has its value in every row: no label is made from it, and rows that differed in nothing else are refused.
    """
    if not path.is_file():
        raise UserError(f"{shown(path)} is no file; {_similar(path)}")
    written = read_toml(path)
    file = shown(path)
    settings = _settings(written, file)
    base = path.parent / settings["base"]
    processes = settings.get("processes", processes)
    if processes < settings["least_processes"]:
        raise UserError(
            f"{file}: its rows do not differ on {processes} processes; it takes {settings['least_processes']} or more:"
            " run it where so many GPUs are, or set NPROC"
        )
    fixed = nested(settings.get("fixed", {}))
    given = _given(arguments)
    variants = list(_variants(settings, file, given))
    _require_known(
        [(f"{file} [fixed]", fixed), *((f"{file} {where}", tables) for where, _, tables, _ in variants)], file
    )
    _require_unique(variants, file, given)
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
        overrides = {key: value_of(recipe, key) if key in given else value for key, value in dotted(tables)}
        rows.append(Row(label, recipe, overrides, processes, settings["skip_steps"], timeout))
    if wrong:
        count = len(variants) - len(rows)
        head = f"{count} of {len(variants)} rows of {file} cannot run, so none was started"
        raise UserError("\n".join([head, *(f"{', '.join(labels)}: {message}" for message, labels in wrong.items())]))
    _require_different(rows, [dict(dotted(tables)) for _, _, tables, _ in variants], file, given)
    return Sweep(name=name, file=file, base=shown(base), folder=folder, rows=tuple(rows))


def windows(*, steps: int, every: int, skip: int) -> Iterator[tuple[int, int]]:
    """(last step before it, its last step) of every window of steps whose time is measured.

    The loop waits for the device at logged steps alone (step 1, every `every`-th and the last), so the time between
    two of them is known and that of a single step is not. Windows that begin before step `skip` warm up.
    """
    regular = range(every, steps + 1, every)
    others = [step for step in sorted({1, steps}) if step not in regular]
    logged = itertools.chain(others[:1], regular, others[1:])
    return ((begin, end) for begin, end in itertools.pairwise(logged) if begin >= skip)


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


def _given(arguments: Sequence[str]) -> set[str]:
    """The keys that the command line sets. What is wrong with it, load() says."""
    if not arguments:
        return set()
    from recipes import command_line  # tyro takes a while

    keys = set(command_line.parse(arguments, Recipe())[0])
    text = {"data.source", "data.mixture"}  # each takes the other's place
    return keys | text if keys & text else keys


def _variants(settings: dict[str, Any], file: str, given: set[str]) -> Iterator[Variant]:
    """Every row; the last axis turns fastest. given: keys that the command line sets, which no label is made from."""
    if "axes" in settings:
        axes = dict(dotted(_sections_only(nested(settings["axes"]), f"{file} [axes]")))
        for key, values in axes.items():
            if not isinstance(values, list) or not values:
                raise UserError(f"{file}: [axes] {key} = {toml(values)} must be a list of values, one for each row")
        for chosen in itertools.product(*axes.values()):
            values = dict(zip(axes, chosen, strict=True))
            label = _label(values, given)
            _require_file_name(label, f"{file} [axes]", "use [[runs]], where each row has a name of its own")
            yield "[axes]", label, nested(values), settings["timeout"]
        return
    for number, run in enumerate(settings["runs"], 1):
        tables = nested({key: value for key, value in run.items() if key not in ("name", "timeout")})
        label = run.get("name")
        where = f"[[runs]] {number if label is None else label}"
        if label is None:
            label = _label(dict(dotted(_sections_only(tables, f"{file} {where}"))), given)
        _require_file_name(label, f"{file}: {where}", f'write name = "run_{number}"')
        timeout = run.get("timeout", settings["timeout"])
        if not isinstance(timeout, int) or isinstance(timeout, bool) or timeout < 1:
            raise UserError(f"{file}: {where}: timeout = {toml(timeout)} must be seconds, 1 or more")
        yield where, label, tables, timeout


def _label(values: dict[str, Any], given: set[str]) -> str:
    """Such as "recipe=tensorwise,all_gather=true", without the keys that the command line sets."""
    kept = {key: value for key, value in values.items() if key not in given}
    words = (f"{key.partition('.')[2]}={toml(value)}".replace('"', "") for key, value in kept.items())
    return ",".join(words).replace("/", "_").replace(" ", "") or "base"


def _settings(written: dict[str, Any], file: str) -> dict[str, Any]:
    """What the file says, checked, with the defaults of what it leaves out."""
    kinds: dict[str, tuple[type, str]] = {
        "base": (str, 'the recipe of all rows, relative to this file: base = "../smollm3_3b_h100.toml"'),
        "processes": (int, "processes per run, 1 or more: processes = 8"),
        "timeout": (int, "seconds after which a run counts as hung, 1 or more: timeout = 1800"),
        "skip_steps": (int, "steps before the first measured one, 1 or more: skip_steps = 10"),
        "least_processes": (int, "processes without which the rows do not differ, 1 or more: least_processes = 2"),
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
    return {"timeout": 1800, "skip_steps": 10, "least_processes": 1, **written}


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


def _require_file_name(label: Any, where: str, remedy: str) -> None:
    """A row's name is that of its folder and of its files, and a cell of a Markdown table."""
    fits = isinstance(label, str) and label and not label.startswith(".") and not re.search(r"[/|\x00-\x1f]", label)
    if not fits:
        raise UserError(f'{where}: name = {toml(label)} must name a folder, without "|"; {remedy}')
    if len(label.encode()) > LONGEST_LABEL:
        raise UserError(
            f"{where}: name = {toml(label[:40] + '...')} has {len(label.encode())} bytes, and its files' names take no"
            f" more than {LONGEST_LABEL}; {remedy}"
        )


def _require_unique(variants: Sequence[Variant], file: str, given: set[str]) -> None:
    labels = [label for _, label, _, _ in variants]
    for label in dict.fromkeys(label for label in labels if labels.count(label) > 1):
        tables = [dict(dotted(tables)) for _, other, tables, _ in variants if other == label]
        if keys := _differing(tables) & given:
            raise UserError(f"{file}: {_same_run(keys, f'the {len(tables)} rows of {label}')}")
        raise UserError(f"{file}: several rows are called {label}; give each another name")


def _require_different(rows: Sequence[Row], tables: Sequence[dict[str, Any]], file: str, given: set[str]) -> None:
    """Raises UserError where the command line has made two rows one. The file may ask for the same row twice."""
    for (one, before), (other, after) in itertools.combinations(zip(rows, tables, strict=True), 2):
        keys = _differing([before, after]) & given
        renamed = replace(other.recipe, run=replace(other.recipe.run, name=one.recipe.run.name))
        if keys and renamed == one.recipe:
            raise UserError(f"{file}: {_same_run(keys, f'{one.label} and {other.label}')}")


def _differing(tables: Sequence[dict[str, Any]]) -> set[str]:
    """The keys that are not the same in all tables."""
    keys = {key for table in tables for key in table}
    return {key for key in keys if any(key not in table or table[key] != tables[0].get(key) for table in tables)}


def _same_run(keys: set[str], rows: str) -> str:
    flags = " and ".join(f"--{key}" for key in sorted(keys))
    return f"{flags} makes {rows} the same run; leave it out, or write a sweep without the rows that differ in it"


def _require_device(recipe: Recipe, device: str | None) -> None:
    """Raises UserError where the machine is known and lacks the GPU that the recipe, or its float8, asks for."""
    if recipe.run.device == "cuda" and device == "cpu":
        raise UserError(
            'run.device = "cuda", and this machine has no GPU; start it where there is one, or one of'
            " configs/sweeps/cpu here"
        )
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
    found = len(list(itertools.islice(windows(steps=steps, every=every, skip=skip), LEAST_WINDOWS)))
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
