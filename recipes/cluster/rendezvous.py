"""What the launchers of several nodes tell each other, through the store that node 0's keeps.

torchrun sees no more than its own workers: where those of another node have crashed, hung or were started again, it
would wait with its own for as long as NCCL does.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import TCPStore

from parallel.dist import PREFIX, SPOKEN

ENDED = PREFIX + "ended"
LOOK_SECONDS = 1.0
SILENT_SECONDS = 15.0
"""Nodes may come so much later than others without a word."""
WAIT_SECONDS = 600.0
"""Until the nodes that are there give up."""
CONNECT = timedelta(seconds=60)
"""To wait for a connection."""


class Cause(NamedTuple):
    """Why the workers of all nodes end."""

    message: str
    code: int
    """The exit code of the launcher it began with; of all, if there is nothing to add."""
    crashed: bool = False
    """The workers of the other nodes can do nothing any more; else they are leaving by themselves."""


class Launchers:
    """The launchers of all nodes, as this one sees them."""

    def __init__(
        self, address: str, port: int, *, node: int, nodes: int, hung: int, log: Callable[[str], None]
    ) -> None:
        """address, port: of node 0's store. nodes: how many there are. hung: the exit code of workers that hung."""
        self._address, self._port, self._node, self._nodes = address, port, node, nodes
        self._hung, self._log = hung, log
        self._store: TCPStore | None = None
        self._counted = node == 0  # whose store it is
        self._heard = threading.Event()
        self.cause: Cause | None = None

    def join(self) -> None:
        """Return when this node may start its workers: not into a store that has seen it start before.

        That one belongs to processes which wait for those that this node had; they are told to end.
        """
        told = False
        while not self._counted and self._is_up():  # else its store will be a new one
            with suppress(RuntimeError):  # it went just now
                store = self._connect()
                if store.add(_place(self._node), 1) == 1:
                    self._store, self._counted = store, True
                    return
                store.set(ENDED, json.dumps([f"node {self._node} was started again", 1, True]))
            if not told:
                self._log("node 0 is still in the run that this node was in before: waiting until that has ended")
            told = True
            time.sleep(LOOK_SECONDS)

    def await_all(self, met: Callable[[], bool], *, give_up: Callable[[], None]) -> None:
        """In a thread: say whom this node waits for, and give up when they have not met after WAIT_SECONDS."""

        def look() -> None:
            began, told = time.monotonic(), False
            while not met():
                time.sleep(LOOK_SECONDS)
                waited = time.monotonic() - began
                if waited > WAIT_SECONDS and not met():
                    self._log(f"the nodes did not meet: no word from {self._absent()} in {WAIT_SECONDS / 60:g} minutes")
                    give_up()
                if waited > SILENT_SECONDS and not told and not met():
                    self._log(f"waiting for {self._absent()}")
                    told = True

        threading.Thread(target=look, daemon=True, name="waits for launchers").start()

    def watch(self, end: Callable[[], None], *, grace: float) -> None:
        """From now on, in a thread: call end so many seconds after there was a cause, when all who can leave have.

        After a crash at once: the others wait in collectives, and would say no more than that.
        """

        def look() -> None:
            while self.cause is None:
                time.sleep(LOOK_SECONDS)
                self.cause = self._look()
            self._heard.set()
            time.sleep(0 if self.cause.crashed else grace)
            end()

        threading.Thread(target=look, daemon=True, name="other launchers").start()

    def wait_for_cause(self) -> Cause | None:
        """The cause, if another launcher gives one about now."""
        self._heard.wait(3 * LOOK_SECONDS)
        return self.cause

    def announce_end(self, code: int, *, crashed: bool) -> None:
        """This launcher ends with an error: the others need not wait for its workers."""

        def speak() -> None:
            with suppress(RuntimeError):
                if self._store is None and self._is_up():
                    self._store = self._connect()
                if self._store is not None:
                    self._store.set(
                        ENDED, json.dumps([f"node {self._node} ended with exit code {code}", code, crashed])
                    )

        speaks = threading.Thread(target=speak, daemon=True)
        speaks.start()
        speaks.join(timeout=LOOK_SECONDS)  # where node 0 went without a word, a store waits for it a long time
        if self._node == 0:
            time.sleep(3 * LOOK_SECONDS)  # the store goes with this process

    def _look(self) -> Cause | None:
        try:
            if self._store is None:
                if not self._is_up():
                    return None
                self._store = self._connect()
            if not self._counted:
                self._store.add(_place(self._node), 1)
                self._counted = True
            if self._store.check([PREFIX + SPOKEN]):
                words = (
                    "HUNG: the workers of this node did not go on, or not end, with those of the others and were killed"
                )
                return Cause(words, self._hung)
            if self._store.check([ENDED]):
                return Cause(*json.loads(self._store.get(ENDED)))
        except RuntimeError:
            if self._store is not None:
                return Cause("the launcher of node 0 is gone", 1)
        return None

    def _absent(self) -> str:
        """Whom the others wait for."""
        node_0 = f"node 0 at {self._address}:{self._port}"
        if self._store is None:
            return node_0
        try:
            missing = [str(node) for node in range(1, self._nodes) if not self._store.check([_place(node)])]
        except RuntimeError:
            return node_0
        return f"node {', '.join(missing)} of {self._nodes}" if missing else "the other nodes"

    def _is_up(self) -> bool:
        """Whether node 0's launcher is there. torch's own attempts write to the screen where it is not."""
        try:
            with socket.create_connection((self._address, self._port), timeout=5):
                return True
        except OSError:
            return False

    def _connect(self) -> TCPStore:
        return TCPStore(self._address, self._port, is_master=False, wait_for_workers=False, timeout=CONNECT)


def _place(node: int) -> str:
    """The key under which a node counts its starts."""
    return f"{PREFIX}node {node}"
