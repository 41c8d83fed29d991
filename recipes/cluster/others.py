"""What a process of a run knows of the others, and how they agree on who holds them up.

A thread works only in the first process of a node that lives: it publishes the node's board in the launcher's store,
and watches the next node there.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import zip_longest

from parallel.dist import World
from parallel.heartbeats import ALARM, ENDED, HUNG, OVER, SPOKEN, VERDICT, Heartbeats
from parallel.nodes import Node
from recipes.cluster.reports import LAST_RESORT, LEFT, LOOK_SECONDS, STACKS, Report, after, for_a_while, verdict
from recipes.files import exit_codes

ANSWERS, GONE = json.dumps({"answers": True}).strip("{}"), json.dumps({"phase": LEFT}).strip("{}")
WORKERS_HUNG = "HUNG: workers of this node were frozen, or did not end with the others; killed"
"""What launchers say whose workers have not ended by themselves."""


class Others:
    """The other processes, as one of several sees them."""

    def __init__(self, world: World, *, period: float, closed: threading.Event) -> None:
        """Collective. period: seconds between two reports. closed: set once this process is not watched any more."""
        self._world, self._period, self._closed = world, period, closed
        self._acting = self._speaks = self._judges = self._decided = False
        self._awake_since = self._store_answered_at = self._neighbour_moved_at = now = time.monotonic()
        self._beats = Heartbeats(world)
        self._words = self._beats.board.words()
        self._moved_at = [now] * len(self._words)
        threading.Thread(target=self._exchange_with_nodes, daemon=True, name="watchdog of the next node").start()

    def post(self, report: Report) -> None:
        """Show the state of this process to the others of its node."""
        self._beats.board.write(word_of(report))

    def alarmed(self) -> bool:
        """Whether one of them has found that the run hangs."""
        return self._beats.board.shows(ALARM)

    def look(self, awake_since: float) -> float:
        """Seconds since the last sign of life of the process, the node or the store that is silent for longest.

        awake_since: nothing before it counts, because this process was stopped.
        """
        self._awake_since = awake_since
        words = self._beats.board.words()
        now = time.monotonic()
        for place, word in enumerate(words):
            if word != self._words[place] or ANSWERS in word:  # after its answer it may have ended, and be silent
                self._moved_at[place] = now
        self._words = words
        oldest = min(self._moved_at)
        if self._acting:
            oldest = min(oldest, self._neighbour_moved_at, self._store_answered_at)
        return now - max(oldest, awake_since)

    def leave(self, report: Report) -> None:
        """Show that this process ends, with its last report."""
        board, acted = self._beats.board, self._acts_for_node()
        self.post(report)
        words, shown = board.words(), list[str]()
        with suppress(RuntimeError):
            # Another may leave meanwhile; the last one to publish must have seen all that have.
            while words != shown and (acted or all(GONE in word for word in words)):
                self._beats.publish(words)
                words, shown = board.words(), words

    def _acts_for_node(self) -> bool:
        """Whether this process publishes the board, as the first that is there and has moved within a few periods."""
        recently = time.monotonic() - max(LOOK_SECONDS, 3 * self._period)
        return not any(
            GONE not in word and max(moved_at, self._awake_since) > recently
            for word, moved_at in list(zip(self._words, self._moved_at, strict=True))[: self._beats.place]
        )

    def _exchange_with_nodes(self) -> None:
        """Publish the reports of this node, and read those of the next one; so every node is watched by another."""
        last = ""
        while not self._closed.wait(self._period):
            if not self._acts_for_node():
                self._acting = False
                continue
            if not self._acting:
                self._store_answered_at = self._neighbour_moved_at = time.monotonic()
                self._acting = True
            try:
                self._beats.publish(self._beats.board.words())
                reports, hung = self._beats.look()
            except RuntimeError:  # of the store; _store_answered_at shows it
                continue
            self._store_answered_at = time.monotonic()
            if hung:
                self._beats.board.show(ALARM)
            # After its answer a process may have ended, and be silent.
            if reports != last or (reports and all(ANSWERS in word for word in reports.splitlines())):
                last, self._neighbour_moved_at = reports, self._store_answered_at

    def end(self, own: Report, *, write_stacks: Callable[[], None], say: Callable[[str], None]) -> None:
        """Raise the alarm, agree with the others, and return when this process may exit. own: its report and answer."""
        self._own, self._say = own, say
        after(LAST_RESORT / 2 - 2, self._blame_store)
        board = self._beats.board
        try:
            self.post(own)
            board.show(ALARM)
            self._speak_for_node()
            for_a_while(write_stacks)
            end = time.monotonic() + LAST_RESORT / 2
            while not board.shows(OVER) and time.monotonic() < end:
                if self._speak_for_node():
                    self._pass_verdict_on()
                time.sleep(self._period / 4)
        except RuntimeError as error:
            self._blame_store(str(error).splitlines()[0])

    def _blame_store(self, why: str = "it may be frozen, or its node lost") -> None:
        """Blame the store and end the node, if this process speaks for the node and no verdict has come."""
        if self._speaks and not self._decided:
            report = self._own
            self._say(f"HUNG: {report.process} in {report.where}; the launcher of node 0 does not answer ({why})")
            self._beats.board.show(OVER)
            os._exit(exit_codes.HUNG)

    def _speak_for_node(self) -> bool:
        """Publish the board, with its answers, if this process is the first there to answer. Returns whether it ever
        was: the verdict may have been told to it."""
        words = self._beats.board.words()
        answering = [place for place, word in enumerate(words) if ANSWERS in word and GONE not in word]
        if answering and answering[0] == self._beats.place:
            first, self._speaks = not self._speaks, True
            self._beats.publish(words)
            if first and self._beats.is_first(HUNG):
                self._judges = True
        return self._speaks

    def _pass_verdict_on(self) -> None:
        """Tell the verdict if this process judges, and print it if that chooses this rank: the first to answer.

        Until it is printed, no process exits: the first one to do so ends the rest of its node.
        """
        if self._judges:
            self._beats.tell(VERDICT, self._judge())
            self._judges = False
        if verdict := self._beats.told(VERDICT):
            speaker, text = json.loads(verdict)
            said, self._decided = self._decided, True
            if speaker == self._world.rank and not said:
                self._say(f"{text}\n{STACKS}")
                self._beats.tell_first(ENDED, json.dumps([WORKERS_HUNG, exit_codes.HUNG, False]))
                self._beats.tell(SPOKEN, "yes")
            if self._beats.told(SPOKEN):
                self._beats.board.show(OVER)

    def _judge(self) -> str:
        """Wait for all answers, at most 2 s and two periods. Returns the rank to print the verdict, and its text."""
        end = time.monotonic() + 2 * self._period + 2
        while True:
            reports = reports_of(self._world.nodes, self._beats.of_all())
            if all(report.answers for report in reports) or time.monotonic() > end:
                break
            time.sleep(self._period / 4)
            self._speak_for_node()
        speaker = next(report.rank for report in reports if report.answers and report.phase != LEFT)
        return json.dumps([speaker, verdict(reports)])


def word_of(report: Report) -> str:
    """What the board says of a process, whose rank and node its place there tells."""
    return json.dumps({key: value for key, value in asdict(report).items() if key not in ("rank", "node")})


def reports_of(nodes: Sequence[Node], words_of_nodes: Sequence[Sequence[str]]) -> list[Report]:
    """The reports of all processes, by rank, from the boards of all nodes."""
    reports = {}
    for node, words in zip(nodes, words_of_nodes, strict=True):
        for rank, word in zip_longest(node.ranks, words[: len(node.ranks)]):
            reports[rank] = replace(Report(rank, node.name), **json.loads(word or "{}"))
    return [reports[rank] for rank in sorted(reports)]
