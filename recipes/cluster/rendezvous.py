"""How the launchers of several nodes meet in node 0's store, and notify each other.

torchrun sees only its own workers: when another node's crash, hang or start again, it would wait as long as NCCL does.
Once they have met, launchers notify each other along the tree of neighbours.py, which also notices who is lost.
"""

import json
import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed import TCPStore

from parallel.errors import UserError
from parallel.heartbeats import ENDED as ENDED_SUBJECT
from parallel.nodes import PREFIX, abbreviated
from recipes.files.end import words_of
from recipes.files.exit_codes import NOT_MET, PREEMPTED

if TYPE_CHECKING:
    from recipes.cluster.neighbours import Neighbours, Place

ENDED = PREFIX + ENDED_SUBJECT
CAME = PREFIX + "came"
"""The nodes that have started, as in "2,1,": one list, so that a waiting launcher reads one key, not one per node."""
AGREED = PREFIX + "agreed"
SECRET = PREFIX + "secret"
LOOK_SECONDS = 1.0
SILENT_SECONDS = 15.0
WAIT_SECONDS = 600.0
"""A node that waits for others logs their names after SILENT_SECONDS, and gives up after WAIT_SECONDS."""
CONNECT = timedelta(seconds=60)  # time limit of a connection


class Cause(NamedTuple):
    """Why the workers of all nodes end."""

    message: str
    code: int
    """The exit code of the launcher that failed first; the others use it unless they have a reason of their own."""
    crashed: bool = False
    """Whether the other nodes' workers must be killed; otherwise they end by themselves."""
    worker: tuple[int, int, str] | None = None
    """Rank, exit code (-n after signal n) and host of the worker that failed without a reason of its own."""


class Launchers:
    """The launchers of all nodes, as this one sees them."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        node: int,
        nodes: int,
        log: Callable[[str], None],
        timeout: float = 10.0,
        most: Callable[[int], int] | None = None,
    ) -> None:
        """Connect nothing yet. address: that of node 0's store. node: this one's index. log: receives lines of text.
        timeout: run.node_timeout. most: how many of so many nodes train, 0 = too few; None = only all.
        """
        self._address, self._node, self._nodes, self._log = address, node, nodes, log
        self._timeout, self._own_address, self._has_given = timeout, "", False
        self._most, self._active = most, list[int]()
        self._store: TCPStore | None = None
        self._neighbours: Neighbours | None = None
        self._connecting = threading.Lock()
        self._cause_known = threading.Event()
        self.cause: Cause | None = None

    def join(self) -> None:
        """Return when this node may start its workers.

        If a store has counted this node before, its processes wait for lost workers: end them and wait for a new store.
        If that launcher still runs, it is another node with this number, or a second start: raises UserError.
        """
        logged = False
        while self._node and (address := self.answers()):  # if it is not up, its store will be a new one
            with suppress(RuntimeError):  # the store has just gone
                store = self._connect(address)
                if self._counted_first(store):
                    self._store = store
                    return
                if self._lives(store):
                    host = store.get(self._key("host")).decode()
                    raise UserError(
                        f"NODE_RANK={self._node} was started on {host} already, which goes on; this is"
                        f" {platform.node()}: give every node its own number, 0 to {self._nodes - 1}"
                    )
                time.sleep(3 * LOOK_SECONDS)  # node 0 may be ending, too
                if self._most and not store.check([ENDED]):
                    from recipes.cluster.spares import known

                    if self._node not in (known(store) or [self._node]):
                        self._store = store
                        return  # a spare node, which from now on only looks at the store
                _announce(store, Cause(f"node {self._node} was started again", 1, crashed=True))
            if not logged:
                self._log("node 0 is still in the run that this node was in before: waiting for that to end")
            logged = True
            time.sleep(LOOK_SECONDS)

    def place(self) -> tuple[int | None, int]:
        """Wait until node 0 has decided which nodes train. Returns this one's place (None: spare), and how many."""
        from recipes.cluster.spares import agreed, nodes_below

        assert self._most
        came, here = self._came, self._here
        self._active = agreed(self._connected, came, here, node=self._node, nodes=self._nodes, most=self._most)
        if self._neighbours and self._store:
            below = nodes_below(self._node, self._active, nodes=self._nodes)
            self._neighbours.reach(partial(self._places, self._store), below)
        if self._node == 0 and len(self._active) < self._most(self._nodes):
            self._log(f"trains with {len(self._active)} nodes, without {self._absent(self._active)}")
        with suppress(RuntimeError):  # of a store that goes
            if self._store and self.is_spare() and self._most(len(here(self._store))) > len(self._active):
                words = f"node {self._node} has come: all start again with it"
                _announce(self._store, Cause(words, NOT_MET, crashed=True))
        return None if self.is_spare() else self._active.index(self._node), len(self._active)

    def is_spare(self, node: int | None = None) -> bool:
        """Whether a node, by default this one, only waits."""
        return bool(self._active) and (self._node if node is None else node) not in self._active

    def reach(self) -> str:
        """Wait until node 0's store answers. Returns its address, by which torch must connect.

        Of a name with addresses of several families, torch would keep trying one that refuses.
        """
        while not (address := self.answers()):
            time.sleep(LOOK_SECONDS)
        return address

    def await_all(self, met: Callable[[], bool], *, give_up: Callable[[], None]) -> None:
        """Start a thread that logs which nodes are missing, and calls give_up after WAIT_SECONDS unless met()."""

        def look() -> None:
            began, logged = time.monotonic(), False
            while not met():
                time.sleep(LOOK_SECONDS)
                waited = time.monotonic() - began
                if waited > WAIT_SECONDS and not met():
                    self._log(
                        f"the nodes did not meet: {self._absent()} did not come within {WAIT_SECONDS / 60:g} minutes"
                    )
                    give_up()
                if waited > SILENT_SECONDS and not logged and not met():
                    self._log(f"waiting for {self._absent()}")
                    logged = True

        threading.Thread(target=look, daemon=True, name="waits for launchers").start()

    def watch(self, end: Callable[[], None], *, grace: float) -> None:
        """Start a thread that calls `end` when another node gives a cause, after `grace` seconds for workers to end.

        After a crash, it does not wait: the workers here are in collectives, and would only report that peers are gone.
        """

        def look() -> None:
            while not self._cause_known.wait(LOOK_SECONDS):
                if cause := self._look():
                    self._tell(cause)
            assert self.cause is not None
            # For those that are not connected. A spare node has nobody below it, and may only be cut off itself.
            if not (self.is_spare() or (self._neighbours and self._neighbours.above)):
                self._published(self.cause)
            time.sleep(0 if self.cause.crashed else grace)
            end()

        threading.Thread(target=look, daemon=True, name="other launchers").start()

    def agree(self, decide: Callable[[Sequence[str]], bool]) -> bool:
        """What node 0 decides for all nodes from the names of their hosts. Waits until all have started."""
        if self._node == 0 and not self.answers():
            raise UserError(f"run.prove_first: MASTER_ADDR={self._address[0]} must be an address of node 0")
        hosts = [f"{PREFIX}host {node}" for node in (self._active or range(self._nodes))[1:]]
        while (store := self._connected()) is None or not store.check([AGREED] if self._node else hosts):
            time.sleep(LOOK_SECONDS)
        if self._node == 0:
            names = [platform.node(), *(store.get(host).decode() for host in hosts)]
            store.set(AGREED, str(decide(names)))
        return store.get(AGREED) == b"True"

    def wait_for_cause(self, seconds: float | None = 3 * LOOK_SECONDS) -> Cause | None:
        """The cause that another launcher gives within the next seconds, or None. seconds: None = it will give one."""
        self._cause_known.wait(seconds)
        return self.cause

    def announce_end(self, code: int, *, crashed: bool, worker: tuple[int, int, str] | None = None) -> None:
        """Notify the other launchers that this one ends with an error, and of which worker."""
        why = f": rank {worker[0]} on {worker[2]} {words_of(worker[1])}" if worker else ""
        cause = Cause(f"node {self._node} ended with exit code {code}{why}", code, crashed, worker)

        self._has_given = True
        self._tell(self._published(cause))
        if self._node == 0:
            time.sleep(3 * LOOK_SECONDS)  # the store ends with this process

    def end_spares(self, code: int) -> None:
        """Node 0's workers have ended as all others: let the spare nodes end with their code, too."""
        if self._most and self._node == 0:
            self.announce_end(code, crashed=False)

    def leave(self) -> None:
        """Tell the other launchers that the end of this one is no loss."""
        if self._neighbours:
            self._neighbours.leave()

    def _key(self, what: str, node: int | None = None) -> str:
        return f"{PREFIX}{what} {self._node if node is None else node}"

    def _lives(self, store: TCPStore) -> bool:
        """Whether the launcher that was counted under this number lives."""
        from recipes.cluster.neighbours import lives

        end = time.monotonic() + SILENT_SECONDS
        while not (place := self._places(store, [self._node])):
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_SECONDS)
        return lives(place[self._node], _secret(store))

    def _places(self, store: TCPStore, nodes: Sequence[int]) -> "dict[int, Place]":
        """Where those of these launchers that have come listen."""
        came = self._came(store)
        there = [node for node in nodes if node in came]
        found = store.multi_get([self._key("place", node) for node in there]) if there else []
        return {node: tuple(json.loads(place)) for node, place in zip(there, found, strict=True)}

    def _came(self, store: TCPStore) -> set[int]:
        """The nodes that have started."""
        return {0, *map(int, store.get(CAME).decode().split(",")[:-1])} if store.check([CAME]) else {0}

    def _here(self, store: TCPStore) -> set[int]:
        """Those of them that are still here."""
        from recipes.cluster.neighbours import gone

        came = self._came(store)
        return came - gone(self._places(store, sorted(came - {0})), _secret(store))

    def _look(self) -> Cause | None:
        """The cause in the store. All read it until they are connected to the launcher above them."""
        try:
            if (store := self._connected()) is None or (self._neighbours and self._neighbours.above):
                return None
            if store.check([ENDED]):
                return Cause(*json.loads(store.get(ENDED)))
        except RuntimeError:
            if self._store is not None:
                return Cause("the launcher of node 0 is gone", 1)
        return None

    def _tell(self, cause: Cause) -> None:
        line = json.dumps(cause)
        if self._neighbours:
            self._neighbours.tell(line)
        else:
            self._hear(line)

    def _hear(self, line: str) -> None:
        """Take the cause that all launchers get, unless this one has given it."""
        cause = Cause(*json.loads(line))
        # An end without a failure is told only to spare nodes: the workers of the others end by themselves.
        if not self._has_given and (self.is_spare() or cause.code not in (0, PREEMPTED)):
            self.cause = cause
            self._cause_known.set()

    def _absent(self, here: Collection[int] = ()) -> str:
        node_0 = "node 0 at {}:{}".format(*self._address)
        if self._store is None:
            return node_0
        try:
            came = here or self._came(self._store)
        except RuntimeError:
            return node_0
        missing = [str(node) for node in range(1, self._nodes) if node not in came]
        return f"node {abbreviated(missing)} of {self._nodes}" if missing else "the other nodes"

    def _counted_first(self, store: TCPStore) -> bool:
        """Let the store count this node. Whether it did so for the first time."""
        from recipes.cluster.neighbours import Neighbours

        if store.add(self._key("node"), 1) > 1:
            return False
        self._neighbours = Neighbours(
            _secret(store),
            node=self._node,
            nodes=0 if self._most else self._nodes,  # place() decides who is below whom
            timeout=self._timeout,
            loss=lambda words: json.dumps(Cause(words, 1, crashed=True)),
            heard=self._hear,
            log=self._log,
            spare=self.is_spare,
        )
        if self._node:
            store.set(self._key("place"), json.dumps(self._neighbours.listen(self._own_address)))
            store.set(self._key("host"), platform.node())
            store.append(CAME, f"{self._node},")  # type: ignore[attr-defined]  # torch's stubs lack it
        self._neighbours.start(partial(self._places, store))
        return True

    def answers(self) -> str | None:
        """The address at which node 0's launcher is up, if it is. torch's own attempts would print errors."""
        try:
            with socket.create_connection(self._address, timeout=5) as connection:
                self._own_address = str(connection.getsockname()[0])
                return str(connection.getpeername()[0])
        except OSError:
            return None

    def _connect(self, address: str) -> TCPStore:
        return TCPStore(address, self._address[1], is_master=False, wait_for_workers=False, timeout=CONNECT)

    def _connected(self) -> TCPStore | None:
        """The store, or None if node 0's launcher is not up yet."""
        with self._connecting:
            if self._store is None and (address := self.answers()):
                store = self._connect(address)
                self._counted_first(store)
                self._store = store
        return self._store

    def _published(self, cause: Cause) -> Cause:
        """Give a cause to those that read the store. Returns the first that was given there, also by workers, if the
        store answers soon: if node 0 lost power, it blocks for a long time."""
        first = [cause]

        def send() -> None:
            with suppress(RuntimeError):
                if (store := self._connected()) is not None:
                    first.append(_announce(store, cause))

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        sender.join(timeout=LOOK_SECONDS)
        return first[-1]


def _secret(store: TCPStore) -> str:
    """What the launchers of a run, and nobody outside its network, know."""
    return str(store.compare_set(SECRET, "", secrets.token_hex(16)).decode())


def _announce(store: TCPStore, cause: Cause) -> Cause:
    """Give a cause to all launchers, unless one has been given: the first says most. Returns that."""
    return Cause(*json.loads(store.compare_set(ENDED, "", json.dumps(cause))))
