"""How the launchers of several nodes notice within seconds that one is lost, and tell one another why all of them end.

They form a tree in which each is connected to the one above it and to at most BRANCHES below it, so that what each
sends and hears does not grow with the nodes. Both ends of a connection say that they live every BEAT_SECONDS. Whoever
hears nothing for longer than run.node_timeout, or loses a connection whose other end has not said that it leaves, tells
all which node is lost. A launcher that was stopped itself, as by Ctrl-Z of the whole run, counts anew. Messages are
lines of text, and a connection whose first line lacks the run's secret is closed. Imports no torch.
"""

import hmac
import json
import platform
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from queue import SimpleQueue

BRANCHES = 16
BEAT_SECONDS = 1.0
REACH_SECONDS = 3.0
"""Between two looks for launchers below that have not been reached."""
SAID_SECONDS = 20.0
"""After which one that cannot be reached is named."""
MEETING_SECONDS = 5.0
"""For a connection and its first line."""
ANSWER_SECONDS = 15.0
"""After which a launcher that is asked does not live."""
LONGEST = 10_000
"""Bytes of a line."""
STRANGERS = 64
"""Connections that may be open before their first line."""
LEFT = b"left"
VISITOR = -1
"""In place of a node's number: only asks whether the launcher lives."""

Place = tuple[str, int]
"""Address and port."""


def above(node: int) -> int:
    """The node that connects to this one; -1 for node 0."""
    return (node - 1) // BRANCHES


def below(node: int, nodes: int) -> range:
    """The nodes that this one connects to."""
    return range(min(nodes, node * BRANCHES + 1), min(nodes, node * BRANCHES + BRANCHES + 1))


class Link:
    """A connection to another launcher."""

    def __init__(self, connection: socket.socket, *, node: int | None = None) -> None:
        """node: the other's, if this end has connected."""
        connection.setblocking(False)
        self.connection, self.node, self.host = connection, node, ""
        self.met = self.left = False
        self.heard_at = time.monotonic()
        self.begun = b""  # a line of which more is to come

    def send(self, line: str) -> None:
        with suppress(OSError):  # which reading shows
            self.connection.send(f"{line}\n".encode())


class Neighbours:
    """The launchers that this one is connected to. Threads work for it from its construction on."""

    def __init__(
        self,
        secret: str,
        *,
        node: int,
        nodes: int,
        timeout: float,
        loss: Callable[[str], str],
        heard: Callable[[str], None],
        log: Callable[[str], None],
        spare: Callable[[int], bool] = lambda node: False,
    ) -> None:
        """secret: of the run. nodes: 0 = reach() says which are below. timeout: seconds of silence that are a loss; 0 =
        only the end of a process is one. loss: makes the line for all nodes of the words that say which node is lost.
        heard: gets the first line for all, once, also if it comes from here. log: gets what a person should know.
        spare: whether this node does not train, so that its loss ends nothing.
        """
        self._secret, self._node, self._nodes = secret, node, nodes
        self._timeout, self._loss, self._heard, self._log = timeout or float("inf"), loss, heard, log
        self._spare = spare
        self.above: Link | None = None
        self.line = ""  # the first for all
        self._links: list[Link] = []
        self._made: SimpleQueue[Link] = SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._changing = threading.Lock()

    def listen(self, address: str) -> Place:
        """Let the node above and visitors connect to this address. Returns it with a free port."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return address, self._listener.getsockname()[1]

    def start(self, places: Callable[[Sequence[int]], Mapping[int, Place]]) -> None:
        """Connect to the launchers below. places: where those of these nodes that have started listen."""
        threading.Thread(target=self._talk, daemon=True, name="neighbours").start()
        self.reach(places, below(self._node, self._nodes))

    def reach(self, places: Callable[[Sequence[int]], Mapping[int, Place]], nodes: Sequence[int]) -> None:
        """Connect to the launchers of these nodes, which are below; places: see start()."""
        if nodes:
            threading.Thread(
                target=self._reach, args=[places, {*nodes}], daemon=True, name="reaches neighbours"
            ).start()

    def tell(self, line: str) -> None:
        """Give all launchers this line, unless there was one."""
        with self._changing:
            if self.line:
                return
            self.line = line
        for link in [*self._links]:
            link.send(line)
        self._heard(line)

    def leave(self) -> None:
        """Tell the neighbours that the end of this process will be no loss."""
        for link in [*self._links]:
            link.send(LEFT.decode())

    def _hello(self, node: int) -> str:
        return json.dumps([self._secret, node, platform.node()])

    def _reach(self, places: Callable[[Sequence[int]], Mapping[int, Place]], missing: set[int]) -> None:
        began = dict[int, float]()
        while missing and not self.line:
            try:
                found = places(sorted(missing))
            except RuntimeError:  # of the store, which ends with node 0
                return
            for node, place in found.items():
                try:
                    link = Link(socket.create_connection(place, timeout=MEETING_SECONDS), node=node)
                    link.send(self._hello(self._node))
                    self._made.put(link)
                    missing.remove(node)
                except OSError as error:  # a firewall, perhaps, which the processes need not meet
                    if began.setdefault(node, time.monotonic()) < time.monotonic() - SAID_SECONDS:
                        began[node] = float("inf")
                        why = f"does not answer at {place[0]}, port {place[1]} ({error.strerror or error})"
                        self._log(f"node {node} {why}: if it is lost, only run.hang_timeout ends the run")
            time.sleep(REACH_SECONDS)

    def _talk(self) -> None:
        beat_at = looked_at = time.monotonic()
        while True:
            for key, _ in self._selector.select(BEAT_SECONDS / 4):
                if key.data:
                    self._read(key.data)
                else:
                    self._accept()
            while not self._made.empty():
                self._add(self._made.get())
            now = time.monotonic()
            if now - looked_at > self._timeout / 2:  # stopped, as perhaps all were: the others may only begin to speak
                for link in self._links:
                    link.heard_at = now
            looked_at = now
            if now - beat_at >= BEAT_SECONDS:
                beat_at = now
                for link in self._links:
                    if link.met:
                        link.send("")
                self._look(now)

    def _look(self, now: float) -> None:
        """Drop strangers that do not say who they are, and notice who is silent."""
        for link in [*self._links]:
            silent = now - link.heard_at
            if link.node is None and silent > MEETING_SECONDS:
                self._drop(link)
            elif link.node is not None and silent > self._timeout and not link.left:
                self._lose(link, f"silent for more than {self._timeout:g} s")

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            strangers = [link for link in self._links if link.node is None]
            if len(strangers) >= STRANGERS:
                self._drop(strangers[0])
            self._add(Link(connection))

    def _add(self, link: Link) -> None:
        self._links.append(link)
        self._selector.register(link.connection, selectors.EVENT_READ, link)

    def _drop(self, link: Link) -> None:
        if link in self._links:
            self._links.remove(link)
            self._selector.unregister(link.connection)
            link.connection.close()
        if link is self.above and self._spare(self._node):
            self.above = None  # which may end before this one is told why

    def _lose(self, link: Link, how: str) -> None:
        self._drop(link)
        what = f"node {link.node}{f' on {link.host}' if link.host else ''} is lost: {how}"
        if link.node is not None and self._spare(link.node):
            self._log(f"{what}; it was a spare node, and the run goes on")
        else:
            self.tell(self._loss(what))

    def _read(self, link: Link) -> None:
        try:
            data = link.connection.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:  # the other process has ended
            data = b""
        *lines, link.begun = (link.begun + data).split(b"\n")
        if link.node is not None:
            link.heard_at = time.monotonic()
        for line in filter(None, lines):
            if not link.met:
                self._meet(link, line)
            elif line == LEFT:
                link.left = True
            else:
                self.tell(line.decode(errors="replace"))
        if len(link.begun) > LONGEST:
            self._drop(link)
        elif not data:
            if link.left or link.node is None:
                self._drop(link)
            else:
                self._lose(link, "its launcher has ended without a word")

    def _meet(self, link: Link, line: bytes) -> None:
        """Take the first line of a connection: of the other end of an edge of the tree, or of a visitor."""
        with suppress(ValueError, TypeError, RecursionError):
            secret, node, host = json.loads(line)
            ours = link.node if link.node is not None else above(self._node) if self._nodes else node
            if hmac.compare_digest(str(secret).encode(), self._secret.encode()) and node in (ours, VISITOR):
                link.met, link.host = True, str(host)
                if link.node is None:
                    link.send(self._hello(self._node))
                if node != VISITOR:
                    self.above = link if link.node is None else self.above
                    link.node = node
                    if self.line:  # it came before this connection
                        link.send(self.line)
                return
        self._drop(link)


def gone(places: Mapping[int, Place], secret: str) -> set[int]:
    """The nodes whose launchers have ended: they refuse, or do not answer while others do, so it is no firewall."""
    with ThreadPoolExecutor(64) as threads:
        answers = dict(zip(places, threads.map(_answers, places.values(), repeat(secret)), strict=True))
    ended = (False, None) if True in answers.values() else (False,)
    return {node for node, answer in answers.items() if answer in ended}


def lives(place: Place, secret: str) -> bool:
    """Whether the launcher that listens there lives: whether it answers within some seconds."""
    return bool(_answers(place, secret))


def _answers(place: Place, secret: str) -> bool | None:
    """Whether a launcher of this run answers there; None: nothing does, False: the connection is refused."""
    try:
        with socket.create_connection(place, timeout=ANSWER_SECONDS) as connection:
            connection.sendall((json.dumps([secret, VISITOR, platform.node()]) + "\n").encode())
            return secret in connection.makefile().readline(LONGEST) or None
    except OSError as error:
        return False if isinstance(error, ConnectionRefusedError) else None
