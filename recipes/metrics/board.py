"""Writes rows for TensorBoard, below `tensorboard` in the run folder. Nothing that happens there ends a run.

Imports no torch.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from recipes.files.border import reason
from recipes.files.layout import TENSORBOARD

SECONDS = 30
"""Seconds after which rows that TensorBoard has taken are on the disk; before a checkpoint, at once."""


class TensorBoard:
    """One run's numbers by step, of all its starts."""

    def __init__(self, folder: Path, *, done: int, recipe: Mapping[str, Any], log: Callable[[str], None]) -> None:
        """done: completed steps; what earlier starts wrote about later ones is not shown any more. recipe: shown as
        text. Other arguments: see MetricsWriter."""
        self._log, self._off = log, False

        def begin() -> None:
            from torch.utils.tensorboard.writer import SummaryWriter

            before = threading.excepthook  # its thread raises what the next call raises again
            threading.excepthook = lambda about: (
                None if type(about.thread).__module__.startswith("tensorboard.") else before(about)
            )
            self._writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=done + 1, flush_secs=SECONDS)
            self._writer.add_text("recipe", _text(recipe), done)

        self._unless_off(begin)

    def write(self, row: Mapping[str, Any]) -> None:
        """Add the numbers of one row."""

        def add() -> None:
            for name, value in scalars(row):
                self._writer.add_scalar(name, value, row["step"])

        self._unless_off(add)

    def flush(self) -> None:
        """Hand all rows to the file."""
        self._unless_off(lambda: self._writer.flush())

    def close(self) -> None:
        """Finish writing."""
        self._unless_off(lambda: self._writer.close())
        self._off = True

    def _unless_off(self, work: Callable[[], object]) -> None:
        if self._off:
            return
        try:
            work()
        except (Exception, SystemExit) as error:  # often met by the writer's thread and raised by its next call
            self._off = True
            self._log(f"TensorBoard: off until the next start ({reason(error)}); metrics.jsonl has every row")


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The finite numbers of a row; those of an object as in "wall_seconds/save"."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from scalars({f"{name}/{part}": number for part, number in value.items()})
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step" and isfinite(value):
            yield name, value


def _text(recipe: Mapping[str, Any]) -> str:
    """Markdown, in which lines that begin with four spaces stay as they are."""
    lines = []
    for section, fields in recipe.items():
        if isinstance(fields, dict):
            lines += [f"    [{section}]", *(f"    {name} = {value!r}" for name, value in fields.items()), "    "]
        elif fields:
            lines += [f"    {section} = {fields!r}", "    "]
    return "\n".join(lines)
