"""Real processes for tests: run a function on several ranks joined by gloo, and look at processes that run."""

import contextlib
import ipaddress
import multiprocessing.forkserver
import os
import re
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch.distributed import TCPStore

ROOT = Path(__file__).parents[1]
PATIENCE = 1200 * float(os.environ.get("TEST_PATIENCE", "1"))
"""Seconds after which a test stops waiting: only a hang takes as long, on a machine ten times slower than ours too."""


def wait_for(what: str, condition: Callable[[], object]) -> None:
    """Wait until the condition holds; fail after a time that only a hang can take."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {PATIENCE:.0f} s"
        time.sleep(0.05)


def rank_of(process: int) -> int | None:
    """The rank that torchrun gave to this process; None where it did not start it."""
    variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next((int(value[5:]) for value in variables if value.startswith(b"RANK=")), None)


def descendants(of: int) -> list[int]:
    """Process ids of a process's children, their children, and so on."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    processes = [of]
    for process in processes:
        processes += [child for child, parent in parents.items() if parent == process]
    return processes[1:]


def free_ports(count: int) -> list[int]:
    """Free ports below the range that the system picks from (on Linux from 32768 on)."""
    found: set[int] = set()
    while len(found) < count:
        port = secrets.choice(range(10_000, 32_000))  # not random: every test seeds it alike
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


def until_the_terminal_closes(leader: int) -> bytes:
    """What programs write to a pseudo-terminal, whose other end must be closed here, until the last of them ends."""
    shown = b""
    with suppress(OSError):  # the end of a terminal
        while piece := os.read(leader, 4096):
            shown += piece
    os.close(leader)
    return shown


def run_processes(
    count: int, function: Callable[..., Any], *arguments: Any, timeout: float = PATIENCE, patience: float = 10
) -> list[Any]:
    """Call `function(*arguments)` in `count` new processes with the launcher's environment; results by rank.

    They may join one process group, once.

    The processes are forked from a server that has imported torch but run none of it (tests/preload.py). A process that
    raises or hangs fails the caller with its traceback; none is left behind.

    Args:
        count: how many processes.
        function: what each of them calls, found by its name in its module.
        arguments: of the function, pickled.
        timeout: seconds until the last answer.
        patience: seconds that processes may take to end after the answers, before they are killed.
    """
    context = process_context()
    results = context.SimpleQueue()
    # As the launcher does: a rank 0 that served it would take it along while others still connect.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    environment = dict(os.environ) | {name: str(value) for name, value in shared.items()} | {"OMP_NUM_THREADS": "1"}
    processes = [
        context.Process(
            target=_work,
            args=(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, results, function, arguments),
        )
        for rank in range(count)
    ]
    try:
        for process in processes:
            process.start()
        answers: dict[int, Any] = {}
        while len(answers) < count:
            assert _wait(results, processes, timeout), f"{count - len(answers)} of {count} processes did not answer"
            rank, answer, error = results.get()
            if error is not None:
                raise AssertionError(f"rank {rank} of {count} failed:\n{error}")
            answers[rank] = answer
        return [answers[rank] for rank in range(count)]
    finally:
        end = time.monotonic() + patience
        for process in (process for process in processes if process.pid is not None):
            process.join(timeout=max(0.0, end - time.monotonic()))
            process.kill()
            process.join()


@cache
def process_context() -> Any:
    """How this test process starts others: forked from a server, or as new interpreters where forking is unsafe.

    CUDA does not survive a fork, and imports may initialize it; nor do macOS's system libraries.
    """
    if sys.platform != "linux" or torch.cuda.is_available():
        return torch.multiprocessing.get_context("spawn")
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    threads = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    os.environ.update(dict.fromkeys(threads, "1"))  # libraries that start their threads when they are loaded start none
    try:
        with contextlib.chdir(ROOT):  # the server finds tests.preload from where it starts
            multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in threads.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return context


def _wait(results: Any, processes: list[Any], timeout: float) -> bool:
    """Whether an answer came before the time-out and before a process died without one."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if not results.empty():
            return True
        if any(process.exitcode not in (None, 0) for process in processes):
            return not results.empty()  # what it sent before it ended is there
        time.sleep(0.02)
    return False


def _work(environment: dict[str, str], results: Any, function: Callable[..., Any], arguments: Any) -> None:
    os.environ.clear()  # the server's, from when it was started
    os.environ.update(environment)
    rank = int(environment["RANK"])
    try:
        torch.set_num_threads(1)
        results.put((rank, function(*arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise SystemExit(1) from None


def listening(processes: Iterable[int]) -> set[tuple[str, int]]:
    """The TCP addresses and ports that these processes, or threads of them, accept connections on. (Linux)"""
    sockets = set()
    for process in processes:
        for file in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):  # it has been closed meanwhile
                sockets.add(os.readlink(file))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                address, port = local.split(":")
                found.add((_address(bytes.fromhex(address)), int(port, 16)))
    return found


def _address(kernel: bytes) -> str:
    """An address as /proc/net shows it: words of the machine's byte order."""
    words = b"".join(
        kernel[at : at + 4][::-1] if sys.byteorder == "little" else kernel[at : at + 4]
        for at in range(0, len(kernel), 4)
    )
    return str(ipaddress.ip_address(words))


def untimed(text: str) -> str:
    """The lines of a log, without the times before them."""
    return re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", "", text, flags=re.MULTILINE)
