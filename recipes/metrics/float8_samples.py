"""float8.jsonl: which numbers float8 loses, in steps of the run."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from parallel.config import Float8Config
from parallel.dist import World
from parallel.float8_casts import CastCounts
from recipes.files.atomic import Lines
from recipes.files.layout import FLOAT8_SHARES
from recipes.metrics.clock import LOG, RunClock


class CastSampler:
    """Every `config.sample_every`-th step, one row for each cast of each converted linear.

    A sampled step takes a few passes more over every operand; the other steps run as without it.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Float8Config,
        world: World,
        folder: Path,
        *,
        clock: RunClock,
        log: Callable[[str], None],
    ) -> None:
        """folder: of the run. log: where lines for people go."""
        self._every, self._world, self._clock = config.sample_every, world, clock
        self._lines = Lines(folder / FLOAT8_SHARES, log=log)
        if self._every:
            self._counts = CastCounts(model, device=world.device)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Put it around every step, with its number, the first being 1."""
        if not self._every or number % self._every:
            yield
            return
        with self._counts.counting():
            yield
        with self._clock.synchronized(LOG):
            rows = self._counts.shares()
            if self._world.is_main:
                self._lines.append(*(json.dumps({"step": number, **row}) for row in rows))
