"""What a plug-in calls while it is imported. docs/extending.md has a worked example of each.

fields: a dataclass such as those of our sections, each field with a type, a default and a text below it. It becomes the
section [NAME] of the recipe, which the function gets as fields=SECTION.

Imports no torch.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from models import registry
from models.config import CUSTOM, FROM_CONFIG, FROM_WEIGHTS, ModelConfig
from models.registry import Costs as Costs  # for facts of parts
from models.registry import Place
from models.sizes import SIZES
from parallel.errors import UserError
from recipes.data.text.sources import SUFFIXES
from recipes.files.border import foreign
from recipes.metrics.config import COLUMNS
from recipes.optimization.config import OptimizerFacts
from recipes.plugins.loading import add


def optimizer(name: str, facts: OptimizerFacts, *, fields: type | None = None) -> None:
    """A name for [optimizer]. facts.builder(groups, config, *, matrices, mesh, dtype, blocks) returns a torch
    Optimizer; take **_ for what yours does not need.

    Example: optimizer("lion", OptimizerFacts(Lion, reads=(), moments=1), fields=LionFields)
    """
    _add("optimizer", name, facts, fields, call=facts.builder)


def part(place: Place, name: str, builder: str | Callable[..., Any], *, tensors: Any, **facts: Any) -> None:
    """A name for [model] attention, feed_forward or norm. tensors, facts: as of models.registry.Part.

    Example: part("norm", "layer", layer_norm, tensors=lambda config, width: {"weight": (width,)}, column=())
    """

    def shapes(config: Any, number: int) -> dict[str, tuple[int, ...]]:
        with foreign(f'model.{place} = "{name}": its tensors fail', but=()):
            return {one: tuple(map(int, shape)) for one, shape in tensors(config, number).items()}

    try:
        _add("part", f"{place}.{name}", registry.checked(place, name, builder, tensors=shapes, **facts), call=builder)
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error


def family(name: str, size: ModelConfig) -> None:
    """A name for [model] name, with the shape and the parts of this ModelConfig.

    Example: family("mine_1b", replace(SIZES["llama3_1b"], attention="gated"))
    """
    if name in (*SIZES, CUSTOM, FROM_WEIGHTS, FROM_CONFIG) or not isinstance(size, ModelConfig):
        raise UserError(f"family {name!r} is a name of ours, or its size no ModelConfig; choose others")
    add("family", name, size)


def schedule(name: str, share: Callable[..., float], *, fields: type | None = None) -> None:
    """A value of schedule.kind. share(step, steps) is the share of the way from min_lr_ratio to the peak at this step,
    from 0, of those after the warm-up.

    Example: schedule("one_minus_sqrt", lambda step, steps: 1 - (step / steps) ** 0.5)
    """
    _add("schedule", name, share, fields, call=share)


def metric(name: str, function: Callable[..., float], *, fields: type | None = None) -> None:
    """A column of metrics.jsonl. function(row, built) is called after each logged step by all processes, with the
    columns so far and what build.py built: the model, optimizer and mesh. Sums over processes are its own.

    Example: metric("bits", lambda row, built: row["loss"] / math.log(2))
    """
    if name in COLUMNS.split() or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"metric {name!r} is ours, or no name of lower-case letters, digits and _; rename it")
    _add("metric", name, function, fields, call=function)


def tracker(name: str, opener: Callable[..., Any] | str, *, fields: type | None = None) -> None:
    """A value of metrics.trackers. opener(folder=, config=, run_name=, recipe=, before=, log=) returns what has
    write(row), flush() and close(), which rank 0 calls. An attribute `id` is before["NAME_id"] at the next start.

    Example: tracker("csv", CsvTracker)
    """
    _add("tracker", name, opener, fields, call=opener)


def file_format(end: str, read: Callable[[Path], Iterable[str | Mapping[str, Any]]]) -> None:
    """A file format, by the end of its names. read(path) yields rows, always the same: texts, or tables with
    data.text_field.

    Example: file_format(".json", lambda path: json.loads(path.read_text()))
    """
    if not end.startswith(".") or end != end.lower() or end.endswith((*SUFFIXES, ".csv")):
        raise UserError(f"{end!r}: write the end of names in lower case, with a dot, that is not read already")
    _add("format", end, read, call=read)


def source(begin: str, files: Callable[[str], Iterable[str | Path]]) -> None:
    """Sources that begin so, such as "mine://". files(source) lists files on this disk, always in the same order, of
    formats that are read.

    Example: source("books://", lambda name: sorted(Path("/data/books").glob(name.removeprefix("books://"))))
    """
    if not re.fullmatch(r"[a-z0-9]+://", begin) or begin in ("hf://", "s3://", "gs://", "http://", "https://"):
        raise UserError(f'{begin!r}: sources of a plug-in begin with a word of their own, such as "mine://"')
    _add("source", begin, files, call=files)


def rule(check: Callable[[Any], Iterator[tuple[str, str]]]) -> None:
    """A rule across fields. check(recipe) yields ("section.field", what is wrong and what to write instead)."""
    _add("rule", "", check, call=check)


def _add(kind: str, name: str, value: Any, fields: type | None = None, *, call: Any) -> None:
    """Keep what is registered. Raises UserError if `call` neither is a function nor names one."""
    with suppress(ImportError):
        if callable(call) or (re.fullmatch(r"[\w.]+:[\w.]+", str(call)) and find_spec(call.partition(":")[0])):
            return add(kind, name, value, fields)
    raise UserError(f'{call!r} is no function; give one, or "MODULE:FUNCTION" of a module that is installed')
