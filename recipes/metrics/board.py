"""Writes rows for TensorBoard, below `tensorboard` in the run folder.

Imports no torch.
"""

import threading
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from recipes.files.layout import TENSORBOARD

SECONDS = 30
"""Seconds after which rows that TensorBoard has taken are on the disk; before a checkpoint, at once."""


class TensorBoard:
    """One run's numbers by step, of all its starts."""

    title = "TensorBoard"

    def __init__(self, folder: Path, *, recipe: Mapping[str, Any], before: Mapping[str, Any], **_: Any) -> None:
        """Arguments: see MetricsWriter. What earlier starts wrote about steps to come is not shown any more."""
        from torch.utils.tensorboard.writer import SummaryWriter

        hook, done = threading.excepthook, before.get("step", 0)  # its thread raises what the next call raises again
        threading.excepthook = lambda about: (
            None if type(about.thread).__module__.startswith("tensorboard.") else hook(about)
        )
        self._writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=done + 1, flush_secs=SECONDS)
        self._writer.add_text("recipe", _text(recipe), done)

    def write(self, row: Mapping[str, Any]) -> None:
        """Add the numbers of one row."""
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row["step"])

    def flush(self) -> None:
        """Hand all rows to the file."""
        self._writer.flush()

    def close(self) -> None:
        """Finish writing."""
        self._writer.close()


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
