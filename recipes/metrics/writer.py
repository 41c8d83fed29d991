"""Writes metrics to metrics.jsonl and to Weights & Biases."""

import json
import os
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from recipes.files.atomic import Lines, sync
from recipes.files.layout import FLOAT8_SHARES, LOG_FILE, METRICS, QUARANTINE


class MetricsWriter:
    """Writes rows to metrics.jsonl and, if requested, to Weights & Biases. On ranks other than 0 it does nothing."""

    def __init__(
        self,
        folder: Path,
        *,
        enabled: bool,
        wandb_project: str | None,
        run_name: str,
        recipe: dict[str, Any],
        before: Mapping[str, Any],
        log: Callable[[str], None] = print,
    ) -> None:
        """
        Args:
            folder: the run folder.
            enabled: whether this rank writes.
            wandb_project: the Weights & Biases project; None = do not use it.
            run_name: the run's name there.
            recipe: shown there as the run's configuration.
            before: what state() stored in the checkpoint that the run resumes from, if any.
            log: receives one line of text per message.
        """
        self._folder, self._log = folder, log
        self._lines = Lines(folder / METRICS, log=log)
        self._enabled = enabled
        self._wandb: Any = None
        if enabled and wandb_project is not None:
            self._wandb = _start_wandb(wandb_project, run_name, folder, recipe, run_id=before.get("wandb_id"))

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores, so that a resumed run continues the same run at Weights & Biases."""
        return {} if self._wandb is None else {"wandb_id": self._wandb.id}

    def write(self, row: dict[str, Any]) -> None:
        """Append one row. NaN and infinity, which JSON does not have, become null in the file."""
        if not self._enabled:
            return
        finite = {
            key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()
        }
        self._lines.append(json.dumps(finite, allow_nan=False))
        if self._wandb is not None:
            self._wandb.log({k: v for k, v in row.items() if k not in ("step", "documents")}, step=row["step"])

    def sync(self) -> None:
        """Flush to disk before a checkpoint: a power cut must not leave the checkpoint but lose the rows before it."""
        if not self._enabled:
            return
        try:
            sync(self._folder, (METRICS, FLOAT8_SHARES, QUARANTINE, LOG_FILE))
        except OSError as error:
            self._log(f"{self._folder} cannot be synced: {error.strerror}; a power cut would lose lines")

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(project: str, name: str, folder: Path, recipe: dict[str, Any], *, run_id: str | None) -> Any:
    # wandb reports its errors over the network, even offline; where packets are dropped, the end of a run waits for it.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    # Without a key, wandb would prompt for one on the terminal and block the run.
    offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False)
    return wandb.init(
        project=project,
        name=name,
        dir=folder,
        config=recipe,
        mode="offline" if offline else None,
        id=run_id,
        resume=None if run_id is None else "allow",
    )
