"""Messages that still work while collectives or the file system hang.

The processes of one node see each other on a board in the memory of that machine. One of them speaks for the node,
through the store of node 0's launcher: the others connect to it only if that one is silent or something is wrong.
"""

import os
import secrets
import socket
import struct
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from parallel.dist import World, store_address
from parallel.errors import UserError
from parallel.nodes import PREFIX

SHARED_MEMORY = Path("/dev/shm")
"""The folder whose files Linux keeps in memory; where it is missing, read-only or full, that for temporary files is."""
PLACE = 2048
"""Bytes of the board for each process, and as many for its signs."""
HEAD = struct.Struct("<II")
HUNG, VERDICT, SPOKEN, ENDED = "hung", "verdict", "spoken", "ended"
"""Keys of the store: a process has raised the alarm; why the run hangs; that has been printed, and all processes exit;
why the workers of all nodes end, for the launchers (recipes/cluster/rendezvous.py)."""
ALARM, OVER = 0, 1
"""Signs on the board: this run hangs; the hang has been explained, so that every process exits."""


class Board:
    """A file in memory that the processes of one node share: a word of each, which it replaces, and signs for all."""

    def __init__(self, name: str, *, folder: Path, place: int, places: int) -> None:
        """Every process of the node makes it, in any order. name: unknown to other users and new in every run."""
        self.path, self._place, self._words = folder / name, place, [""] * places
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            weakref.finalize(self, os.close, self._file)
            os.pwrite(self._file, bytes(PLACE), 0)
            self.write("{}")
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error.strerror}); the watchdog keeps it there") from None

    def write(self, word: str) -> None:
        """Replace this process's word; "" cannot be told from none."""
        text = word.encode()[: PLACE - HEAD.size]
        os.pwrite(self._file, HEAD.pack(len(text), zlib.crc32(text)) + text, PLACE * (1 + self._place))

    def words(self) -> list[str]:
        """The last word of each process, by its place; "" if there was none."""
        for place in range(len(self._words)):
            found = os.pread(self._file, PLACE, PLACE * (1 + place))
            length, checksum = HEAD.unpack_from(found) if len(found) >= HEAD.size else (0, 0)
            text = found[HEAD.size : HEAD.size + length]
            if length and zlib.crc32(text) == checksum:  # otherwise it is being written: the one before counts
                self._words[place] = text.decode()
        return list(self._words)

    def show(self, sign: int) -> None:
        """Show a sign to all processes of the node, for good."""
        os.pwrite(self._file, b"\1", sign)

    def shows(self, sign: int) -> bool:
        """Whether any of them has shown it."""
        return os.pread(self._file, 1, sign) == b"\1"

    def hide(self) -> None:
        """Remove its name, once all have opened it: nothing is left over, however the processes end."""
        with suppress(FileNotFoundError):
            self.path.unlink()


class Heartbeats:
    """The words of all processes, each replacing its previous one, and messages to all. Errors of the store are
    RuntimeErrors."""

    def __init__(self, world: World) -> None:
        """Collective. Raises UserError if the processes of this node do not see the same files."""
        self._world = world
        self._node = next(number for number, node in enumerate(world.nodes) if world.rank in node.ranks)
        ranks = world.nodes[self._node].ranks
        self._next = (self._node + 1) % len(world.nodes)
        self._store: dist.Store | None = None if world.size > 1 else dist.HashStore()
        self._counted = False
        token = world.messages.from_main(secrets.token_hex(16))
        self.place = ranks.index(world.rank)
        self.board = self._board(f"shardwright-{token}-{ranks[0]}", places=len(ranks))
        try:
            world.messages.barrier()
        finally:  # if another process could not make its part of it, too
            self.board.hide()
        if absent := [str(rank) for rank, word in zip(ranks, self.board.words(), strict=True) if not word]:
            raise UserError(
                f"rank {world.rank} does not see the file {self.board.path} of rank {', '.join(absent)}, which is on"
                f" the same node ({world.nodes[self._node].name}); start the processes of a node in one container, or"
                f" let their containers share {self.board.path.parent}"
            )

    def _board(self, name: str, *, places: int) -> Board:
        """The node's board, in the same folder on all processes. Raises UserError if neither has room."""
        make, board = partial(Board, name, place=self.place, places=places), None
        with suppress(UserError):
            board = make(folder=SHARED_MEMORY)
        messages = self._world.messages
        if messages.from_main(messages.reduce(board is not None, lambda one, other: one and other)) and board:
            return board
        if board:
            board.hide()
        return make(folder=Path(tempfile.gettempdir()))

    def publish(self, words: Sequence[str]) -> None:
        """Replace what all nodes may know of this one's processes."""
        self._connected().set(key_of_node(self._node), "\n".join(words))

    def look(self) -> tuple[str, bool]:
        """What the next node has published, "" if nothing; and whether a node has raised the alarm."""
        store = self._connected()
        if not self._counted:  # keys that nobody has set would be waited for
            store.append(key_of_node(self._next), "")  # type: ignore[attr-defined]  # torch's stubs lack it
            store.add(PREFIX + HUNG, 0)
            self._counted = True
        word, hung = store.multi_get([key_of_node(self._next), PREFIX + HUNG])
        return word.decode(), hung != b"0"

    def of_all(self) -> list[list[str]]:
        """The words of each node's processes, as it has published them last; none of a node that has not."""
        store, keys = self._connected(), [key_of_node(number) for number in range(len(self._world.nodes))]
        if not store.check(keys):  # keys that nobody has set would be waited for
            for key in keys:
                store.append(key, "")  # type: ignore[attr-defined]
        return [word.decode().splitlines() for word in store.multi_get(keys)]

    def tell(self, subject: str, word: str) -> None:
        """Publish a message to all processes under this subject."""
        self._connected().set(PREFIX + subject, word)

    def told(self, subject: str) -> str:
        """The message published under this subject; "" if there is none. Does not wait."""
        key = PREFIX + subject
        return self._connected().get(key).decode() if self._connected().check([key]) else ""

    def tell_first(self, subject: str, word: str) -> None:
        """Publish it unless there is a message under this subject."""
        self._connected().compare_set(PREFIX + subject, "", word)

    def is_first(self, subject: str) -> bool:
        """Whether this is the first call, of any process, with this subject."""
        return self._connected().add(PREFIX + subject, 1) == 1

    def _connected(self) -> dist.Store:
        if self._store is None:
            self._store = connect()
        return self._store


def key_of_node(number: int) -> str:
    """The key of the store that holds the words of a node's processes."""
    return f"{PREFIX}words of node {number}"


def connect() -> dist.Store:
    """A connection to the store of node 0's launcher, besides torch's: a process that waits there blocks no other
    thread. Raises RuntimeError."""
    host, port = store_address()
    try:
        socket.create_connection((host, port), timeout=5).close()  # torch would print errors for minutes
    except OSError as error:
        raise RuntimeError(f"{host}, port {port}: {error.strerror or error}") from None
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False)


def is_first_of_all(world: World, subject: str) -> bool:
    """Whether this is the first call of any process with this subject. Not collective. Raises RuntimeError."""
    return world.size == 1 or connect().add(PREFIX + subject, 1) == 1
