"""The launcher's store under many clients: what each of them asks at a start, counted on the way to a real store."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

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


def serve_store() -> Any:
    """A store as launchers serve it: on a listener for IPv4. On torch's own, which takes both families, it asks the
    name server for the name of each client, one after the other."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(4096)
    port = listener.getsockname()[1]
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return dist.TCPStore("127.0.0.1", port, **options)
