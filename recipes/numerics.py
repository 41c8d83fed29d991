"""float8.jsonl: which numbers float8 loses, in steps of the run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from parallel.casts import CastCounts
from parallel.config import Float8Config
from parallel.dist import World
from recipes.metrics import cut_back
from recipes.phases import LOG, Phases
from recipes.run_folder import FLOAT8_SHARES


class CastSampler:
    """Every `config.sample_every`-th step, one row for each cast of each converted linear.

    A sampled step takes a few passes more over every operand; the other steps run as without it.
    """

    def __init__(
        self, model: nn.Module, config: Float8Config, world: World, folder: Path, *, phases: Phases, done: int
    ) -> None:
        self._every, self._world, self._phases = config.sample_every, world, phases
        self._path = folder / FLOAT8_SHARES
        if self._every:
            self._counts = CastCounts(model, device=world.device)
            if world.is_main:
                cut_back(self._path, done)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Put it around every step, with its number, the first being 1."""
        if not self._every or number % self._every:
            yield
            return
        with self._counts.counting():
            yield
        with self._phases.apart(LOG):
            rows = self._counts.shares()
            if self._world.is_main:
                with self._path.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps({"step": number, **row}) + "\n" for row in rows)
