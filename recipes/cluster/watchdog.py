"""Ends a run that makes no progress, and names the process that the others wait for.

A thread runs beside the main one, which may be stuck in C++. It posts this process's state on its node's board, and
checks how long ago there was progress here and a sign of life from the others (others.py). Memory and the launcher's
store and not files, because a shared file system that hangs is a common reason for a hang, and before the first step
there is no run folder.
"""

import faulthandler
import itertools
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from parallel.dist import World, flight_record
from recipes.cluster.reports import (
    LAST_RESORT,
    LEFT,
    LOOK_SECONDS,
    STACKS,
    Report,
    add_failure,
    after,
    for_a_while,
    place_of,
    verdict,
)
from recipes.files.atomic import utc_now
from recipes.files.exit_codes import HUNG
from recipes.files.layout import RECIPE
from recipes.files.screen import SHOW_CURSOR, put, tell
from recipes.metrics.clock import LOADING, START, STEP, RunClock

if TYPE_CHECKING:
    from recipes.cluster.others import Others

HOUR = 3600.0
START_LIMIT = 6 * HOUR
"""Rank 0 may be tokenizing a corpus. The same time as parallel.dist waits for it."""
SLOW_LIMIT = 1 * HOUR
"""Shortest limit, in seconds, for the first step, which compiles, for validation batches and for saves."""
MEETING_SECONDS = 120.0
"""How long processes that have joined may take, at least, until all of them watch each other."""
FOLDER = "hang"
"""Folder in the run's folder: Python stacks of every process, and NCCL's flight recorder."""


class Watchdog:
    """Watches one process of a run, from construction until close()."""

    def __init__(self, clock: RunClock, world: World, *, timeout: float, folder: Path) -> None:
        """timeout: seconds without progress; 0 = off. folder: that of the run; it need not exist."""
        self._clock, self._world, self._timeout, self._folder = clock, world, timeout, folder
        self._period = min(10.0, max(0.05, timeout / 20))  # seconds between two reports
        self._closed = threading.Event()
        self._ending = False
        self._stacks: Path | None = None
        self._awake_since = time.monotonic()
        self._main = threading.main_thread().ident
        self._count = itertools.count(1)
        self._others: Others | None = None
        if world.size > 1:
            self._others = self._meet_others()
        if timeout:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def _meet_others(self) -> "Others | None":
        """The other processes; None if nobody watches, or if their recipes differ, which pre-flight then refuses."""
        seconds = max(self._timeout, MEETING_SECONDS)
        guard = after(seconds, lambda: self._miss_others(seconds)) if self._timeout else None
        try:
            from recipes.cluster import others  # now: at a hang, the file system may be what hangs

            timeouts = self._world.messages.reduce({self._timeout}, lambda one, other: one | other)
            if self._world.messages.from_main(timeouts) != {self._timeout} or not self._timeout:
                return None
            return others.Others(self._world, period=self._period, closed=self._closed)
        finally:
            if guard:
                guard.cancel()

    def _miss_others(self, seconds: float) -> None:
        waits = f"waits for processes that joined {seconds:.0f} s ago and have not gone on"
        self._say(f"HUNG: {self._report().process} {waits}")
        os._exit(HUNG)

    def close(self) -> None:
        """Stop watching: from now on this process may be silent."""
        self._closed.set()
        if self._others:
            self._others.leave(replace(self._report(), phase=LEFT, waits=True, answers=True))

    def _watch(self) -> None:
        last, posted = time.monotonic(), 0.0
        while not self._closed.wait(min(self._period, LOOK_SECONDS)):
            now = time.monotonic()
            if now - last > self._timeout / 2:  # this process itself was stopped, by Ctrl-Z or a debugger
                self._awake_since = now
            last = now
            stuck = now - max(self._clock.moved_at, self._awake_since) > self._limit()
            if self._others:
                if now - posted >= self._period:
                    self._others.post(self._report())
                    posted = now
                stuck = self._others.look(self._awake_since) > self._timeout or self._others.alarmed() or stuck
            if stuck:
                self._end()

    def _limit(self) -> float:
        clock = self._clock
        if clock.now == START:
            return max(START_LIMIT, self._timeout)
        return self._timeout if clock.steady and clock.now in (STEP, LOADING) else max(SLOW_LIMIT, self._timeout)

    def _report(self) -> Report:
        place, waits = place_of(self._main)
        return Report(
            self._world.rank,
            self._world.node_of(self._world.rank),
            self._clock.now,
            self._clock.step + 1,
            time.monotonic() - self._clock.moved_at,
            place,
            waits,
            self._ending,
            self._clock.part,
            next(self._count),
        )

    def _end(self) -> None:
        after(LAST_RESORT, lambda: os._exit(HUNG))
        self._ending = True
        own = self._report()
        try:
            if self._others:
                self._others.end(own, write_stacks=lambda: self._write_stacks(own), say=self._say)
            else:
                for_a_while(lambda: self._write_stacks(own))
                self._say(f"{verdict([own])}\n{STACKS}")
        finally:
            os._exit(HUNG)

    def _say(self, text: str) -> None:
        text = text.replace(STACKS, f"  Python stacks of every process: {self._stacks or 'above'}")
        if sys.stdout.isatty():
            put(2, SHOW_CURSOR)
        tell(text)
        add_failure(self._folder, text, self._clock, rank=self._world.rank, code=HUNG)

    def _write_stacks(self, own: Report) -> None:
        head = f"{utc_now()} {own.process}, {own.where}, no progress for {own.idle:.0f} s\n"
        if not (self._folder / RECIPE).exists():
            tell(head.rstrip())
            faulthandler.dump_traceback(2)
            return
        with suppress(OSError, RuntimeError):
            place = self._folder / FOLDER
            place.mkdir(exist_ok=True)
            self._stacks = place
            with (place / f"rank-{own.rank}.txt").open("a", encoding="utf-8") as file:
                file.write(head)
                file.flush()
                faulthandler.dump_traceback(file)
                file.write("\n")
            if self._world.device.type == "cuda":
                (place / f"nccl-{own.rank}").write_bytes(flight_record())
