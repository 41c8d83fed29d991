"""Writes metrics to metrics.jsonl, to Weights & Biases and for TensorBoard."""

import json
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.files.atomic import Lines, sync, utc_now
from recipes.files.layout import FLOAT8_SHARES, LOG_FILE, METRICS, QUARANTINE
from recipes.files.screen import say
from recipes.metrics.config import MetricsConfig

if TYPE_CHECKING:
    from recipes.metrics.board import TensorBoard
    from recipes.metrics.tracking import Tracker


class MetricsWriter:
    """Writes rows to metrics.jsonl, and where else they are wanted. On ranks other than 0 it does nothing."""

    def __init__(
        self,
        folder: Path,
        config: MetricsConfig,
        *,
        enabled: bool,
        run_name: str,
        recipe: dict[str, Any],
        before: Mapping[str, Any],
        log: Callable[[str], None] = say,
    ) -> None:
        """
        Args:
            folder: the run folder.
            config: where else rows are written.
            enabled: whether this rank writes.
            run_name: the run's name at Weights & Biases.
            recipe: shown there as the run's configuration.
            before: what state() stored in the checkpoint that the run resumes from, if any, and its "step".
            log: receives one line of text per message.
        """
        self._folder, self._log = folder, log
        self._lines = Lines(folder / METRICS, log=log)
        self._enabled = enabled
        self.stage = ""
        """The name of the run's present stage, for a column of every row; "" = there are no stages."""
        self._wandb_id: str | None = before.get("wandb_id")
        self._sinks: list[Tracker | TensorBoard] = []  # nothing that happens there ends a run
        if enabled and config.wandb:
            from recipes.metrics import tracking

            tracker = tracking.Tracker(
                folder, project=config.wandb_project, name=run_name, recipe=recipe, run_id=self._wandb_id, log=log
            )
            self._wandb_id = tracker.id
            self._sinks.append(tracker)
        if enabled and config.tensorboard:
            from recipes.metrics import board

            self._sinks.append(board.TensorBoard(folder, done=before.get("step", 0), recipe=recipe, log=log))

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores, so that a resumed run continues the same run at Weights & Biases."""
        return {} if self._wandb_id is None else {"wandb_id": self._wandb_id}

    def write(self, row: dict[str, Any]) -> None:
        """Append one row. NaN and infinity, which JSON does not have, become null in the file."""
        if not self._enabled:
            return
        row = row | {"time": utc_now()} | ({"stage": self.stage} if self.stage else {})
        finite = {
            key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()
        }
        self._lines.append(json.dumps(finite, allow_nan=False))
        for sink in self._sinks:
            sink.write(row)

    def sync(self) -> None:
        """Flush to disk before a checkpoint: a power cut must not leave the checkpoint but lose the rows before it."""
        if not self._enabled:
            return
        for sink in self._sinks:
            sink.flush()
        try:
            sync(self._folder, (METRICS, FLOAT8_SHARES, QUARANTINE, LOG_FILE))
        except OSError as error:
            self._log(f"{self._folder} cannot be synced: {error.strerror}; a power cut would lose lines")

    def close(self) -> None:
        """Finish sending to Weights & Biases, which takes less than a minute, and writing for TensorBoard."""
        for sink in reversed(self._sinks):
            sink.close()
