"""Loops that are measured in turns, each in processes of its own; while one computes, the others wait."""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, cast

import torch.distributed as dist

from parallel.errors import UserError

NODE = 8
"""Processes of a node."""


class Turns:
    """The turns of a process that is measured; the first process of a loop is told of them."""

    def __init__(self, connection: Connection | None) -> None:
        self._connection, self._begin = connection, 0.0

    def ready(self, loss: float | None) -> None:
        """Say that it is ready, after its first steps. loss: of the very first, or None if the weights are not ours."""
        self._say(loss)

    def begin(self) -> None:
        """Wait for this loop's next turn."""
        if self._connection:
            self._connection.recv()
        if dist.is_initialized():
            dist.barrier()
        self._begin = time.perf_counter()

    def end(self) -> None:
        """Say how many seconds it took."""
        self._say(time.perf_counter() - self._begin)

    def _say(self, number: float | None) -> None:
        if self._connection:
            self._connection.send(number)


class MeasuredLoop:
    """A loop as the process that measures it sees it. It runs in processes of its own until close()."""

    def __init__(self, name: str, work: Callable[..., None], settings: dict[str, Any], *, processes: int) -> None:
        """Start work(turns, rank, processes, **settings) in each. name: for an error."""
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes = []
        for rank in range(processes):
            # On one process, it would make transformers' Trainer wrap its model in DDP.
            environment = launcher_environment(rank, processes, self._store.port) if processes > 1 else {}
            arguments = (environment, theirs if rank == 0 else None, work, rank, processes, settings)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
        theirs.close()

    def first_loss(self) -> float | None:
        """The loss of the loop's very first step, once it is ready; None if its weights are not ours."""
        return self._receive()

    def turn(self) -> float:
        """Let it take its turn; returns the seconds."""
        self._connection.send("go")
        return cast(float, self._receive())

    def close(self) -> None:
        """End its processes, all at once: none is to report that another one has ended."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _receive(self) -> float | None:
        try:
            while not self._connection.poll(1):
                if not all(process.is_alive() for process in self._processes):
                    raise EOFError
            return cast("float | None", self._connection.recv())
        except (EOFError, ConnectionError):
            for process in self._processes:
                process.join(timeout=10)  # it closes its end of the pipe a little before
            codes = [process.exitcode for process in self._processes if process.exitcode is not None]
            raise UserError(
                f"the loop {self._name} failed with exit code {codes[0] if codes else '?'}, see above"
            ) from None


def _work(
    environment: dict[str, str],
    connection: Connection | None,
    work: Callable[..., None],
    rank: int,
    processes: int,
    settings: dict[str, Any],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that measures, which ends this one
    os.environ |= environment
    work(Turns(connection), rank, processes, **settings)


def launcher_environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """What the launcher of a node gives to a process."""
    node, place = divmod(rank, NODE)
    given = {"RANK": rank, "LOCAL_RANK": place, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": min(NODE, processes)}
    given |= {"GROUP_RANK": node, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    loopback = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": socket.if_indextoname(1)}
    return {name: str(value) for name, value in given.items()} | loopback | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
