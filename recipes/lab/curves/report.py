"""What a report says of one run besides its curves: what was asked, what happened, what was predicted, how to go on.
The same sections are in report.html and in report.md, the card of the model. Imports no torch."""

import html
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from models.hf import beyond_hf
from models.sizes import SIZES
from parallel.errors import UserError
from recipes.files.interpreter import ROOT
from recipes.files.layout import CHECKPOINTS, LOG_FILE, RECIPE, checkpoint_steps
from recipes.files.markdown import markdown_table
from recipes.files.reading import toml_table, user_path
from recipes.lab.curves.listing import ended, state, tail
from recipes.lab.curves.panels import hours
from recipes.lab.curves.reading import AVERAGE, EPOCHS, TASK, TOKENS, VALIDATION, LoggedRun, Numbers, plain
from recipes.lab.curves.style import shortened
from recipes.metrics.ladder import read_ladder
from recipes.plan.memory import predict
from recipes.recipe.fields import BEFORE, field_types, toml, value_of
from recipes.recipe.load import load, read_toml, shown, to_toml
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import stage_of, stages_of, tokens_of
from recipes.training.foresight import foresight

MOST = 40
"""The newest events, the points of the curve in the Markdown, and the lines of a sample that are shown."""
SAMPLE = re.compile(r"a held-out (?:text|prompt), and how the model ")
SAMPLES = 6
"""Shown, from the first to the newest."""
STEP = re.compile(r"step +(\d+)")
LOGGED = re.compile(r"^\d{4}-\d\d-\d\dT\S+ ", re.MULTILINE)
"""What a line of the log begins with, and further lines of one text do not."""
UNKNOWN = "-"
OF_THE_RUN = ("run.name", "run.output")


def comparison(runs: Sequence[LoggedRun]) -> list[list[str]]:
    """The rows of a table, head first: numbers that a run has, then each value in which the recipes differ.
    Of more runs than that, a row for each."""
    rows = [["", *(run.name for run in runs)], *numbers(runs), *differences(runs)]
    return [list(row) for row in zip(*rows, strict=True)] if len(runs) > len(rows) else rows


def aligned(rows: Sequence[Sequence[str]], *, most: int = 60) -> str:
    """The rows as lines of text. most: characters of a cell."""
    cells = [[shortened(cell, most) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def numbers(runs: Sequence[LoggedRun]) -> list[list[str]]:
    """A row for each of the last numbers that a run has."""

    def row(title: str, column: str, value: Callable[[Numbers], Any], form: str) -> list[str]:
        known = [run.columns[column].values for run in runs]
        known = [values[np.isfinite(values)] for values in known]
        return [title, *(f"{value(values):{form}}" if len(values) else UNKNOWN for values in known)]

    tested = dict.fromkeys(name for run in runs for kind in (VALIDATION, AVERAGE, TASK) for name in run.named(kind))
    rows = [
        ["steps", *(f"{run.columns['loss'].last or 0:,}" for run in runs)],
        row("tokens", "tokens", np.max, ",.0f"),
        row("loss, last tenth", "loss", lambda values: values[-max(1, len(values) // 10) :].mean(), ".4f"),
        *(row(name.replace("_", " ", 1), name, lambda values: values[-1], ".4f") for name in tested),
        row("tokens/s", "tokens_per_second", np.median, ",.0f"),
        row("MFU", "mfu", np.median, ".1%"),
        row("peak GiB", "peak_memory_gib", np.max, ".2f"),
        row("goodput", "goodput", lambda values: values[-1], ".1%"),
    ]
    return [row for row in rows if set(row[1:]) != {UNKNOWN}]


def differences(runs: Sequence[LoggedRun]) -> list[list[str]]:
    """A row for each key whose values differ. What an older version did not write is as it was then."""
    recipes = [dict(_flat(run.recipe)) for run in runs]
    rows = []
    for key in dict.fromkeys(key for recipe in recipes for key in recipe if key not in OF_THE_RUN):
        default = toml(BEFORE.get(key, value_of(Recipe(), key))) if key in field_types() else UNKNOWN
        values = [recipe.get(key, default) if recipe else None for recipe in recipes]
        if len(set(values) - {None}) > 1:
            rows.append([key, *(UNKNOWN if value is None else value for value in values)])
    return rows


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value) of everything in a recipe; stages are numbered from 1."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(number): item for number, item in enumerate(value, 1)}
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}" if key else name)
    else:
        yield key, plain(toml(value))


@dataclass(frozen=True)
class Section:
    """A part of the report: a table, its head first, or text."""

    title: str
    rows: Sequence[Sequence[str]] = ()
    text: str = ""


def state_of(run: LoggedRun) -> str:
    """How the run is, such as "running" or "done"; it holds its lock until its last report is written."""
    said = state(run.folder, run.step)
    return said if said != "running" else ended(run.folder) or said


def sections(run: LoggedRun) -> list[Section]:
    """The parts of a report for which there is something to say."""
    parts = [
        Section("Last numbers", [["", run.name], *numbers([run])]),
        Section("What was asked", _asked(run)),
        Section("Predicted and measured", _predicted(run)),
        Section("Data", _sources(run)),
        Section("Events", _events(run)),
        *_samples(run),
        Section("How to go on", text="\n".join(_commands(run))),
        Section("Versions", _versions(run)),
    ]
    return [part for part in parts if len(part.rows) > 1 or part.text]


def model_card(run: LoggedRun) -> str:
    """The text of report.md. What follows its head can go with an export."""
    size, folder = html.escape(str(run.about("model", "name") or "custom")), plain(str(run.folder))
    exports = _exports(run)
    lines = ["---", *(["library_name: transformers"] if exports else [])]
    lines += ["license: unknown  # yours to say, after those of the data", "---", "", f"# {html.escape(run.name)}", ""]
    lines += [f"A language model ({size}), trained with Shardwright; {state_of(run)}.", "", "## Usage", ""]
    call = f'pipeline("text-generation", {json.dumps(folder + "-hf")})("Once upon a time")'
    usage = ["from transformers import pipeline", f"print({call})"]
    lines += [f"    {line}" for line in (usage if exports else [_generate(run)])]
    column = next(iter(run.named(VALIDATION)), "loss")
    x, y = run.columns[column].steps, run.columns[column].values
    places = np.unique(np.linspace(0, len(x) - 1, min(MOST, len(x))).round().astype(int))
    curve = [["step", column.replace("_", " ")], *([f"{x[at]:,.0f}", f"{y[at]:.4f}"] for at in places)]
    for part in [*sections(run), Section("Curve", curve)]:
        lines += ["", f"## {part.title}", ""]
        rows = [[html.escape(cell, quote=False) for cell in row] for row in part.rows]
        lines += markdown_table(rows[0], rows[1:], align="l" * len(rows[0])) if rows else []
        lines += [f"    {line}".rstrip() for line in part.text.splitlines()]
    return "\n".join(lines) + "\n"


def _asked(run: LoggedRun) -> list[list[str]]:
    """What the recipe changes of the base of the file that the run was started with or, without one, of the file; else
    of the defaults. A file with plug-ins is not read: a page runs no code of a run."""
    if not run.recipe:
        return []
    name, recipe = "the defaults", None
    with suppress(UserError):
        for word in [] if run.about("plugins") else _command(run)[1:2]:
            file = next((path for path in (user_path(word), ROOT / word) if path.is_file()), Path())
            if base := read_toml(file).get("base"):
                file = next((path for path in (file.parent / str(base), ROOT / str(base)) if path.is_file()), Path())
            if file.resolve() != (run.folder / RECIPE).resolve():
                name, recipe = plain(shown(file)), load(file, rules=False)
    if recipe is None:
        size = str(run.about("model", "name"))
        recipe = replace(Recipe(), model=replace(SIZES.get(size, Recipe().model), name=size))
    before = LoggedRun(name, run.folder, recipe=toml_table(to_toml(recipe)))
    return [["", "this run", name], *differences([run, before])]


def _command(run: LoggedRun) -> list[str]:
    """The words that the run was started with, from train.py on; empty if they are not known."""
    words = run.environment.get("command")
    known = isinstance(words, list) and len(words) > 1 and Path(str(words[0])).name == "train.py"
    return [str(word) for word in words] if known and words else []


def _predicted(run: LoggedRun) -> list[list[str]]:
    """The plan and the ladder against what was measured; without rows where neither predicts anything."""
    rows, device = [["", "predicted", "measured"]], run.environment.get("device")
    processes, nodes = (run.environment.get(key) for key in ("world_size", "nodes"))
    with suppress(UserError):
        if run.about("plugins"):
            return rows  # as in _asked()
        whole = load(run.folder / RECIPE, rules=False)
        recipe = stage_of(whole, run.step).recipe
        if isinstance(processes, int) and isinstance(nodes, int):
            degrees = recipe.mesh.fit(processes, nodes=nodes)
            if planned := foresight(recipe, degrees, device=str(device), nodes=nodes):
                measured = float(np.nanmedian(run.columns["step_seconds"].values))
                rows += [["seconds per step", f"{planned.predicted:.4g}", f"{measured:.4g}"]]
                peak = predict(recipe, degrees, context=False).peak / 2**30
                rows += [["peak GiB of a process", f"{peak:.2f}", f"{_most(run):.2f}"]]
        if recipe.validation.ladder and (column := next(iter(run.named(VALIDATION)), "")):
            tokens = sum(map(tokens_of, stages_of(whole)))
            ladder = read_ladder(user_path(recipe.validation.ladder))
            measured, at = run.columns[column].last_value, run.columns[column].last or 0
            if found := ladder.predict(whole.model.non_embedding_params(), tokens, share=at / whole.run.steps):
                interval = f"{found.loss:.3f} ({found.low:.3f} to {found.high:.3f})"
                rows += [[f"validation loss at step {at:,}", interval, f"{measured:.3f}"]]
    return rows


def _most(run: LoggedRun) -> float:
    """The most memory that a process held, GiB; NaN if it was not measured."""
    columns = [run.columns[name].values for name in run.named("peak_memory_gib")]
    return float(max((np.nanmax(values) for values in columns), default=np.nan))


def _sources(run: LoggedRun) -> list[list[str]]:
    """What was read of each source."""
    mixture = run.about("data", "mixture")
    sources = mixture if isinstance(mixture, dict) and mixture else [str(run.about("data", "source") or "text")]
    read = {name: run.columns[TOKENS + name].last_value for name in sources if run.has(TOKENS + name)}
    read = read or {"+".join(sources): run.columns["tokens"].last_value}
    times = {name: run.columns[EPOCHS + name].last_value for name in sources if run.has(EPOCHS + name)}
    rows = [
        [plain(name), f"{tokens:,.0f}", f"{times[name]:g}" if name in times else "-"] for name, tokens in read.items()
    ]
    return [["source", "tokens", "times read"], *rows]


def _events(run: LoggedRun) -> list[list[str]]:
    """What happened, by step; the newest last."""
    events = [(step, "started again from here") for step in run.restarts]
    events += [(step, f"stage {name} begins") for step, name in run.stages if step]
    events += [(step, "skipped: its gradient was not finite, or far too large") for step in run.skipped]
    for who, steps in run.stragglers.items():
        events += [(steps[0], who + (f", in {len(steps)} rows to step {steps[-1]:,}" if len(steps) > 1 else ""))]
    known, when = hours(run)
    rows = [[f"{step:,}", _after(step, known, when), what] for step, what in sorted(events)]
    left_out = [["", "", f"{len(rows) - MOST} earlier ones"]] if len(rows) > MOST else []
    return [["step", "after", "event"], *left_out, *rows[-MOST:]]


def _after(step: int, known: Numbers, when: Numbers) -> str:
    """The time of the run at a step, as in 1:05 h; "-" if it is not known."""
    minutes = round(60 * float(np.interp(step, known, when))) if len(known) else None
    return "-" if minutes is None else f"{minutes // 60}:{minutes % 60:02} h"


def _samples(run: LoggedRun) -> Iterator[Section]:
    """Texts that the run has logged over time, of each a beginning and how the model went on; the newest last."""
    messages = LOGGED.split(tail(run.folder / LOG_FILE).decode(errors="replace"))
    step, found = "0", dict[str, str]()
    for number, message in enumerate(messages):
        step = match[1] if (match := STEP.match(message)) else step
        if SAMPLE.match(message) and len(messages) > number + 3:
            text = "".join(messages[number + 1 : number + 3]).splitlines()[:MOST]
            found[f"Sample after step {int(step):,}"] = "\n".join(text)  # of a repeated step the newest
    for place in dict.fromkeys(np.linspace(0, len(found) - 1, SAMPLES).round().astype(int)) if found else ():
        title, said = [*found.items()][place]
        yield Section(title, text=said)


def _commands(run: LoggedRun) -> Iterator[str]:
    """What to type next."""
    folder, processes = shlex.quote(plain(str(run.folder))), run.environment.get("world_size")
    words = _command(run)[1:] or [f"{run.folder}/{RECIPE}"]
    yield f"NPROC={processes or 1} scripts/run.sh {shlex.join(map(plain, words))}"
    yield f"python scripts/plot.py {folder} --watch"
    with suppress(UserError):
        if checkpoint_steps(run.folder / CHECKPOINTS):
            yield _generate(run)
            if _exports(run):
                yield f"python scripts/convert_hf.py export {folder} {folder}-hf"


def _generate(run: LoggedRun) -> str:
    """The command that lets the model write."""
    asks = "--chat" if run.about("data", "messages_field") else '"Once upon a time"'
    return f"python scripts/generate.py {shlex.quote(plain(str(run.folder)))} {asks}"


def _exports(run: LoggedRun) -> bool:
    """Whether transformers can have the model, as far as a recipe tells that can be read without code of the run."""
    with suppress(UserError):
        return not run.about("plugins") and beyond_hf(load(run.folder / RECIPE, rules=False).model) is None
    return False


def _versions(run: LoggedRun) -> list[list[str]]:
    packages = run.environment.get("packages")
    about = {key: value for key, value in run.environment.items() if isinstance(value, str | int)}
    about |= packages if isinstance(packages, dict) else {}
    return [["", "this run"], *([plain(key), shortened(plain(str(value)), 30)] for key, value in about.items())]
