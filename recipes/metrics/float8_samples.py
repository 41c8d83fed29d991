"""Writes float8.jsonl: the shares of values that float8 loses in sampled steps."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from parallel.config import Float8Config
from parallel.dist import World
from parallel.float8_casts import CastCounts
from parallel.mesh import Mesh
from recipes.files.atomic import Lines
from recipes.files.layout import FLOAT8_SHARES
from recipes.metrics.clock import LOG, RunClock


class CastSampler:
    """Writes one row for each cast of each converted linear, every `config.sample_every` steps.

    A sampled step makes a few more passes over every operand; the other steps are unaffected.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Float8Config,
        world: World,
        folder: Path,
        *,
        mesh: Mesh,
        clock: RunClock,
        log: Callable[[str], None],
    ) -> None:
        """
        Args:
            model: the parallelized model.
            config: sample_every is read.
            world: of the run; rank 0 writes.
            folder: the run folder.
            clock: of the run; writing counts as logging.
            log: receives one line of text per message.
        """
        self._every, self._world, self._clock = config.sample_every, world, clock
        self._lines = Lines(folder / FLOAT8_SHARES, log=log)
        self._counts = CastCounts(model, mesh=mesh, device=world.device)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context manager to wrap every step in; the first step has number 1."""
        if number % self._every:
            yield
            return
        with self._counts.counting():
            yield
        with self._clock.synchronized(LOG):
            rows = self._counts.shares()
            if self._world.is_main:
                self._lines.append(*(json.dumps({"step": number, **row}) for row in rows))
