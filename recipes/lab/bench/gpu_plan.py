"""What the gpu suite measures, in which order and for how long, and the record that survives its end.

The record is a JSON object: "environment" of the last call, "code" (a hash of the sources), "state" (of code and
versions) and "rows", name -> what was measured. Each row is written as soon as it is finished, and a later call goes on
with the others. Imports no torch.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from parallel.errors import UserError, listed
from recipes.files.atomic import write_whole
from recipes.lab.sweep.grid import Row, Sweep
from recipes.plan.hardware import GPUS, Gpu, gpu_of
from recipes.plan.time import step_time
from recipes.recipe.load import CONFIGS

GROUPS = {"bandwidth": 25, "products": 20, "attention": 20, "loss": 30, "documents": 15}
"""Groups of kernels, each measured in a process of its own: name -> estimated seconds on a GPU."""
TESTS = "tests"
"""The first row: tests/gpu, whose failures make every number doubtful."""
TESTS_SECONDS, TESTS_LIMIT = 120, 900
"""Estimated seconds of the tests, and those after which they are treated as hung."""
GROUP_LIMIT = 180.0
"""Seconds after which a group is treated as hung."""
WORKS = "works_"
"""Training runs whose names begin with this only show that a run works, so they come first."""
START, TINY = 45, 15
"""Estimated seconds of a training run before its second step: processes, text, weights, compilation. TINY: all of a
tiny run or group on a CPU."""
UNKNOWN = 30
"""Estimated seconds of the steps of a training run on a device that the model of the step does not know."""
SOURCES = ("train.py", *(f"{folder}/**/*.py" for folder in ("models", "parallel", "recipes", "scripts")))
SAME = ("device", "python", "cuda", "packages")
"""Entries of the environment that must not differ between the calls that fill a record."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """The tests, a training run or a group of kernels."""

    name: str
    estimate: float
    """Seconds."""
    limit: float
    """Seconds after which it is ended as hung."""
    row: Row | None = None
    """The training run; None for kernels and tests."""

    @property
    def fingerprint(self) -> str:
        """Text that changes with the recipe of a training run."""
        return self.row.fingerprint if self.row else "kernels"


def items_of(sweep: Sweep, device: str, *, tiny: bool, steps: bool) -> list[Item]:
    """Everything that can be measured, the most informative first."""
    runs = [Item(row.label, TINY if tiny else _estimate(row, device), row.timeout, row) for row in sweep.rows]
    kernels = [Item(name, TINY if tiny else seconds, GROUP_LIMIT) for name, seconds in GROUPS.items()]
    if not steps:
        return kernels
    tests = Item(TESTS, TINY if tiny else TESTS_SECONDS, TESTS_LIMIT)
    first = [item for item in runs if item.name.startswith(WORKS)]
    return [tests, *first, *kernels, *(item for item in runs if item not in first)]


def _estimate(row: Row, device: str) -> float:
    seconds = predicted_step(row, device)
    return START + (UNKNOWN if seconds is None else row.recipe.run.steps * seconds)


def predicted_step(row: Row, device: str) -> float | None:
    """Seconds of one step, or None where the model of the step does not know the device or the recipe."""
    try:
        degrees = row.recipe.mesh.fit(row.processes, nodes=1)
        return step_time(row.recipe, degrees, gpu=gpu_of_device(device)).step_seconds
    except UserError:
        return None


def fitting(items: Sequence[Item], seconds: float) -> list[Item]:
    """The items whose estimates fit into the time, in order; a long one is left out for shorter ones behind it."""
    chosen = []
    for item in items:
        if item.estimate <= seconds:
            chosen.append(item)
            seconds -= item.estimate
    return chosen


def code_hash() -> str:
    """A hash that changes with every source: it needs no git, and not only commits change it."""
    root = CONFIGS.parent
    files = sorted(file for pattern in SOURCES for file in root.glob(pattern))
    return _hash(b"\0".join(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() for file in files))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def place_of(folder: Path, device: str) -> Path:
    """The path of the record of a device, without suffix."""
    return folder / ("gpu-" + re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-"))


def open_record(place: Path, environment: dict[str, Any], *, fresh: bool, mixed: bool) -> Record:
    """The record to go on with, or a new one. Raises UserError, with what to do, if it is of something else.

    Args:
        place: its path without suffix.
        environment: that of this call.
        fresh: set an old record aside.
        mixed: go on although versions or code differ; each row keeps the code that it was measured with.
    """
    code = code_hash()
    state = _hash(json.dumps([code, *(environment[key] for key in SAME)]).encode())
    new = {"suite": "gpu", "environment": environment, "code": code, "state": state, "rows": {}}
    file = place.with_suffix(".json")
    if fresh:
        _set_aside(place)
    if not file.exists():
        return new
    remedy = "--fresh sets it aside and starts anew, --output FOLDER writes elsewhere"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        then, rows = record["environment"], record["rows"]
        assert isinstance(rows, dict)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UserError(f"{file} is not a record that can be continued; {remedy}") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; {remedy}") from None
    differing = [
        f"{key} {_differing(then.get(key), environment[key])}" for key in SAME if then.get(key) != environment[key]
    ]
    if record.get("code") != code:
        commits = (f"{str(facts.get('git_commit'))[:12]}" for facts in (then, environment))
        differing.append("the code (commit {} there, {} here, or changes to it)".format(*commits))
    if differing and not mixed:
        raise UserError(
            f"{file} has {len(rows)} rows of another state; different: {'; '.join(differing)}. {remedy}, and --mixed"
            " continues it"
        )
    return new | {"rows": rows}


def _differing(then: Any, now: Any) -> str:
    if isinstance(then, dict) and isinstance(now, dict):
        keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
        return ", ".join(f"{key} {then.get(key)} there, {now.get(key)} here" for key in keys)
    return f"{then} there, {now} here"


def _set_aside(place: Path) -> None:
    """Rename both files of a record to the first free number."""
    old = [file for suffix in (".json", ".md") if (file := place.with_suffix(suffix)).exists()]
    number = next(n for n in count(1) if not any(file.with_suffix(f".{n}{file.suffix}").exists() for file in old))
    for file in old:
        file.rename(file.with_suffix(f".{number}{file.suffix}"))


def write_record(place: Path, record: Record) -> None:
    """Replace the JSON file atomically. Raises UserError if that fails; the file before is then unharmed."""
    _write(place.with_suffix(".json"), json.dumps(record, indent=1) + "\n")


def write_page(place: Path, text: str) -> None:
    """Replace the Markdown file in the same way."""
    _write(place.with_suffix(".md"), text)


def _write(file: Path, text: str) -> None:
    try:
        write_whole(file, text, sync=True)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}; free space, or write another --output") from None


def gpu_of_device(name: str) -> Gpu:
    """What gpu_of() returns; raises UserError for a device that is not known."""
    gpu = gpu_of(name)
    if gpu is None:
        raise UserError(f"{name}: its rates are not known; the model knows {listed(list(GPUS))}")
    return gpu
