"""Ends a run that makes no progress, and names the process that the others wait for.

Two threads run beside the main one, which may be stuck in C++. One posts this process's state to the launcher's store
and reads its neighbour's; the other checks how long ago there was progress. The store and not files, because a shared
file system that hangs is a common reason for a hang, and before the first step there is no run folder.
"""

import faulthandler
import itertools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from parallel.dist import SPOKEN, Heartbeats, World, flight_record
from recipes.files.exit_codes import HUNG
from recipes.files.layout import LOG_FILE, RECIPE
from recipes.files.screen import tell
from recipes.metrics.clock import LOADING, START, STEP, RunClock

HOUR = 3600.0
START_LIMIT = 6 * HOUR
"""Rank 0 may be tokenizing a corpus. The same time as parallel.dist waits for it."""
SLOW_LIMIT = 1 * HOUR
"""For the first step, which compiles, for validation batches and for saves."""
LAST_RESORT = 60.0
"""Seconds after which a process exits even if it is still writing its stacks: the disk may be what hangs."""
ENDED = "ended"
ANSWERS = json.dumps({"answers": True}).strip("{}")
FOLDER = "hang"
"""In the run's folder: Python stacks of every process, and NCCL's flight recorder."""
ROOT = str(Path(__file__).resolve().parents[2]) + os.sep
SHOW_CURSOR = "\x1b[?25h\n"


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
    beat: int = 0
    """Counts reports, so that no two are equal."""

    @property
    def process(self) -> str:
        return f"rank {self.rank} on {self.node}"

    @property
    def where(self) -> str:
        at = f", at {self.place}" if self.place else ""
        return f"phase {self.phase}{f' of step {self.step}' if self.phase != START else ''}{at}"


class Watchdog:
    """Watches one process of a run, from construction until close()."""

    def __init__(self, clock: RunClock, world: World, *, timeout: float, folder: Path) -> None:
        """timeout: seconds without progress; 0 = off. folder: of the run; it need not exist."""
        self._clock, self._world, self._timeout, self._folder = clock, world, timeout, folder
        self._period = min(10.0, max(0.05, timeout / 20))
        self._closed = threading.Event()
        self._alarm = self._ending = False
        now = time.monotonic()
        self._awake_since = self._store_answered_at = self._neighbour_moved_at = now
        self._main = threading.main_thread().ident
        self._count = itertools.count(1)
        if timeout:
            self._beats = Heartbeats(world)
            for work in (self._exchange_reports, self._watch):
                threading.Thread(target=work, daemon=True, name=f"watchdog {work.__name__}").start()

    def close(self) -> None:
        """Stop watching: from now on this process may be silent."""
        self._closed.set()
        if self._timeout:
            with suppress(RuntimeError):
                gone = replace(self._report(), phase=ENDED, waits=True, answers=True)
                self._beats.post(json.dumps(asdict(gone)))

    def _exchange_reports(self) -> None:
        """Post this process's report, and read that of the next rank; so every process is watched by another."""
        neighbour, last = (self._world.rank + 1) % self._world.size, None
        while not self._closed.wait(self._period):
            try:
                self._beats.post(json.dumps(asdict(self._report())))
                report = self._beats.of(neighbour)
                self._alarm = self._alarm or bool(self._beats.told("hung"))
            except RuntimeError:  # of the store; _store_answered_at shows it
                continue
            self._store_answered_at = time.monotonic()
            if report != last or ANSWERS in report:  # after its answer it may have ended, and be silent
                last, self._neighbour_moved_at = report, self._store_answered_at

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(self._period):
            now = time.monotonic()
            if now - last > self._timeout / 2:  # this process itself was stopped, by Ctrl-Z or a debugger
                self._awake_since = now
            last = now
            if self._alarm or self._is_stuck(now):
                self._end()

    def _is_stuck(self, now: float) -> bool:
        def since(moment: float) -> float:
            return now - max(moment, self._awake_since)

        silent = max(since(self._neighbour_moved_at), since(self._store_answered_at))
        return since(self._clock.moved_at) > self._limit() or silent > self._timeout

    def _limit(self) -> float:
        clock = self._clock
        if clock.now == START:
            return max(START_LIMIT, self._timeout)
        return self._timeout if clock.steady and clock.now in (STEP, LOADING) else max(SLOW_LIMIT, self._timeout)

    def _report(self) -> Report:
        place, waits = _place_of(self._main)
        return Report(
            self._world.rank,
            self._world.node_of(self._world.rank),
            self._clock.now,
            self._clock.step + 1,
            time.monotonic() - self._clock.moved_at,
            place,
            waits,
            self._ending,
            next(self._count),
        )

    def _end(self) -> None:
        timer = threading.Timer(LAST_RESORT, os._exit, [HUNG])
        timer.daemon = True
        timer.start()
        self._ending = True
        own = self._report()
        try:
            is_judge = self._beats.is_first("hung")
            self._beats.post(json.dumps(asdict(own)))
            self._write_stacks(own)
            if is_judge:
                self._beats.tell("verdict", self._judge())
            self._wait_for_verdict()
        except RuntimeError as error:
            store = f"the launcher of node 0 does not answer ({str(error).splitlines()[0]})"
            self._print(f"HUNG: {own.process} in {own.where}; {store}")
        finally:
            os._exit(HUNG)

    def _judge(self) -> str:
        """Wait for all answers, at most 2 s and two periods. Returns the rank to print the verdict, and its text."""
        end = time.monotonic() + 2 * self._period + 2
        while True:
            ranks = range(self._world.size)
            reports = [replace(Report(rank), **json.loads(self._beats.of(rank) or "{}")) for rank in ranks]
            if all(report.answers for report in reports) or time.monotonic() > end:
                break
            time.sleep(self._period / 4)
        speaker = next(report.rank for report in reports if report.answers and report.phase != ENDED)
        return json.dumps([speaker, verdict(reports)])

    def _wait_for_verdict(self) -> None:
        """Print it on the chosen rank, else wait until it is printed: the first process to exit ends the rest."""
        end = time.monotonic() + LAST_RESORT / 2
        spoken = False
        while not spoken and time.monotonic() < end:
            if verdict := self._beats.told("verdict"):
                speaker, text = json.loads(verdict)
                if speaker == self._world.rank:
                    place = self._folder / FOLDER
                    self._print(f"{text}\n  Python stacks of every process: {place if place.exists() else 'above'}")
                    self._beats.tell(SPOKEN, "yes")
                spoken = bool(self._beats.told(SPOKEN))
            time.sleep(self._period / 4)

    def _print(self, text: str) -> None:
        cursor = SHOW_CURSOR if sys.stdout.isatty() else ""  # the progress line hides it
        tell(f"{cursor}{text}")
        if (self._folder / RECIPE).exists():
            with suppress(OSError), (self._folder / LOG_FILE).open("a", encoding="utf-8") as log:
                log.write(text + "\n")

    def _write_stacks(self, own: Report) -> None:
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {own.process}, {own.where}, no progress for {own.idle:.0f} s\n"
        if not (self._folder / RECIPE).exists():
            tell(head.rstrip())
            faulthandler.dump_traceback(2)
            return
        with suppress(OSError, RuntimeError):
            place = self._folder / FOLDER
            place.mkdir(exist_ok=True)
            with (place / f"rank-{own.rank}.txt").open("a", encoding="utf-8") as file:
                file.write(head)
                file.flush()
                faulthandler.dump_traceback(file)
                file.write("\n")
            if self._world.device.type == "cuda":
                (place / f"nccl-{own.rank}").write_bytes(flight_record())


def verdict(reports: Sequence[Report]) -> str:
    """Which processes hold up the others, judged by the reports of all processes in the order of ranks."""
    longest = max(report.idle for report in reports)
    culprits, why = _culprits(reports)
    lines = [f"HUNG: no progress for {longest:.0f} s; {why}"]
    for report in culprits[:8]:
        # A process that does not answer may have moved since its last report.
        where = report.where if report.answers else f"last seen in {replace(report, place='').where}"
        lines.append(f"  {report.process}: {where}")
    if len(culprits) > 8:
        lines.append(f"  and {len(culprits) - 8} more")
    if others := [report for report in reports if report not in culprits]:
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


def _place_of(thread: int | None) -> tuple[str, bool]:
    """The innermost line of our code that a thread is at, and whether it waits there for other processes."""
    frame = sys._current_frames().get(thread or 0)
    waits = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and "site-packages" not in file:
            file = file.removeprefix(ROOT)
            if file != "parallel/dist.py":
                return f"{file}:{frame.f_lineno} {frame.f_code.co_name}", waits
            waits = True
        # Code that torch.compile has generated calls collectives by this name, past the functions of torch.distributed.
        waits = waits or "torch/distributed/" in file or "_c10d_functional" in frame.f_code.co_names
        frame = frame.f_back
    return "", waits
