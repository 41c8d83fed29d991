"""Writes metrics to metrics.jsonl, and to trackers such as Weights & Biases."""

import json
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from recipes.files.atomic import Lines, sync, utc_now
from recipes.files.border import reason
from recipes.files.layout import LOG_FILE, METRICS, QUARANTINE
from recipes.files.screen import say
from recipes.metrics.config import TRACKERS, MetricsConfig


class Sink:
    """A tracker of which nothing ends a run: it is off after its first error, until the next start."""

    def __init__(self, opener: Callable[..., Any] | str, name: str, log: Callable[[str], None], **about: Any) -> None:
        """opener: or its "MODULE:FUNCTION". about: what it is called with, beside log."""
        self._name, self._log, self._tracker = name, log, None
        self._do(lambda: self._open(opener, about))

    def _open(self, opener: Callable[..., Any] | str, about: dict[str, Any]) -> None:
        opener = resolve_name(opener) if isinstance(opener, str) else opener
        self._name = getattr(opener, "title", self._name)
        self._tracker = opener(log=self._log, **about)

    @property
    def id(self) -> str | None:
        """By which the next start continues it."""
        return getattr(self._tracker, "id", None)

    def call(self, method: str, *arguments: Any) -> None:
        if self._tracker is not None:
            self._do(lambda: getattr(self._tracker, method)(*arguments))

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (Exception, SystemExit) as error:
            self._tracker = None
            self._log(f"{self._name}: off until the next start ({reason(error)}); metrics.jsonl has every row")


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
        openers: Mapping[str, Callable[..., Any] | str] = TRACKERS,
        log: Callable[[str], None] = say,
    ) -> None:
        """
        Args:
            folder: the run folder.
            config: where else rows are written.
            enabled: whether this rank writes.
            run_name, recipe: the run's name in trackers, and what they show as its configuration.
            openers: name of each tracker, as metrics.trackers has it -> what opens it.
            before: what state() stored in the checkpoint that the run resumes from, if any, and its "step".
            log: receives one line of text per message.
        """
        self._folder, self._log = folder, log
        self._lines = Lines(folder / METRICS, log=log)
        self._enabled = enabled
        self.stage = ""
        """The name of the run's present stage, for a column of every row; "" = there are no stages."""
        about = {"folder": folder, "config": config, "run_name": run_name, "recipe": recipe, "before": before}
        asked = dict.fromkeys([*(name for name in TRACKERS if getattr(config, name)), *config.trackers])
        self._sinks = {name: Sink(openers[name], name, log, **about) for name in asked if enabled}
        self._ids = {name: before[name] for name in before if name.endswith("_id")}
        self._ids |= {f"{name}_id": sink.id for name, sink in self._sinks.items() if sink.id is not None}

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores, so that a resumed run continues the same run at Weights & Biases."""
        return dict(self._ids)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row. NaN and infinity, which JSON does not have, become null in the file."""
        if not self._enabled:
            return
        stage = row.get("stage", self.stage)  # an evaluation beside the run is of an earlier one, perhaps
        row = row | {"time": utc_now()} | ({"stage": stage} if stage else {})
        finite = {
            key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()
        }
        self._lines.append(json.dumps(finite, allow_nan=False))
        for sink in self._sinks.values():
            sink.call("write", row)

    def sync(self) -> None:
        """Flush to disk before a checkpoint: a power cut must not leave the checkpoint but lose the rows before it."""
        if not self._enabled:
            return
        for sink in self._sinks.values():
            sink.call("flush")
        try:
            sync(self._folder, (METRICS, QUARANTINE, LOG_FILE))
        except OSError as error:
            self._log(f"{self._folder} cannot be synced: {error.strerror}; a power cut would lose lines")

    def close(self) -> None:
        """Finish what trackers still do; Weights & Biases takes less than a minute."""
        for sink in reversed(self._sinks.values()):
            sink.call("close")
