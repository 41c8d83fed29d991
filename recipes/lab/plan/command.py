"""`train.py RECIPE --plan`: predict memory, time and cost of a recipe on any number of GPUs. Imports no torch."""

import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

from models.transformers_config import TransformersConfig
from parallel.errors import UserError
from recipes.files.exit_codes import FINISHED, REFUSED
from recipes.files.reading import fault
from recipes.files.screen import say
from recipes.lab.plan.numbers import numbers_of, stages_numbers
from recipes.lab.plan.options import USAGE, Options, read_options
from recipes.lab.plan.plan import Asked, World, degrees_of, plan, plans_of_sizes, world_of
from recipes.lab.plan.screen import about, costs, plans_of_stages, screen, sizes_screen, stages_screen
from recipes.recipe.load import load
from recipes.recipe.rules_ladder import ladder_for
from recipes.recipe.schema import Recipe

SILENT = 1.0
"""Seconds after which a line says that a search goes on."""


@dataclass(frozen=True)
class PlanAnswer:
    """What a command found."""

    lines: list[str]
    """Lines of the screen."""
    numbers: dict[str, Any]
    """The same numbers for scripts."""
    write: Callable[[Path], None] | None = None
    """Writes the recipe into a file, if a search found one."""
    code: int = FINISHED


def answer(arguments: Sequence[str]) -> int:
    """Print the plan that these arguments of train.py ask for. Returns the exit code. Raises UserError."""
    options, words = read_options(arguments)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is not an error
    if options is None:
        say(USAGE)
        return FINISHED
    if not words:
        raise UserError(f"no recipe given, as in train.py configs/smollm3_debug.toml --plan\n\n{USAGE}")
    if words[0].startswith("-"):
        raise UserError(f"the recipe must come first: train.py RECIPE {' '.join(words)} --plan")
    path, changes = words[0], words[1:]
    asked = Asked(Path(path).stem, options.gpu, options.calibrated_by, options.assume)
    if len(options.processes) > 1:
        said = _scaled(path, changes, options, asked)
    else:
        processes = options.processes[0] if options.processes else None
        recipe = load(path, changes, rules=False)
        world = world_of(recipe, asked, processes=processes, nodes=options.nodes)
        if options.ladder:
            options.money = replace(options.money, ladder=ladder_for(recipe, options.ladder))
        if recipe.stages:
            said = _staged(path, changes, options, world)
        elif isinstance(recipe.model, TransformersConfig):
            degrees_of(recipe, world)  # in one line, if the mesh does not fit
            said = _counted(path, changes, options, world)
        elif options.search:
            said = _searched(path, changes, options, world)
        else:
            degrees_of(recipe, world)
            planned = plan(_load_for(path, changes, world), world)
            said = PlanAnswer(screen(planned, options.money, mark=_mark()), numbers_of(planned, options.money))
    try:
        say(json.dumps(said.numbers, indent=2) if options.json else "\n".join(said.lines), whole=options.json)
    except OSError as error:
        raise fault("standard output cannot be written", error) from None
    if options.write is not None and said.write is not None:
        said.write(options.write)
        if not options.json:
            say(f"\nwrote {options.write}")
    return said.code


def _staged(path: str, changes: Sequence[str], options: Options, world: World) -> PlanAnswer:
    """A plan for each stage, and their sum."""
    recipe = _load_for(path, changes, world)
    if options.search or isinstance(recipe.model, TransformersConfig):
        what = "--search looks for one mesh" if options.search else "models of transformers are counted for one length"
        raise UserError(f"{what}, but {recipe.run.name} has stages; write the values of one of them as a recipe")
    stages = plans_of_stages(recipe, world, options.money)
    return PlanAnswer(stages_screen(recipe, stages), stages_numbers(stages))


def _counted(path: str, changes: Sequence[str], options: Options, world: World) -> PlanAnswer:
    """The plan of a model of transformers: memory and FLOPs."""
    from recipes.lab.plan.counted import counted, refuse

    refuse(options)
    plan = counted(_load_for(path, changes, world), world)
    return PlanAnswer(plan.screen(mark=_mark()), plan.numbers())


def _load_for(path: str, changes: Sequence[str], world: World) -> Recipe:
    return load(path, changes, processes=world.processes, nodes=world.nodes, elsewhere=True)


def _scaled(path: str, changes: Sequence[str], options: Options, asked: Asked) -> PlanAnswer:
    """A table of several numbers of GPUs."""
    recipe = load(path, changes, elsewhere=True)
    if recipe.stages:
        raise UserError("--processes N,N: compares one mesh and batch, but this recipe has stages; write one N")
    if isinstance(recipe.model, TransformersConfig):
        raise UserError(
            "--processes N,N: compares times, which are not predicted for models of transformers; write one N"
        )
    plans = plans_of_sizes(recipe, asked, processes=options.processes)
    tokens = recipe.run.steps * recipe.batch.global_batch_size * recipe.batch.sequence_length
    money = options.money if options.money.tokens else replace(options.money, tokens=tokens)  # of every row
    asked_batch = {name: getattr(recipe.batch, name) for name in ("global_batch_size", "micro_batch_size")}
    numbers = {"asked": asked_batch, "plans": [numbers_of(plan, money) for plan in plans]}
    return PlanAnswer(sizes_screen(recipe, plans, money), numbers)


def _searched(path: str, changes: Sequence[str], options: Options, world: World) -> PlanAnswer:
    """The fastest recipe that fits."""
    from recipes.lab.plan.result import search, write_fastest

    recipe = load(path, changes, elsewhere=True)
    fixed = frozenset(word[2:].partition("=")[0].replace("-", "_") for word in changes if word.startswith("--"))
    said = Timer(SILENT, say, ["searching; many GPUs take a minute"], {"to": 2})
    said.daemon = True
    said.start()
    try:
        result = search(recipe, world, numerics=options.numerics, fixed=fixed)
    finally:
        said.cancel()

    numbers = {
        "original": result.original and numbers_of(result.original, options.money),
        "best": result.best and numbers_of(result.best, options.money),
        "difference": result.difference(),
        "others": [numbers_of(plan, options.money) for plan in result.others],
        "apart": {name: numbers_of(plan, options.money) for name, plan in result.apart.items()},
        "front": [
            {"memory_left_gib": room / 2**30, "tokens_per_second_per_device": speed, "settings": name}
            for room, speed, name in result.points()
        ],
        "rejected": result.rejected,
    }
    lines = [*about(recipe, world, result.best.time if result.best else None), "", *result.lines()]
    if result.best is None:
        return PlanAnswer(lines, numbers, code=REFUSED)
    lines += ["", "of the fastest:", *costs(result.best, options.money)]
    return PlanAnswer(lines, numbers, partial(write_fastest, result, base=Path(path)))


def _mark() -> str:
    """What bars are made of on this terminal."""
    return "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
