"""Ends a run that has come to a halt, and says which process holds up the others.

Each process has two threads beside the main one, which may be inside of C++ for ever. One tells the other processes,
through the launcher's store, where this one is, and listens to its neighbour. The other looks at how long ago anything
moved. Why not through files: a run that hangs in reading data often does so because the shared file system hangs, and
before the first step there is no folder yet.
"""

import faulthandler
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
from recipes.metrics.clock import LOADING, START, STEP, RunClock

HOUR = 3600.0
START_LIMIT = 6 * HOUR
"""Rank 0 may be tokenizing a corpus. As long as parallel.dist waits for it."""
SLOW_LIMIT = 1 * HOUR
"""Compilation in the first step, a validation's first batch, a save: all but the steps that follow."""
LAST_RESORT = 60.0
"""Seconds after which a process ends though it could not write down everything: the disk may be what hangs."""
ENDED = "ended"
ANSWERS = json.dumps({"answers": True}).strip("{}")
FOLDER = "hang"
"""In the run's folder: Python stacks of every process, and NCCL's flight recorder."""
ROOT = str(Path(__file__).resolve().parents[2]) + os.sep
SHOW_CURSOR = "\x1b[?25h\n"


@dataclass(frozen=True)
class Report:
    """Where a process is."""

    rank: int
    node: str = "unknown"
    phase: str = START
    step: int = 0
    """The one it is in, the first being 1."""
    idle: float = 0.0
    """Seconds since anything moved."""
    place: str = ""
    """The innermost line of ours that its main thread is at."""
    waits: bool = False
    """Whether that is in a collective, or another wait for other processes."""
    answers: bool = False
    """Whether it has said so when all were asked."""
    beat: int = 0
    """Another one each time."""

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.node}"

    @property
    def where(self) -> str:
        at = f", at {self.place}" if self.place else ""
        return f"phase {self.phase}{f' of step {self.step}' if self.phase != START else ''}{at}"


class Watchdog:
    """Watches over one process of a run, from its making until close()."""

    def __init__(self, clock: RunClock, world: World, *, timeout: float, folder: Path) -> None:
        """timeout: seconds; 0 = watch over nothing. folder: of the run; it need not be there."""
        self._clock, self._world, self._timeout, self._folder = clock, world, timeout, folder
        self._period = min(10.0, max(0.05, timeout / 20))
        self._closed = threading.Event()
        self._alarm = self._ending = False
        now = time.monotonic()
        self._awake_since = self._answered_at = self._heard_at = now
        self._main = threading.main_thread().ident
        self._count = 0
        if timeout:
            self._beats = Heartbeats(world)
            for work in (self._correspond, self._watch):
                threading.Thread(target=work, daemon=True, name=f"watchdog {work.__name__}").start()

    def close(self) -> None:
        """From now on this process may be silent."""
        self._closed.set()
        if self._timeout:
            with suppress(RuntimeError):
                gone = replace(self._report(), phase=ENDED, waits=True, answers=True)
                self._beats.post(json.dumps(asdict(gone)))

    def _correspond(self) -> None:
        """Tell where this process is, and hear whether the next one still does; each has one that listens to it."""
        neighbour, heard = (self._world.rank + 1) % self._world.size, None
        while not self._closed.wait(self._period):
            try:
                self._beats.post(json.dumps(asdict(self._report())))
                word = self._beats.of(neighbour)
                self._alarm = self._alarm or bool(self._beats.told("hung"))
            except RuntimeError:  # the store's; _answered_at tells of it
                continue
            self._answered_at = time.monotonic()
            if word != heard or ANSWERS in word:  # it may be silent then, having ended
                heard, self._heard_at = word, self._answered_at

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(self._period):
            now = time.monotonic()
            if now - last > self._timeout / 2:  # this process itself was stopped: Ctrl-Z, a debugger
                self._awake_since = now
            last = now
            if self._alarm or self._is_stuck(now):
                self._end()

    def _is_stuck(self, now: float) -> bool:
        def since(moment: float) -> float:
            return now - max(moment, self._awake_since)

        heard_of = max(since(self._heard_at), since(self._answered_at))
        return since(self._clock.moved_at) > self._limit() or heard_of > self._timeout

    def _limit(self) -> float:
        clock = self._clock
        if clock.now == START:
            return max(START_LIMIT, self._timeout)
        return self._timeout if clock.steady and clock.now in (STEP, LOADING) else max(SLOW_LIMIT, self._timeout)

    def _report(self) -> Report:
        place, waits = _look_at(self._main)
        self._count += 1
        return Report(
            self._world.rank,
            self._world.node_of(self._world.rank),
            self._clock.now,
            self._clock.step + 1,
            time.monotonic() - self._clock.moved_at,
            place,
            waits,
            self._ending,
            self._count,
        )

    # The end

    def _end(self) -> None:
        """Say where this process is, write down its stacks, hear the verdict and go."""
        timer = threading.Timer(LAST_RESORT, os._exit, [HUNG])
        timer.daemon = True
        timer.start()
        self._ending = True
        own = self._report()
        try:
            judges = self._beats.is_first("hung")
            self._beats.post(json.dumps(asdict(own)))
            self._write_stacks(own)
            if judges:
                self._beats.tell("verdict", self._judge())
            self._hear_verdict()
        except RuntimeError as error:
            store = f"the launcher of node 0 does not answer ({str(error).splitlines()[0]})"
            self._say(f"HUNG: {own.who} in {own.where}; {store}")
        finally:
            os._exit(HUNG)

    def _judge(self) -> str:
        """Wait until all have answered, or have had the time to; the rank to speak, and its words."""
        end = time.monotonic() + 2 * self._period + 2
        while True:
            reports = [replace(Report(rank), **json.loads(word or "{}")) for rank, word in enumerate(self._beats.all())]
            if all(report.answers for report in reports) or time.monotonic() > end:
                break
            time.sleep(self._period / 4)
        speaker = next(report.rank for report in reports if report.answers and report.phase != ENDED)
        return json.dumps([speaker, verdict(reports)])

    def _hear_verdict(self) -> None:
        """The lowest rank that is there speaks, the others wait until it has: the first to go has the rest ended."""
        end = time.monotonic() + LAST_RESORT / 2
        spoken = False
        while not spoken and time.monotonic() < end:
            if word := self._beats.told("verdict"):
                speaker, text = json.loads(word)
                if speaker == self._world.rank:
                    place = self._folder / FOLDER
                    self._say(f"{text}\n  Python stacks of every process: {place if place.exists() else 'above'}")
                    self._beats.tell(SPOKEN, "yes")
                spoken = bool(self._beats.told(SPOKEN))
            time.sleep(self._period / 4)

    def _say(self, text: str) -> None:
        """To standard error and to the run's log, whichever process writes that otherwise."""
        cursor = SHOW_CURSOR if sys.stdout.isatty() else ""  # the live line hides it
        os.write(2, f"{cursor}{text}\n".encode())
        if (self._folder / RECIPE).exists():
            with suppress(OSError), (self._folder / LOG_FILE).open("a", encoding="utf-8") as log:
                log.write(text + "\n")

    def _write_stacks(self, own: Report) -> None:
        """To the run's folder, or, where there is none yet, to standard error."""
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {own.who}, {own.where}, nothing moved for {own.idle:.0f} s\n"
        if not (self._folder / RECIPE).exists():
            os.write(2, head.encode())
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
    """Who holds up the others, as far as the reports of all processes, by rank, can tell."""
    longest = max(report.idle for report in reports)
    culprits, why = _culprits(reports)
    lines = [f"HUNG: no progress for {longest:.0f} s; {why}"]
    for report in culprits[:8]:
        # Where it was at its last beat, it need not be still.
        where = report.where if report.answers else f"last seen in {replace(report, place='').where}"
        lines.append(f"  {report.who}: {where}")
    if len(culprits) > 8:
        lines.append(f"  and {len(culprits) - 8} more")
    if others := [report for report in reports if report not in culprits]:
        first = others[0]
        lines.append(f"  {len(others)} of {len(reports)} processes wait for that, {first.who} in {first.where}")
    return "\n".join(lines)


def _culprits(reports: Sequence[Report]) -> tuple[list[Report], str]:
    """Those to name, and what they have in common."""
    if silent := [report for report in reports if not report.answers]:
        return silent, "does not answer, frozen or with its node gone:"
    busy = [report for report in reports if not report.waits]
    if busy and len(busy) < len(reports):
        return busy, "in work of its own, while others wait for it:"
    first = min(report.step for report in reports)
    behind = [report for report in reports if report.step == first]
    if len(behind) < len(reports):
        return behind, "steps behind the others:"
    places = Counter((report.phase, report.place) for report in reports)
    (_, most), *rest = places.most_common()
    if rest and rest[0][1] < most:
        rare = [report for report in reports if places[report.phase, report.place] < most]
        return rare, "waits in another place than most:"
    if rest:
        return list(reports), "the processes wait for each other in different places:"
    if len(reports) == 1:
        return list(reports), "the only process is stuck:"
    return [reports[0]], f"all {len(reports)} processes are in the same place, as rank 0 is (network, device?):"


def _look_at(thread: int | None) -> tuple[str, bool]:
    """The innermost line of ours that a thread is at, and whether it waits there for other processes."""
    frame = sys._current_frames().get(thread or 0)
    waits = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and "site-packages" not in file:
            file = file.removeprefix(ROOT)
            if file != "parallel/dist.py":
                return f"{file}:{frame.f_lineno} {frame.f_code.co_name}", waits
            waits = True
        waits = waits or "torch/distributed/" in file
        frame = frame.f_back
    return "", waits
