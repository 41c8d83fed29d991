"""The options of `train.py RECIPE --plan`. Imports no torch."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from parallel.errors import UserError
from recipes.files.reading import user_path
from recipes.lab.plan.screen import Money
from recipes.plan.hardware import GPUS
from recipes.plan.routing import ALL_TO_ALL

USAGE = f"""\
usage: train.py RECIPE [--section.field value ...] --plan [option ...]

  --processes N          for N GPUs; N,N,... compares several numbers
  --nodes M              on M nodes
  --gpu NAME             one of {", ".join(GPUS)}
  --tokens 11T           time and cost of so many tokens, not of run.steps
  --price 2.5            of one GPU for an hour, in any currency
  --ladder FILE          the loss that small runs predict (docs/plan.md)
  --calibrated-by FILE   what was measured on such GPUs (docs/plan.md)
  --assume WORD,WORD     of all-to-all of experts: {", ".join(ALL_TO_ALL)}
  --search               look for the fastest recipe that fits
  --search --numerics    among those that round differently, too
  --search --write FILE  write that recipe
  --json                 print numbers for scripts

docs/plan.md explains every number."""
MULTIPLES = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
MOST_PROCESSES = 2**20
MOST_TOKENS = 1e18


@dataclass
class Options(Namespace):
    """The options as read; None and empty: not given."""

    processes: tuple[int, ...] = ()
    nodes: int | None = None
    gpu: str | None = None
    tokens: int | None = None
    price: float | None = None
    money: Money = field(default_factory=Money)
    """Of tokens and price."""
    ladder: str | None = None
    calibrated_by: Path | None = None
    assume: frozenset[str] = frozenset()
    search: bool = False
    numerics: bool = False
    write: Path | None = None
    json: bool = False


class Parser(ArgumentParser):
    """A parser whose errors are UserErrors of one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; python train.py --plan --help lists the options")


def read_options(arguments: Sequence[str]) -> tuple[Options | None, list[str]]:
    """The options, None if help is asked for, and the other arguments. Raises UserError for what cannot be read."""
    parser = Parser(add_help=False, allow_abbrev=False)
    for switch in ("--plan", "--check", "--json", "--search", "--numerics"):
        parser.add_argument(switch, action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    values: dict[str, Callable[[str], Any]] = {
        **{"--processes": _several, "--nodes": _whole, "--tokens": _tokens, "--price": _price},
        **{"--write": _new, "--gpu": str, "--ladder": str, "--calibrated-by": user_path},
        "--assume": _assumed,
    }
    for name, value in values.items():
        parser.add_argument(name, type=value)
    given, others = parser.parse_known_args(list(arguments), Options())
    if given.help:
        return None, others
    several = len(given.processes) > 1
    if given.check:
        raise UserError("--check and --plan: write one of them")
    if given.nodes is not None and several:
        raise UserError("--nodes: goes with one number of processes; without it, nodes are full")
    for name in ("search", "ladder"):
        if getattr(given, name) and several:
            raise UserError(f"--{name}: goes with one number of processes; write as in --processes 64")
    for name in ("numerics", "write"):
        if getattr(given, name) and not given.search:
            raise UserError(f"--{name}: needs --search")
    given.money = Money(given.tokens, given.price)
    return given, others


def _several(text: str) -> tuple[int, ...]:
    """Whole numbers of processes with commas between them."""
    numbers = tuple(int(word) if word.strip().isdecimal() else 0 for word in text.split(","))
    if not all(1 <= number <= MOST_PROCESSES for number in numbers):
        limits = f"whole numbers from 1 to {MOST_PROCESSES:,}"
        raise UserError(f"--processes {text}: must be {limits}; write as in 8 or 8,64,512")
    return numbers


def _assumed(text: str) -> frozenset[str]:
    """Words about all-to-all with commas between them."""
    words = frozenset(word.strip() for word in text.split(","))
    if not words <= {*ALL_TO_ALL}:
        raise UserError(f"--assume {text}: must be {' or '.join(ALL_TO_ALL)}; write as in {','.join(ALL_TO_ALL)}")
    return words


def _whole(text: str) -> int:
    value = int(text) if text.strip().isdecimal() else 0
    if not 1 <= value <= MOST_PROCESSES:
        raise UserError(f"--nodes {text}: must be a whole number from 1 to {MOST_PROCESSES:,}")
    return value


def _tokens(text: str) -> int:
    """A number with a unit, such as "11T"."""
    return round(amount("--tokens", text, least=1.0))


def amount(name: str, text: str, *, least: float = 1e-3) -> float:
    """The number of an option, which may have a unit, as in "11T"."""
    plain = text.strip().replace(",", "").replace("_", "").upper()
    number, unit = (plain[:-1], plain[-1]) if plain[-1:].isalpha() else (plain, "")
    value = _number(number) * MULTIPLES.get(unit, float("nan"))
    if not least <= value <= MOST_TOKENS:
        raise UserError(f"{name} {text}: must be a number from {least:g} to 1,000,000T; write as in 500M, 1.5B or 11T")
    return value


def _price(text: str) -> float:
    """What a GPU costs for an hour."""
    value = _number(text)
    if not (isfinite(value) and value >= 0):
        raise UserError(f"--price {text}: must be a number, what one GPU costs for an hour; write as in 2.5")
    return value


def _number(text: str) -> float:
    """The number in the text; NaN if there is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _new(text: str) -> Path:
    """The path to write a recipe to."""
    path = user_path(text)
    if not path.parent.is_dir():
        raise UserError(f"--write {text}: there is no folder {path.parent}; make it first")
    if path.suffix != ".toml":
        raise UserError(f"--write {text}: must end in .toml")
    if path.exists():
        raise UserError(f"--write {text}: exists; write another name, or remove it")
    return path
