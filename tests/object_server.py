"""A server that speaks S3, in a process of its own, behind a proxy in this one that breaks what passes through it."""

import os
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

from recipes.files import remote
from tests.processes import free_ports, wait_for

METHODS = (b"GET", b"PUT", b"HEAD", b"POST", b"DELETE")
STATUS = re.compile("[0-9]{3}")


class ObjectServer:
    """The proxy, and what it does to requests."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.faults: deque[tuple[str, str]] = deque()
        """(method, fault) for the next requests of this method: a status and perhaps a code, as in "400 BadDigest", the
        same after "late ", "reset", "cut", "slow", "stall", "flip" (a bit of the answer), "hide" (manifests, in a
        list), or "" for none."""
        self.down = False
        """Whether every connection is reset at once."""
        self.always = ""
        """A fault for every request."""
        self.rule: Callable[[str], str] = lambda request: ""
        """The fault for a request, by its method and address."""
        self.requests: list[str] = []
        """The method and the address of each request."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def heal(self) -> None:
        """Let everything pass again."""
        self.faults.clear()
        self.down, self.always, self.rule = False, "", lambda request: ""

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(("127.0.0.1", self._port)) as server:
            self._pass_on(client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        left, fault = 1 << 62, ""  # bytes of the answers that may pass
        while not self.down:
            for readable in select.select([client, server], [], [], 0.2)[0]:
                data = readable.recv(1 << 16)
                if not data:
                    return
                if readable is server:
                    if fault == "flip" and not data.endswith(b"\r\n\r\n"):  # not of a head alone
                        data, fault = data[:-1] + bytes([data[-1] ^ 1]), ""
                    if fault == "hide":
                        data = data.replace(b"/manifest.json<", b"/.anifest.json<")  # as long as before
                    client.sendall(data[:left])
                    left -= len(data)
                    if left <= 0:
                        return
                    continue
                fault = self._fault(data) or (fault if not data.startswith(METHODS) else "")
                if fault == "stall":
                    time.sleep(4)
                    return
                if STATUS.match(status := fault.removeprefix("late ")):
                    time.sleep(2 if fault.startswith("late") else 0)
                    client.sendall(answer(status, body=not data.startswith(b"HEAD")))
                    return
                if fault == "reset":
                    break
                if fault == "slow":
                    time.sleep(1.5)
                left = 700 if fault == "cut" else left
                server.sendall(data)
            else:
                continue
            break
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _fault(self, data: bytes) -> str:
        """What to do about this request; "" for the middle of one."""
        method, _, rest = data.partition(b" ")
        if method not in METHODS:
            return ""
        self.requests.append(f"{method.decode()} {rest.partition(b' ')[0].decode()}")
        if self.faults and self.faults[0][0] == method.decode():
            return self.faults.popleft()[1]
        return self.rule(self.requests[-1]) or self.always


def answer(status: str, *, body: bool) -> bytes:
    """An error as S3 sends it."""
    number, _, code = status.partition(" ")
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>in other words</Message></Error>" if code else ""
    head = f"HTTP/1.1 {number} Because\r\nContent-Length: {len(text) if body else 0}\r\n"
    return f"{head}Connection: close\r\n\r\n{text if body else ''}".encode()


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """The server with an empty bucket s3://bucket, and the variables that lead to it."""
    [port] = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = ObjectServer(port)
    variables = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }

    def answers() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    try:
        wait_for("the server", answers)
        with mock.patch.dict(os.environ, variables):
            type(remote._system("s3://bucket")).clear_instance_cache()  # of another server
            remote._system("s3://bucket").mkdir("bucket")
            yield server
    finally:
        server.close()
        process.terminate()
        process.wait()


@contextmanager
def hurried(server: ObjectServer, *, block: int, patience: float) -> Iterator[ObjectServer]:
    """Files are read in blocks of so many bytes, and time passes faster. Afterwards the server has no faults."""
    with mock.patch.multiple(remote, BLOCK=block, PATIENCE=patience, LONGEST_PAUSE=0.8):
        yield server
    server.heal()


def upload_folder(folder: Path, address: str) -> None:
    """Copy the files of a folder to the server."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            remote.upload(file, f"{address}/{file.relative_to(folder).as_posix()}")
