"""What a process reports of itself, and who holds a run up by the reports of all."""

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.files.atomic import Lines, utc_now
from recipes.files.end import write_end
from recipes.files.layout import LOG_FILE, RECIPE
from recipes.files.screen import safe
from recipes.metrics.clock import START, RunClock

LAST_RESORT = 60.0
"""Seconds after which a process exits even if it is still writing its stacks: the disk may be what hangs."""
WRITE_SECONDS = 4.0
LOOK_SECONDS = 1.0
"""How often a process looks at its node's board, at least."""
LEFT = "ended"
ROOT = str(Path(__file__).resolve().parents[2]) + os.sep
STACKS = "(stacks)"
"""Stands for the line that says where they are."""
WAITING = ("parallel/dist.py", "parallel/messages.py", "recipes/training/interruption.py")
"""Files in which a process waits for others."""


@dataclass(frozen=True)
class Report:
    """The state of one process."""

    rank: int
    node: str = "unknown"
    phase: str = START
    step: int = 0
    """The current step, counted from 1."""
    idle: float = 0.0
    """Seconds since the last progress."""
    place: str = ""
    """The innermost line of our code that its main thread is at."""
    waits: bool = False
    """Whether the main thread waits for other processes there, in a collective for example."""
    answers: bool = False
    """Whether it has responded to the alarm."""
    part: str = ""
    """Which part of a pipeline it has."""
    beat: int = 0
    """Counts reports, so that no two are equal."""

    @property
    def process(self) -> str:
        return f"rank {self.rank} on {self.node}{self.part}"

    @property
    def where(self) -> str:
        at = f", at {self.place}" if self.place else ""
        return f"phase {self.phase}{f' of step {self.step}' if self.phase != START else ''}{at}"


def after(seconds: float, work: Callable[[], None]) -> threading.Timer:
    """Do this later, unless the process has ended or the timer is cancelled."""
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()
    return timer


def for_a_while(work: Callable[[], None]) -> None:
    """Do this work, which writes to a file system that may hang; after some seconds, go on without it."""
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(WRITE_SECONDS)


def add_failure(folder: Path, text: str, clock: RunClock, *, rank: int, code: int, error: str = "") -> None:
    """Append to the log.txt of a run that has begun, if its disk answers, and note what killed the run: this process,
    which exits with the code; not at the start, when the folder may be another's. error: "" = the text."""

    def append() -> None:
        with suppress(OSError):
            if (folder / RECIPE).is_file():
                _ = clock.now != START and write_end(folder, rank, code, error or text)
                Lines(folder / LOG_FILE, log=lambda line: None).append(f"{utc_now()} {safe(text)}")

    for_a_while(append)


def verdict(reports: Sequence[Report]) -> str:
    """Names the processes that hold up the others, judged by the reports of all processes in the order of ranks."""
    longest = max(report.idle for report in reports)
    culprits, why = _culprits(reports)
    lines = [f"HUNG: no progress for {longest:.0f} s; {why}"]
    for report in culprits[:8]:
        # A process that does not answer may have moved since its last report.
        where = report.where if report.answers else f"last seen in {replace(report, place='').where}"
        lines.append(f"  {report.process}: {where}")
    if len(culprits) > 8:
        lines.append(f"  and {len(culprits) - 8} more")
    blamed = {report.rank for report in culprits}
    if others := [report for report in reports if report.rank not in blamed]:
        first = others[0]
        lines.append(f"  {len(others)} of {len(reports)} processes wait for it, {first.process} in {first.where}")
    return "\n".join(lines)


def _culprits(reports: Sequence[Report]) -> tuple[list[Report], str]:
    """The processes to name, and what they have in common."""
    if silent := [report for report in reports if not report.answers]:
        return silent, "does not answer; the process is frozen or its node is gone:"
    busy = [report for report in reports if not report.waits]
    if busy and len(busy) < len(reports):
        return busy, "busy on its own while others wait for it:"
    first = min(report.step for report in reports)
    behind = [report for report in reports if report.step == first]
    if len(behind) < len(reports):
        return behind, "behind the others by one step or more:"
    places = Counter((report.phase, report.place) for report in reports)
    (_, most), *rest = places.most_common()
    if rest and rest[0][1] < most:
        rare = [report for report in reports if places[report.phase, report.place] < most]
        return rare, "waits in a different place than most:"
    if rest:
        return list(reports), "the processes wait for each other in different places:"
    if len(reports) == 1:
        return list(reports), "the only process is stuck:"
    return [reports[0]], f"all {len(reports)} processes are in the same place, as rank 0 is (network, device?):"


def place_of(thread: int | None) -> tuple[str, bool]:
    """The innermost line of our code that a thread is at, and whether it waits there for other processes."""
    frame = sys._current_frames().get(thread or 0)
    waits = computes = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and "site-packages" not in file:
            file = file.removeprefix(ROOT)
            if file not in WAITING:
                return f"{file}:{frame.f_lineno} {frame.f_code.co_name}", waits and not computes
            waits = True
        # A schedule of pipeline stages, which is in torch.distributed, too, computes a backward pass there.
        computes = computes or (not waits and file.endswith("torch/distributed/pipelining/_backward.py"))
        # Code that torch.compile has generated calls collectives by this name, past the functions of torch.distributed.
        waits = waits or "torch/distributed/" in file or "_c10d_functional" in frame.f_code.co_names
        frame = frame.f_back
    return "", waits
