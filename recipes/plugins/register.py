"""What a plug-in calls while it is imported. docs/extending.md has a worked example of each. Imports no torch."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from recipes.data.text.sources import NAMED, SUFFIXES
from recipes.metrics.config import TRACKERS
from recipes.optimization.config import OPTIMIZERS, SCHEDULES, OptimizerFacts
from recipes.plugins.loading import add

__all__ = ["OptimizerFacts", "file_format", "metric", "optimizer", "rule", "schedule", "source", "tracker"]


def optimizer(name: str, facts: OptimizerFacts, *, fields: type | None = None) -> None:
    """A value of optimizer.name.

    Args:
        name: the value, and the name of the section of its own fields.
        facts: what others must know of it. Its builder is called as builder(groups, config, *, matrices, mesh, dtype,
            blocks, fields) and returns a torch Optimizer; take **_ for what yours does not need.
        fields: a frozen dataclass, as those of our sections: each field with a default and a text below it.

    Example: optimizer("lion", OptimizerFacts(Lion, reads=(), moments=1), fields=LionConfig)
    """
    _require_new("optimizer", name, OPTIMIZERS)
    _require_callable(facts.builder)
    add("optimizer", name, facts, fields)


def schedule(name: str, share: Callable[..., float], *, fields: type | None = None) -> None:
    """A value of schedule.kind. share(step, steps) is the share of the way from min_lr_ratio to the peak at this step
    (from 0) of those after the warm-up; with fields, share(step, steps, fields=SECTION).

    Example: schedule("one_minus_sqrt", lambda step, steps: 1 - (step / steps) ** 0.5)
    """
    _require_new("schedule", name, SCHEDULES)
    _require_callable(share)
    add("schedule", name, share, fields)


def metric(name: str, function: Callable[..., float], *, fields: type | None = None) -> None:
    """A column of metrics.jsonl, of every recipe that loads the plug-in. function(row, built) is called after each
    logged step by all processes, with the columns so far and the trained model: sums over processes are its own.

    Example: metric("loss_bits", lambda row, built: row["loss"] / math.log(2))
    """
    _require_callable(function)
    add("metric", name, function, fields)


def tracker(name: str, opener: Callable[..., Any] | str, *, fields: type | None = None) -> None:
    """A name for metrics.trackers. opener(folder, *, config, run_name, recipe, before, log) returns what has write(row),
    flush() and close(); rank 0 calls them. before: "NAME_id", if what was opened earlier has an `id`, and "step".

    Example: tracker("csv", CsvTracker)
    """
    _require_new("tracker", name, TRACKERS)
    _require_callable(opener)
    add("tracker", name, opener, fields)


def file_format(end: str, read: Callable[[Path], Iterable[str | Mapping[str, Any]]]) -> None:
    """A file format, by the end of its names. read(path) yields each row: a text, or a table with data.text_field. The
    same file must give the same rows.

    Example: file_format(".jsonl.rot13", read_rot13)
    """
    if not end.startswith(".") or end != end.lower() or end.endswith((*SUFFIXES, NAMED)):
        raise UserError(f"{end!r}: the end of names must be in lower case, begin with a dot, and not be read already")
    _require_callable(read)
    add("format", end, read)


def source(begin: str, files: Callable[[str], Iterable[str | Path]]) -> None:
    """Sources that begin so, such as "mine://" or "mine:". files(source) lists files on this disk, always in the same
    order; each has a format that is read, ours or one of file_format().

    Example: source("books://", lambda name: sorted(Path("/data/books").glob(name.removeprefix("books://"))))
    """
    if not re.fullmatch(r"[a-z][a-z0-9_+-]+:(//)?", begin) or begin.rstrip("/:") in OURS:
        raise UserError(f'{begin!r}: sources of a plug-in begin with a word of their own and ":", such as "mine://"')
    _require_callable(files)
    add("source", begin, files)


def rule(check: Callable[[Any], Iterator[tuple[str, str]]]) -> None:
    """A rule across fields. check(recipe) yields ("section.field", what is wrong with it, and what to write instead).

    Example: rule(lambda recipe: [("lion.beta1", "must be below beta2; write 0.9")] if ... else [])
    """
    _require_callable(check)
    add("rule", "", check)


OURS = ("hf", "s3", "gs", "http", "https", "file", "train")


def _require_new(kind: str, name: str, known: Iterable[str]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"{kind} {name!r}: write a name of lower-case letters, digits and _")
    if name in known:
        raise UserError(f"{kind} {name!r} exists already, in Shardwright itself; rename it")


def _require_callable(value: Any) -> None:
    with suppress(ImportError):
        if callable(value) or (re.fullmatch(r"[\w.]+:[\w.]+", str(value)) and find_spec(value.partition(":")[0])):
            return
    raise UserError(f'{value!r} is no function; give one, or "MODULE:FUNCTION" of a module that is installed')
