"""`train.py RECIPE --plan`: predict memory, time and cost of a recipe on any number of GPUs. Imports no torch."""

import json
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from parallel.errors import UserError
from recipes.files.exit_codes import FINISHED
from recipes.load import load
from recipes.mesh_rules import fitted_mesh
from recipes.plan.plan import plan
from recipes.plan.scaling import Size, sizes
from recipes.plan.screen import Money, screen, table
from recipes.plan.world import kind_of, world_of

USAGE = """\
usage: train.py RECIPE [--section.field value ...] --plan [option ...]

  --processes N        for N GPUs; N,N,... compares several numbers
  --nodes M            on M nodes
  --gpu NAME           H100, H200, A100, A100-40, B200 or H100-500W
  --tokens 11T         time and cost for so many tokens, not the recipe's steps
  --price 2.5          of one GPU for an hour, in any currency
  --json               print numbers for scripts
  --picture FILE.png   draw memory and time of a step, or how they scale

docs/plan.md explains every number."""
PICTURES = (".png", ".svg", ".pdf")
MULTIPLES = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
MOST_PROCESSES = 2**20
MOST_TOKENS = 1e18


class Parser(ArgumentParser):
    """Its errors are ours: one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; python train.py --plan --help lists the options")


def answer(arguments: Sequence[str]) -> int:
    """Print the plan that these arguments of train.py ask for. Returns the exit code. Raises UserError."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    for name in ("--processes", "--nodes", "--gpu", "--tokens", "--price", "--picture"):
        parser.add_argument(name)
    options, words = parser.parse_known_args(list(arguments))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is not an error
    if options.help:
        print(USAGE)
        return FINISHED
    if options.check:
        raise UserError("--check and --plan: write one of them")
    if not words:
        raise UserError(f"no recipe given, as in train.py configs/smollm3_debug.toml --plan\n\n{USAGE}")
    if words[0].startswith("-"):
        raise UserError(f"the recipe must come first: train.py RECIPE {' '.join(words)} --plan")
    _plan(words[0], words[1:], options)
    return FINISHED


def _plan(path: str, changes: Sequence[str], options: Namespace) -> None:
    """Read the options, plan, and print."""
    processes = [] if options.processes is None else _several("--processes", options.processes)
    nodes = None if options.nodes is None else _whole("--nodes", options.nodes)
    money = Money(_tokens(options.tokens), _price(options.price))
    picture = None if options.picture is None else _picture(options.picture)
    if nodes is not None and len(processes) > 1:
        raise UserError("--nodes: goes with one number of processes; without it, nodes are full")
    recipe = load(path, changes, rules=False)
    kind = kind_of(recipe, name=options.gpu, file=Path(path).stem)
    if len(processes) > 1:
        recipe = load(path, changes, elsewhere=True)
        found = sizes(recipe, kind=kind, processes=processes)
        lines, numbers = table(recipe, found, money), {"plans": [as_json(one, money) for one in found]}
    else:
        world = world_of(
            recipe, kind=kind, file=Path(path).stem, processes=processes[0] if processes else None, nodes=nodes
        )
        recipe = load(path, changes, processes=world.processes, nodes=world.nodes, elsewhere=True)
        degrees = fitted_mesh(recipe.mesh, world.processes, world.nodes)
        found = [Size(world, plan(recipe, degrees, gpu=world.gpu))]
        lines, numbers = screen(found[0].plan, world, money, mark=_mark()), as_json(found[0], money)
    if picture is not None:
        from recipes.plan.pictures import draw  # matplotlib

        draw(recipe, found, picture)
        lines += ["", f"picture: {picture}"]
    print(json.dumps(numbers, indent=2) if options.json else "\n".join(lines))


def as_json(found: Size, money: Money) -> dict[str, Any]:
    """Every number of a plan, not rounded."""
    plan, world, time = found.plan, found.world, found.plan.time
    shortest, longest = plan.range
    return {
        "recipe": plan.recipe.run.name,
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
        "fullest": plan.memory.fullest,
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
        "calibrated": time.calibrated,
        "cost": {**asdict(money.of(plan)), "price": money.price},
    }


def _mark() -> str:
    """What bars are made of on this terminal."""
    return "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"


def _several(name: str, text: str) -> list[int]:
    """Whole numbers with commas between them."""
    found = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(1 <= number <= MOST_PROCESSES for number in found):
        raise UserError(f"{name} {text}: must be whole numbers from 1 to {MOST_PROCESSES:,}; write as in 8 or 8,64,512")
    return found


def _whole(name: str, text: str) -> int:
    """A number of nodes."""
    value = int(text) if text.strip().isdecimal() else 0
    if not 1 <= value <= MOST_PROCESSES:
        raise UserError(f"{name} {text}: must be a whole number from 1 to {MOST_PROCESSES:,}")
    return value


def _tokens(text: str | None) -> int | None:
    """A number with a unit, such as "11T"; None for None."""
    if text is None:
        return None
    plain = text.strip().replace(",", "").replace("_", "").upper()
    number, unit = (plain[:-1], plain[-1]) if plain[-1:].isalpha() else (plain, "")
    value = _number(number) * MULTIPLES.get(unit, float("nan"))
    if not 1 <= value <= MOST_TOKENS:
        raise UserError(f"--tokens {text}: must be a number from 1 to 1,000,000T; write as in 500M, 1.5B or 11T")
    return round(value)


def _price(text: str | None) -> float | None:
    """What a GPU costs for an hour; None for None."""
    value = None if text is None else _number(text)
    if value is not None and not (isfinite(value) and value >= 0):
        raise UserError(f"--price {text}: must be a number, what one GPU costs for an hour; write as in 2.5")
    return value


def _number(text: str) -> float:
    """Not a number if it is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _picture(text: str) -> Path:
    """Where to draw."""
    path = Path(text).expanduser()
    if path.suffix.lower() not in PICTURES:
        raise UserError(f"--picture {text}: must end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    if not path.parent.is_dir():
        raise UserError(f"--picture {text}: there is no folder {path.parent}; make it first")
    return path
