"""Read a sweep's TOML file into rows, each with a checked recipe. Imports no torch."""

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
from recipes.recipe.conflicts import conflicts
from recipes.recipe.fields import (
    Problem,
    field_types,
    recipes_of,
    refusal,
    sections,
    toml,
    unknown_key,
    unknown_section,
    value_of,
    with_values,
)
from recipes.recipe.load import CONFIGS, Layer, kind_of, load, read_chain, read_toml, shown, to_toml
from recipes.recipe.schema import Recipe, RunConfig

SWEEPS = CONFIGS / "sweeps"
LEAST_WINDOWS = 3
"""A median and a spread need at least this many."""
SET_BY_THE_SWEEP = ("run.name", "run.output")
LONGEST_LABEL = 200
"""Most bytes of a label. File systems allow 255, and files add suffixes and numbers to it."""
Tables = dict[str, dict[str, Any]]
Variant = tuple[str, str, Tables, int]
"""(place in the file, label, overrides, timeout) of a row."""


@dataclass(frozen=True)
class Row:
    """One run of a sweep."""

    label: str
    """Names the row and its folder."""
    recipe: Recipe
    overrides: dict[str, Any]
    """Dotted key -> value for the keys that the file sets for this row alone; the value is the one that runs."""
    processes: int
    skip_steps: int
    """Steps before the first measured one."""
    timeout: float
    """Seconds after which the run is treated as hung."""

    @property
    def fingerprint(self) -> str:
        """A hash of everything that the row's numbers depend on, except code and machine."""
        anywhere = replace(self.recipe, run=replace(self.recipe.run, output=RunConfig().output))
        text = f"{to_toml(anywhere)}\nprocesses = {self.processes}\nskip_steps = {self.skip_steps}\n"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Sweep:
    """The rows of a file and the folder of their results."""

    name: str
    file: str
    base: str
    folder: Path
    rows: tuple[Row, ...]


def read_sweep(
    path: Path, arguments: Sequence[str] = (), *, output: Path, processes: int, device: str | None = None
) -> Sweep:
    """The sweep that a file describes. A key set on the command line has that value in every row, and labels omit it.

    Args:
        path: the TOML file.
        arguments: overrides for all rows, `--section.field value`, as train.py takes them.
        output: folder under which the sweep gets a folder of its own.
        processes: processes per run if the file does not set it.
        device: what "auto" will resolve to, "cpu" or "cuda"; None if unknown.
    Raises:
        UserError: everything wrong with the file and its rows, including rows that the command line makes identical.
    """
    if not path.is_file():
        raise UserError(f"{shown(path)} is not a file; {_suggestion(path)}")
    written = read_toml(path)
    file = shown(path)
    settings = _checked_settings(written, file)
    base = path.parent / settings["base"]
    processes = settings.get("processes", processes)
    if processes < settings["least_processes"]:
        raise UserError(
            f"{file}: its rows do not differ on {processes} processes and need {settings['least_processes']} or more;"
            " run it on a machine with that many GPUs, or set NPROC"
        )
    fixed = nested(settings.get("fixed", {}))
    given = _keys_set_by(arguments)
    variants = list(_variants(settings, file, given))
    written_there = [(f"{file} [fixed]", fixed), *((f"{file} {where}", tables) for where, _, tables, _ in variants)]
    with recipes_of(kind_of([*read_chain(base), written_there[0]], arguments)):
        _require_known(written_there, file)
    _require_unique(variants, file, given)
    inside = path.resolve().is_relative_to(SWEEPS)
    name = path.resolve().relative_to(SWEEPS).with_suffix("").as_posix() if inside else path.stem
    folder = output / name
    rows: list[Row] = []
    wrong: dict[str, list[str]] = {}  # message -> labels of its rows
    for where, label, tables, timeout in variants:
        names: Layer = ("the sweep", {"run": {"name": label, "output": str(folder / "runs")}})
        layers = [(f"{file} [fixed]", fixed), (f"{file} {where}", tables), names]
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
        head = f"{len(variants) - len(rows)} of {len(variants)} rows of {file} cannot run, so none was started"
        raise UserError("\n".join([head, *(f"{', '.join(labels)}: {message}" for message, labels in wrong.items())]))
    _require_different(rows, [dict(dotted(tables)) for _, _, tables, _ in variants], file, given)
    return Sweep(name=name, file=file, base=shown(base), folder=folder, rows=tuple(rows))


def windows(*, steps: int, every: int, skip: int) -> Iterator[tuple[int, int]]:
    """(last step before the window, its last step) for every window of steps whose time is measured.

    The loop waits for the device only at logged steps (step 1, every `every`-th and the last), so only the time between
    two of them is known, not that of a single step. Windows that begin before step `skip` are warm-up.
    """
    regular = range(every, steps + 1, every)
    others = [step for step in sorted({1, steps}) if step not in regular]
    logged = itertools.chain(others[:1], regular, others[1:])
    return ((begin, end) for begin, end in itertools.pairwise(logged) if begin >= skip)


def device_count() -> int:
    """How many GPUs a run would use, counted as in scripts/run.sh, without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return 0 if visible in ("", "-1") else len([name for name in visible.split(",") if name])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    return len(re.findall(r"^GPU ", listed.stdout, flags=re.MULTILINE))


def processes_here(devices: int) -> int:
    """The number of processes that scripts/run.sh would start."""
    asked = os.environ.get("NPROC", "")
    if not asked:
        return devices or 2
    if not asked.isdigit() or int(asked) < 1:
        raise UserError(f"NPROC={asked}: must be a number of processes, 1 or more")
    return int(asked)


def nested(table: dict[str, Any]) -> Tables:
    """The values by section; a quoted "section.field" key means the same as an unquoted one."""
    tables: Tables = {}
    for key, value in table.items():
        section, dot, name = key.partition(".")
        if dot:
            tables.setdefault(section, {})[name] = value
        elif isinstance(value, dict):
            tables.setdefault(section, {}).update(value)
        else:
            tables[key] = value
    return tables


def dotted(tables: Tables) -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value)."""
    for section, table in tables.items():
        for name, value in table.items():
            yield f"{section}.{name}", value


def _keys_set_by(arguments: Sequence[str]) -> set[str]:
    """The keys that the command line sets; load() reports errors in it."""
    if not arguments:
        return set()
    from recipes.recipe import command_line  # imports tyro, which is slow

    keys = set(command_line.parse(command_line.split(arguments)[0], Recipe())[0])
    text = {"data.source", "data.mixture"}  # setting one replaces the other
    return keys | text if keys & text else keys


def _variants(settings: dict[str, Any], file: str, given: set[str]) -> Iterator[Variant]:
    """Every row; the last axis varies fastest. given: keys that the command line sets; labels omit them."""
    if "axes" in settings:
        axes = dict(dotted(_sections_only(nested(settings["axes"]), f"{file} [axes]")))
        for key, values in axes.items():
            if not isinstance(values, list) or not values:
                raise UserError(f"{file}: [axes] {key} = {toml(values)} must be a list of values, one per row")
        for chosen in itertools.product(*axes.values()):
            values = dict(zip(axes, chosen, strict=True))
            label = _label(values, given)
            _require_file_name(label, f"{file} [axes]", "use [[runs]], where you can name each row")
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
            raise UserError(f"{file}: {where}: timeout = {toml(timeout)} must be a number of seconds, 1 or more")
        yield where, label, tables, timeout


def _label(values: dict[str, Any], given: set[str]) -> str:
    """A label such as "recipe=tensorwise,all_gather=true", without the keys that the command line sets."""
    kept = {key: value for key, value in values.items() if key not in given}
    words = (f"{key.partition('.')[2]}={toml(value)}".replace('"', "") for key, value in kept.items())
    return ",".join(words).replace("/", "_").replace(" ", "") or "base"


def _checked_settings(written: dict[str, Any], file: str) -> dict[str, Any]:
    """The file's settings, checked, with defaults for those it leaves out."""
    kinds: dict[str, tuple[type, str]] = {
        "base": (str, 'the recipe that all rows start from, relative to this file: base = "../smollm3_debug.toml"'),
        "processes": (int, "the number of processes per run, 1 or more: processes = 8"),
        "timeout": (int, "the seconds after which a run is treated as hung, 1 or more: timeout = 1800"),
        "skip_steps": (int, "the number of steps before the first measured one, 1 or more: skip_steps = 10"),
        "least_processes": (int, "the fewest processes on which the rows differ, 1 or more: least_processes = 2"),
        "fixed": (dict, "a table of overrides for all rows: [fixed]"),
        "axes": (dict, "a table of lists whose combinations are the rows: [axes]"),
        "runs": (list, "a list of tables, one per row, with overrides and optionally name and timeout: [[runs]]"),
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
        problems.append(Problem("axes, runs", "write exactly one of them: [axes], or [[runs]] once per row", "", file))
    elif not written.get("axes", written.get("runs")):
        empty = "axes" if "axes" in written else "runs"
        problems.append(Problem(empty, "is empty, so the sweep has no rows", "", file))
    if problems:
        raise refusal(problems, where=file)
    return {"timeout": 1800, "skip_steps": 10, "least_processes": 1, **written}


def _sections_only(tables: Tables, where: str) -> Tables:
    """The tables unchanged. Raises UserError if a value stands outside a section."""
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise refusal([Problem(name, unknown_key(name), toml(table), where)], where=where)
    return tables


def _require_known(layers: Sequence[tuple[str, Tables]], file: str) -> None:
    """Raises one UserError that lists each unknown key once, however many rows set it."""
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
    """Raises UserError if a label cannot name a row's folder and files, or be a cell of a Markdown table."""
    fits = isinstance(label, str) and label and not label.startswith(".") and not re.search(r"[/|\x00-\x1f]", label)
    if not fits:
        raise UserError(f'{where}: name = {toml(label)} must be a valid folder name without "|"; {remedy}')
    if len(label.encode()) > LONGEST_LABEL:
        raise UserError(
            f"{where}: name = {toml(label[:40] + '...')} has {len(label.encode())} bytes, more than the"
            f" {LONGEST_LABEL} that names of its files allow; {remedy}"
        )


def _require_unique(variants: Sequence[Variant], file: str, given: set[str]) -> None:
    labels = [label for _, label, _, _ in variants]
    for label in dict.fromkeys(label for label in labels if labels.count(label) > 1):
        tables = [dict(dotted(tables)) for _, other, tables, _ in variants if other == label]
        if keys := _differing_keys(tables) & given:
            raise UserError(f"{file}: {_same_run_message(keys, f'the {len(tables)} rows of {label}')}")
        raise UserError(f"{file}: several rows are named {label}; give each a different name")


def _require_different(rows: Sequence[Row], tables: Sequence[dict[str, Any]], file: str, given: set[str]) -> None:
    """Raises UserError if the command line makes two rows identical. The file itself may repeat a row."""
    for (one, before), (other, after) in itertools.combinations(zip(rows, tables, strict=True), 2):
        keys = _differing_keys([before, after]) & given
        renamed = replace(other.recipe, run=replace(other.recipe.run, name=one.recipe.run.name))
        if keys and renamed == one.recipe:
            raise UserError(f"{file}: {_same_run_message(keys, f'{one.label} and {other.label}')}")


def _differing_keys(tables: Sequence[dict[str, Any]]) -> set[str]:
    keys = {key for table in tables for key in table}
    return {key for key in keys if any(key not in table or table[key] != tables[0].get(key) for table in tables)}


def _same_run_message(keys: set[str], rows: str) -> str:
    flags = " and ".join(f"--{key}" for key in sorted(keys))
    return f"{flags} makes {rows} the same run; omit it, or write a sweep without rows that differ only in it"


def _require_device(recipe: Recipe, device: str | None) -> None:
    """Raises UserError if the recipe or its float8 needs a GPU and `device` says that there is none."""
    if recipe.run.device == "cuda" and device == "cpu":
        raise UserError(
            'run.device = "cuda", but this machine has no GPU; run the sweep on one that has, or run a sweep of'
            " configs/sweeps/cpu here"
        )
    if recipe.run.device == "auto" and device is not None:
        problems = [
            Problem(key, "must be true on this machine, which has no GPU; write emulate = true", "false")
            for key, _ in conflicts(with_values(recipe, {"run.device": device}), "float8.emulate")
        ]
        if problems:
            raise refusal(problems, where="float8")


def _require_windows(recipe: Recipe, skip: int) -> None:
    steps, every = recipe.run.steps, recipe.metrics.every
    count = len(list(itertools.islice(windows(steps=steps, every=every, skip=skip), LEAST_WINDOWS)))
    if count < LEAST_WINDOWS:
        enough = -(-skip // every) * every + LEAST_WINDOWS * every
        message = (
            f"leaves {count} windows of metrics.every = {every} steps after skip_steps = {skip}, but the median needs"
            f" {LEAST_WINDOWS}; write run.steps = {enough} or more, or a smaller metrics.every"
        )
        raise refusal([Problem("run.steps", message, str(steps))], where="the measured steps")


def _suggestion(path: Path) -> str:
    known = {file.stem: shown(file) for file in sorted(SWEEPS.glob("*.toml"))}
    close = get_close_matches(path.stem, known, n=2)
    if close:
        return f"did you mean {' or '.join(known[stem] for stem in close)}?"
    return f"sweeps are in {shown(SWEEPS)}: {', '.join(known)}"
