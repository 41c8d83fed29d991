"""Sends rows to Weights & Biases from a thread of its own, so that nothing that happens there delays or ends a run; and
writes rows for TensorBoard, below `tensorboard` in the run folder.

Imports no torch.
"""

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from recipes.files.border import reason
from recipes.files.layout import TENSORBOARD
from recipes.files.screen import join_aloud
from recipes.metrics.config import MetricsConfig

STARTS = 4
"""How often it is started: wandb-core may be killed, or run out of memory, again and again."""
RECENT = 100
"""How many rows the next start sends again."""
END_SECONDS = 45.0
"""How long the end of a run waits at most. A start without an answer takes about 30 s, and is then offline."""
LIMITS = {"WANDB_INIT_TIMEOUT": "15", "WANDB_FINISH_TIMEOUT": "20", "WANDB_FINISH_TIMEOUT_RAISES": "true"}
"""wandb would wait 90 s for a start, and at the end of a run for ever. A user's own values win."""
KEPT = "metrics.jsonl has every row"
FLUSH_SECONDS = 30
"""Seconds after which rows that TensorBoard has taken are on the disk; before a checkpoint, at once."""


class Tracker:
    """One run at Weights & Biases. Without a server or a valid key, wandb keeps it in a folder for `wandb sync`."""

    title = "Weights & Biases"

    def __init__(
        self,
        folder: Path,
        *,
        config: MetricsConfig,
        run_name: str,
        recipe: Mapping[str, Any],
        before: Mapping[str, Any],
        log: Callable[[str], None],
    ) -> None:
        """Arguments: see MetricsWriter. log: called by write() and close() only, never by the thread."""
        self.id: str = before.get("wandb_id") or secrets.token_hex(4)
        self._options: dict[str, Any] = {
            "project": config.wandb_project,
            "name": run_name,
            "dir": folder,
            "config": recipe,
        }
        self._folder, self._log = folder / "wandb", log
        self._resumes, self._offline = bool(before.get("wandb_id")), False
        self._rows: SimpleQueue[dict[str, Any]] = SimpleQueue()  # the last one is empty
        # wandb-core writes to its disk only now and then, and its connection accepts rows for a while after its death.
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._ended = False
        self._notes: SimpleQueue[str] = SimpleQueue()
        self._thread: Thread | None = None
        # wandb reports its errors over the network, even offline; where packets are dropped, the end waits for it.
        for variable, value in {"WANDB_ERROR_REPORTING": "false", **LIMITS}.items():
            os.environ.setdefault(variable, value)
        # Of the whole process: on a full disk, every line that wandb cannot log would be a traceback on the screen.
        logging.raiseExceptions = False
        try:
            import wandb  # noqa: F401  # not in the thread: half-done imports of two threads can meet
        except (Exception, SystemExit) as error:
            self._note(f"off, because wandb cannot be imported ({reason(error)}); {KEPT}")
            return
        self._thread = Thread(target=self._work, daemon=True, name="Weights & Biases")
        self._thread.start()

    def write(self, row: dict[str, Any]) -> None:
        """Send one row, some time."""
        self._rows.put(row)
        self._show_notes()

    def flush(self) -> None:
        """Wait for nothing: the thread sends what there is."""

    def close(self) -> None:
        """Wait for what is still to send, but not for long."""
        self._rows.put({})
        what = "Weights & Biases to take the last rows"
        if self._thread and not join_aloud(self._thread, END_SECONDS, what=what, say=self._log):
            self._note(f"no answer within {END_SECONDS:.0f} s, the end does not wait longer; {self._later('*')}")
        self._show_notes()

    def _note(self, text: str) -> None:
        self._notes.put(f"Weights & Biases: {text}")

    def _show_notes(self) -> None:
        with suppress(Empty):
            while True:
                self._log(self._notes.get_nowait())

    def _later(self, folders: str) -> str:
        return f"`wandb sync {self._folder / folders}` sends it later, and {KEPT}"

    def _work(self) -> None:
        for attempt in range(STARTS):
            try:
                return self._send()
            except (Exception, SystemExit) as error:  # of wandb, or of the connection to its wandb-core
                then = "tracking starts again" if attempt + 1 < STARTS else "tracking is off"
                self._note(f"stopped ({reason(error)}); {then}, and {KEPT}")
                _forget()

    def _send(self) -> None:
        """Start the run there and send rows to it until the last one."""
        run = self._start()
        self._resumes = True
        received = run.step
        for row in self._unsent():
            if row["step"] >= received:
                columns = {key: value for key, value in row.items() if key not in ("step", "time", "documents")}
                run.log(columns, step=row["step"])
        try:
            run.finish()
        except TimeoutError:
            self._note(f"not everything was received in time; {self._later(Path(run.dir).parent.name)}")

    def _unsent(self) -> Iterator[dict[str, Any]]:
        """The rows until the last one; first those that may be lost with an earlier connection."""
        yield from tuple(self._recent)
        while not self._ended:
            row = self._rows.get()
            self._ended = not row
            if row:
                self._recent.append(row)
                yield row

    def _start(self) -> Any:
        import wandb

        options = self._options | {"id": self.id, "resume": "allow" if self._resumes else None}
        if not self._offline:
            try:
                # Without a key, wandb would prompt for one on the terminal and block.
                offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False)
                return wandb.init(**options, mode="offline" if offline else None)
            except (Exception, SystemExit) as error:
                self._offline = True
                self._note(f"offline, because it cannot start ({reason(error)}); {self._later('offline-run-*')}")
                _forget()
        return wandb.init(**options, mode="offline")


def _forget() -> None:
    """Stop wandb-core, if it is still there, so that the next start gets a new one."""
    import wandb

    with suppress(Exception):
        wandb.teardown()


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
        self._writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=done + 1, flush_secs=FLUSH_SECONDS)
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
