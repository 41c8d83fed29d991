"""Real processes: a function run by several, joined by gloo as torchrun would start them, and looks at others."""

import os
import secrets
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.multiprocessing as multiprocessing


def wait_for(what: str, condition: Callable[[], object], *, seconds: float = 300) -> None:
    """Fails after a time that only a hang can take."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.05)


def rank_of(process: int) -> int | None:
    """Of a process that torchrun has started."""
    variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next((int(value[5:]) for value in variables if value.startswith(b"RANK=")), None)


def free_ports(count: int) -> list[int]:
    """Below those that the system gives out by itself (from 32768 on Linux): nobody takes them before they are used."""
    found: set[int] = set()
    while len(found) < count:
        port = secrets.choice(range(10_000, 32_000))  # other processes draw, too, all seeded alike
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


def run_processes(count: int, function: Callable[..., Any], *arguments: Any, timeout: float = 240) -> list[Any]:
    """Call `function(*arguments)` in `count` fresh processes with the launcher's environment; results by rank.

    A process that raises or hangs fails the caller with its traceback; none is left behind.
    """
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    [port] = free_ports(1)
    processes = [
        context.Process(target=_work, args=(rank, count, port, results, function, arguments)) for rank in range(count)
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
        for process in processes:
            process.join(timeout=10)
            process.kill()


def _wait(results: Any, processes: list[Any], timeout: float) -> bool:
    """Whether an answer came before the time-out and before a process died without one."""
    import time

    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if not results.empty():
            return True
        if any(process.exitcode not in (None, 0) for process in processes):
            time.sleep(0.5)
            return not results.empty()
        time.sleep(0.02)
    return False


def _work(rank: int, count: int, port: int, results: Any, function: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    try:
        import torch

        torch.set_num_threads(1)
        results.put((rank, function(*arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise SystemExit(1) from None
