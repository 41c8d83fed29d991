"""A slow way to a store: passes on what it gets, later."""

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Proxy:
    """Listens on a port of its own. Each byte takes `delay` seconds to the target, and as long back."""

    def __init__(self, delay: float) -> None:
        self.delay, self.target = delay, 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._late: deque[tuple[float, socket.socket, bytes]] = deque()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._listener.close()

    def _pass_on(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(0.005):
                self._accept() if key.data is None else self._read(key.fileobj, key.data)  # type: ignore[arg-type]
            while self._late and self._late[0][0] <= time.monotonic():
                _, to, data = self._late.popleft()
                with suppress(OSError):
                    to.sendall(data) if data else to.shutdown(socket.SHUT_WR)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            client.close()
            return
        self._selector.register(client, selectors.EVENT_READ, server)
        self._selector.register(server, selectors.EVENT_READ, client)

    def _read(self, source: socket.socket, to: socket.socket) -> None:
        data = b""
        with suppress(OSError):
            data = source.recv(65536)
        if not data:
            self._selector.unregister(source)
        self._late.append((time.monotonic() + self.delay, to, data))


@contextmanager
def slow_proxy(delay: float) -> Iterator[Proxy]:
    """A proxy that passes everything on `delay` seconds late, each way."""
    proxy = Proxy(delay)
    try:
        yield proxy
    finally:
        proxy.close()
