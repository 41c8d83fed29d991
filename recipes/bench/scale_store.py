"""The launcher's store under many clients: what each of them asks at a start, counted on the way to a real store."""

import asyncio
import multiprocessing
import socket
import threading
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import torch.distributed as dist

from parallel.descriptors import raise_limit

# What follows the first byte of each request, as torch 2.11 to 2.13 send it (TCPStore.cpp): s a key or a value with its
# length before it, 4 and 8 a number of so many bytes, [s] and [ss] a list of so many keys, or keys and values.
REQUESTS = {
    **{0: ("validate", "4"), 1: ("set", "ss"), 2: ("compare_set", "sss"), 3: ("get", "s"), 4: ("add", "s8")},
    **{5: ("check", "[s]"), 6: ("wait", "[s]"), 7: ("num_keys", ""), 8: ("delete", "s"), 9: ("append", "ss")},
    **{10: ("multi_get", "[s]"), 11: ("multi_set", "[ss]"), 12: ("cancel_wait", ""), 13: ("ping", "4")},
}


@dataclass
class Load:
    """What has passed between the clients and the store."""

    operations: Counter[str] = field(default_factory=Counter)
    bytes_in: int = 0
    bytes_out: int = 0
    connections: int = 0

    def since(self, earlier: "Load") -> "Load":
        """What came after `earlier`, which was this load then."""
        return Load(
            self.operations - earlier.operations,
            self.bytes_in - earlier.bytes_in,
            self.bytes_out - earlier.bytes_out,
            self.connections - earlier.connections,
        )

    def copy(self) -> "Load":
        return Load(Counter(self.operations), self.bytes_in, self.bytes_out, self.connections)


def requests(load: Load) -> Generator[int, bytes, None]:
    """Takes the bytes of one connection as it asks for them, and counts its requests."""
    while True:
        kind = (yield 1)[0]
        name, layout = REQUESTS[kind]  # a KeyError: a torch with requests that this table lacks
        load.operations[name] += 1
        repeats = 1
        if layout.startswith("["):
            repeats, layout = int.from_bytes((yield 8), "little"), layout.strip("[]")
        for part in layout * repeats:
            length = int.from_bytes((yield 8), "little") if part == "s" else int(part)
            if length:
                yield length


class CountingStore:
    """A real TCPStore behind a port that counts what passes. Use it as a context."""

    def __init__(self) -> None:
        self.load = Load()
        self.port = 0
        self.error: BaseException | None = None
        self._store = serve_store()
        self._kept: set[Any] = set()
        """The tasks of all connections, which nothing else keeps from being collected while they wait."""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "CountingStore":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        if self.error:
            raise self.error

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0, backlog=4096)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._kept.add(asyncio.current_task())
        self.load.connections += 1
        ahead, back = await asyncio.open_connection("127.0.0.1", self._store.port)
        try:
            await asyncio.gather(self._requests(reader, back), self._answers(ahead, writer))
        except (ConnectionError, asyncio.CancelledError):
            pass
        except Exception as error:
            self.error = error
        finally:
            back.close()
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser, pending = requests(self.load), bytearray()
        needed = next(parser)
        while piece := await reader.read(65536):
            self.load.bytes_in += len(piece)
            pending += piece
            at = 0
            while len(pending) - at >= needed:
                at, needed = at + needed, parser.send(bytes(pending[at : at + needed]))
            del pending[:at]
            writer.write(piece)
            await writer.drain()
        writer.write_eof()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            self.load.bytes_out += len(piece)
            writer.write(piece)
            await writer.drain()


class Cost(NamedTuple):
    """What clients cost the process that serves a store, in its CPU seconds."""

    clients: int
    connection: float
    operation: float
    wall: float
    """Seconds until all clients had done everything."""


CLIENTS = (1000, 2000, 4000)
PROCESSES, ROUNDS = 4, 5
OPERATIONS = 4
"""Of a client in a round: set, wait, get, add."""
BLOB = b"x" * 97
"""As large as the address that a process leaves for its peers."""
MAGIC = 0x3C85F7CE
"""The first message to a TCPStore."""


@cache
def costs() -> tuple[Cost, ...]:
    """Of real stores with so many clients each."""
    return tuple(cost(clients) for clients in CLIENTS)


def seconds_of(connections: float, operations: float) -> float:
    """CPU seconds of a store for these: each costs the same with 1,000 clients and with 4,000, so also with more."""
    connection, operation = (median(getattr(one, name) for one in costs()) for name in ("connection", "operation"))
    return connections * connection + operations * operation


def cost(clients: int) -> Cost:
    """Of a store in a process of its own, whose clients connect at once and then do what a start does."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    server, end = context.Pipe()
    processes = [context.Process(target=_serve, args=(end,), daemon=True)]
    processes[0].start()
    port = server.recv()
    pipes = []
    try:
        for place in range(PROCESSES):
            ours, theirs = context.Pipe()
            processes.append(
                context.Process(target=_be_clients, args=(theirs, port, place, clients // PROCESSES), daemon=True)
            )
            processes[-1].start()
            pipes.append(ours)
        began, used = time.perf_counter(), [_cpu_seconds(server)]
        for _ in ("connected", "asked"):
            for pipe in pipes:
                pipe.send("go")
            for pipe in pipes:
                pipe.recv()
            used.append(_cpu_seconds(server))
        wall = time.perf_counter() - began
    finally:
        for process in processes:
            process.kill()
            process.join()
    return Cost(clients, (used[1] - used[0]) / clients, (used[2] - used[1]) / (clients * ROUNDS * OPERATIONS), wall)


def _cpu_seconds(server: Connection) -> float:
    server.send("how long?")
    seconds: float = server.recv()
    return seconds


def serve_store() -> Any:
    """A store as launchers serve it: on a listener for IPv4. On torch's own, which takes both families, it asks the
    name server for the name of each client, one after the other."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(4096)
    port = listener.getsockname()[1]
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return dist.TCPStore("127.0.0.1", port, **options)


def _serve(pipe: Connection) -> None:
    raise_limit()
    pipe.send((store := serve_store()).port)
    while pipe.recv():
        pipe.send(time.process_time())
    del store


def _be_clients(pipe: Connection, port: int, place: int, count: int) -> None:
    """Speak the store's language on bare sockets: torch's client asks the name server for its peer's name first."""
    raise_limit()
    assert pipe.recv()
    clients = [_connected(port) for _ in range(count)]
    pipe.send("connected")
    assert pipe.recv()
    for turn in range(ROUNDS):
        for number, client in enumerate(clients):
            key = _text(f"{place}/{number // 2}/{turn}".encode())
            client.sendall(b"\1" + _text(f"{place}/{number}/{turn}".encode()) + _text(BLOB))
            client.sendall(b"\6" + _long(1) + key)
            _read(client, 1)
            client.sendall(b"\3" + key)
            _read(client, 8 + len(BLOB))
            client.sendall(b"\4" + _text(b"started") + _long(1))
            _read(client, 8)
    pipe.send("asked")


def _connected(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.sendall(b"\0" + MAGIC.to_bytes(4, "little") + b"\x0d" + MAGIC.to_bytes(4, "little"))
    _read(client, 4)
    return client


def _read(client: socket.socket, length: int) -> None:
    while length:
        piece = len(client.recv(length))
        assert piece, "the store has closed a connection"
        length -= piece


def _long(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _text(text: bytes) -> bytes:
    return _long(len(text)) + text
