"""`train.py RECIPE --plan`: predict memory, time and cost of a recipe on any number of GPUs. Imports no torch."""

import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

from models.transformers_config import TransformersConfig
from parallel.config import MeshDegrees
from parallel.errors import UserError
from recipes.files.exit_codes import FINISHED, REFUSED
from recipes.files.reading import fault
from recipes.lab.plan.options import USAGE, Options, read
from recipes.lab.plan.plan import Plan, plan
from recipes.lab.plan.scaling import Size, sizes
from recipes.lab.plan.screen import IMBALANCE, Money, about, costs, screen, table, unequal
from recipes.lab.plan.world import Asked, World, degrees_of, world_of
from recipes.recipe.load import load
from recipes.recipe.rules_ladder import ladder_for

SILENT = 1.0
"""Seconds after which a line says that a search goes on."""


@dataclass(frozen=True)
class Answer:
    """What a command found."""

    lines: list[str]
    """Lines of the screen."""
    numbers: dict[str, Any]
    """The same numbers for scripts."""
    draw: Callable[[Path], None]
    """Draws the same as a picture into a file."""
    write: Callable[[Path], None] | None = None
    """Writes the recipe into a file, if a search found one."""
    code: int = FINISHED


def answer(arguments: Sequence[str]) -> int:
    """Print the plan that these arguments of train.py ask for. Returns the exit code. Raises UserError."""
    options, words = read(arguments)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is not an error
    if options is None:
        print(USAGE)
        return FINISHED
    if not words:
        raise UserError(f"no recipe given, as in train.py configs/smollm3_debug.toml --plan\n\n{USAGE}")
    if words[0].startswith("-"):
        raise UserError(f"the recipe must come first: train.py RECIPE {' '.join(words)} --plan")
    path, changes = words[0], words[1:]
    asked = Asked(Path(path).stem, options.gpu, options.calibrated_by)
    if len(options.processes) > 1:
        found = _scaled(path, changes, options, asked)
    else:
        processes = options.processes[0] if options.processes else None
        recipe = load(path, changes, rules=False)
        world = world_of(recipe, asked, processes=processes, nodes=options.nodes)
        if options.ladder:
            money = replace(options.money, ladder=ladder_for(recipe, options.ladder))
            options = replace(options, money=money)
        if recipe.stages:
            found = _staged(path, changes, options, world)
        elif isinstance(recipe.model, TransformersConfig):
            found = _counted(path, changes, options, world, degrees_of(recipe, world))
        elif options.search:
            found = _searched(path, changes, options, world)
        else:
            found = _planned(path, changes, options, world, degrees_of(recipe, world))
    try:
        print(json.dumps(found.numbers, indent=2) if options.json else "\n".join(map(_shown, found.lines)), flush=True)
    except OSError as error:
        raise fault("standard output cannot be written", error) from None
    for file, make in ((options.write, found.write), (options.picture, found.draw)):
        if file is not None and make is not None:
            make(file)
            if not options.json:
                print(f"\nwrote {file}")
    return found.code


def _planned(path: str, changes: Sequence[str], options: Options, world: World, degrees: MeshDegrees) -> Answer:
    """The answer for one plan."""
    recipe = load(path, changes, processes=world.processes, nodes=world.nodes, elsewhere=True)
    size = Size(world, plan(recipe, degrees, gpu=world.gpu, rates=world.rates))

    def draw(file: Path) -> None:
        from recipes.lab.plan.pictures import draw_step  # matplotlib

        draw_step(size, file)

    return Answer(screen(size.plan, world, options.money, mark=_mark()), as_json(size, options.money), draw)


def _staged(path: str, changes: Sequence[str], options: Options, world: World) -> Answer:
    """A plan for each stage, and their sum; the picture is that of the longest."""
    from recipes.lab.plan import of_stages

    recipe = load(path, changes, processes=world.processes, nodes=world.nodes, elsewhere=True)
    if options.search or isinstance(recipe.model, TransformersConfig):
        what = "--search looks for one mesh" if options.search else "models of transformers are counted for one length"
        raise UserError(f"{what}, but {recipe.run.name} has stages; write the values of one of them as a recipe")
    found = of_stages.plans(recipe, world, options.money)
    longest = max(found, key=lambda part: part.cost(options.money).days)

    def draw(file: Path) -> None:
        from recipes.lab.plan.pictures import draw_step  # matplotlib

        draw_step(longest.size, file)

    each = [as_json(part.size, part.money(options.money)) for part in found]
    lines = of_stages.screen(recipe, found, world, options.money)
    return Answer(lines, of_stages.numbers(found, each, options.money), draw)


def _counted(path: str, changes: Sequence[str], options: Options, world: World, degrees: MeshDegrees) -> Answer:
    """The plan of a model of transformers: memory and FLOPs."""
    from recipes.lab.plan import counted

    counted.refuse(options)
    recipe = load(path, changes, processes=world.processes, nodes=world.nodes, elsewhere=True)
    found = counted.plan(recipe, degrees, world)
    return Answer(found.screen(mark=_mark()), found.numbers(), draw=lambda file: None)


def _scaled(path: str, changes: Sequence[str], options: Options, asked: Asked) -> Answer:
    """The answer for several numbers of processes."""
    recipe = load(path, changes, elsewhere=True)
    if recipe.stages:
        raise UserError("--processes N,N: compares one mesh and batch, but this recipe has stages; write one N")
    if isinstance(recipe.model, TransformersConfig):
        raise UserError(
            "--processes N,N: compares times, which are not predicted for models of transformers; write one N"
        )
    found = sizes(recipe, asked, processes=options.processes)

    def draw(file: Path) -> None:
        from recipes.lab.plan.pictures import draw_scaling  # matplotlib

        draw_scaling(recipe, found, file)

    tokens = recipe.run.steps * recipe.batch.global_batch_size * recipe.batch.sequence_length
    money = options.money if options.money.tokens else replace(options.money, tokens=tokens)  # of every row
    asked_batch = {name: getattr(recipe.batch, name) for name in ("global_batch_size", "micro_batch_size")}
    numbers = {"asked": asked_batch, "plans": [as_json(size, money) for size in found]}
    return Answer(table(recipe, found, money), numbers, draw)


def _searched(path: str, changes: Sequence[str], options: Options, world: World) -> Answer:
    """The fastest recipe that fits."""
    from recipes.lab.plan.found import write
    from recipes.lab.plan.search import search

    recipe = load(path, changes, elsewhere=True)
    fixed = frozenset(word[2:].partition("=")[0].replace("-", "_") for word in changes if word.startswith("--"))
    said = Timer(SILENT, print, ["searching; many GPUs take a minute"], {"file": sys.stderr, "flush": True})
    said.daemon = True
    said.start()
    try:
        found = search(
            recipe,
            processes=world.processes,
            nodes=world.nodes,
            gpu=world.gpu,
            rates=world.rates,
            numerics=options.numerics,
            fixed=fixed,
        )
    finally:
        said.cancel()

    def numbers_of(plan: Plan | None) -> dict[str, Any] | None:
        return None if plan is None else as_json(Size(world, plan), options.money)

    def draw(file: Path) -> None:
        from recipes.lab.plan.pictures import draw_front  # matplotlib

        draw_front(found, world, file)

    numbers = {
        "original": numbers_of(found.original),
        "best": numbers_of(found.best),
        "difference": found.difference(),
        "others": [numbers_of(plan) for plan in found.others],
        "apart": {name: numbers_of(plan) for name, plan in found.apart.items()},
        "front": [
            {"memory_left_gib": room / 2**30, "tokens_per_second_per_device": speed, "settings": name}
            for room, speed, name in found.points()
        ],
        "rejected": found.rejected,
    }
    lines = [*about(recipe, world), "", *found.lines()]
    if found.best is None:
        return Answer(lines, numbers, draw, code=REFUSED)
    lines += ["", "of the fastest:", *costs(found.best, options.money)]
    return Answer(lines, numbers, draw, partial(write, found, base=Path(path)))


def as_json(found: Size, money: Money) -> dict[str, Any]:
    """Every number of a plan, not rounded."""
    plan, world, time = found.plan, found.world, found.plan.time
    shortest, longest = plan.range
    model, worst = plan.recipe.model, unequal(plan, world)
    return {
        "recipe": plan.recipe.run.name,
        "parameters": model.num_params(),
        "active_parameters": model.active_params(),
        "gpu": world.gpu.name,
        "gpu_from": world.kind_from,
        "processes": world.processes,
        "processes_from": world.number_from,
        "nodes": world.nodes,
        "degrees": asdict(plan.degrees),
        "global_batch_size": plan.recipe.batch.global_batch_size,
        "micro_batch_size": plan.recipe.batch.micro_batch_size,
        "tokens_per_step": plan.step_tokens,
        "fits": plan.fits,
        "peak_memory_gib": plan.memory.peak / 2**30,
        "gpu_memory_gib": plan.gpu.memory / 2**30,
        "fullest": plan.memory.fullest + plan.memory.where,
        "memory_gib": {
            moment: {piece: count / 2**30 for piece, count in pieces.items()}
            for moment, pieces in plan.memory.moments.items()
        },
        "tokens_per_second": time.tokens_per_second * world.processes,
        "tokens_per_second_per_device": time.tokens_per_second,
        "tokens_per_second_per_device_range": [time.tokens / longest, time.tokens / shortest],
        "step_seconds": time.step_seconds,
        "step_seconds_range": [shortest, longest],
        "seconds": time.seconds,
        "hidden_seconds": time.hidden,
        "mfu": plan.mfu("causal"),
        "mfu_full": plan.mfu("full"),
        "unequal_loads": worst
        and {
            "imbalance": IMBALANCE,
            "fits": worst.fits,
            "peak_memory_gib": worst.memory.peak / 2**30,
            "tokens_per_second_per_device": worst.time.tokens_per_second,
        },
        "calibrated": time.calibrated,
        "cost": {**asdict(money.of(plan)), "price": money.price},
        "loss": money.loss(plan),
    }


def _shown(line: str) -> str:
    """The line as this terminal can show it, without control characters that a name may hold."""
    encoding = sys.stdout.encoding or "utf-8"
    printable = "".join(c if c.isprintable() else "?" for c in line)
    return printable.encode(encoding, "replace").decode(encoding)


def _mark() -> str:
    """What bars are made of on this terminal."""
    return "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
