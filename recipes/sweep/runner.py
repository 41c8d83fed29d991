"""One run of a sweep as processes of its own, and how they ended. Imports no torch."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from recipes.files.exit_codes import with_parent

Outcome = Literal["done", "out of memory", "crashed", "refused", "timed out"]
MARK = "SHARDWRIGHT_SWEEP_RUN"
"""Environment variable by which all processes of a run are found again, wherever they moved to: torchrun gives each
worker a session of its own, out of reach of the launcher's process group."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLITE_SECONDS = 35.0
"""How long an interrupted run may take to finish its step and end by itself."""
LONGEST_REASON = 300

# Of CUDA: torch, runtime and driver, Triton, cuBLAS and cuDNN, NCCL. Of CPUs: torch, C++, Python, Linux.
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA (driver )?(error: )?out of memory|Triton Error \[CUDA\]: out of memory"
    r"|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|Cuda failure (\d+ )?'out of memory'"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc|MemoryError\b|\[Errno 12\]"
)
RAISED = re.compile(r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)


class Stopped(KeyboardInterrupt):
    """A signal asks for the end: Ctrl-C, a scheduler's or that of a terminal that closes."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def stop_signals() -> Iterator[None]:
    """Raise Stopped at a signal: without it SIGTERM and SIGHUP would leave a run without its parent, on its device."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    before = {number: signal.getsignal(number) for number in STOPS}
    for number in STOPS:
        if number != signal.SIGHUP or before[number] != signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say_stopped(text: str) -> None:
    """On standard error, if it is still there: a terminal that sent SIGHUP is gone."""
    with suppress(OSError):
        print(f"\n{text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Ended:
    """How a run ended, and why where it did not go well."""

    outcome: Outcome
    reason: str
    seconds: float


def run(command: Sequence[str], *, stdout: Path, stderr: Path, timeout: float, environment: dict[str, str]) -> Ended:
    """Run the command to its end, or to `timeout` seconds. None of its processes is there afterwards.

    Its output goes to the two files. A KeyboardInterrupt (see stop_signals) asks it to end, and is raised again when it
    has ended.
    """
    mark = uuid.uuid4().hex
    begin = time.monotonic()
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process: subprocess.Popen[bytes] | None = None
        code: int | None = None
        try:
            process = subprocess.Popen(
                with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment | {MARK: mark},
                start_new_session=True,  # else Ctrl-C would reach it twice, from the terminal and from us
            )
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            if process is not None:
                _end_politely(process)
            raise
        finally:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # else one more signal would leave some of them
            _kill_all(mark, process)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    seconds = time.monotonic() - begin
    errors = stderr.read_text(encoding="utf-8", errors="replace")
    if code is None:
        return Ended("timed out", f"no end after {timeout:g} s; all its processes were killed", seconds)
    return Ended(*explain(code, errors), seconds)


def explain(code: int, errors: str) -> tuple[Outcome, str]:
    """Outcome and reason of an exit code and what was on standard error."""
    if code == 0:
        return "done", ""
    said_by_launcher = [line for line in errors.splitlines() if line.startswith("launch: ")]
    own = "\n".join(line for line in errors.splitlines() if not line.startswith("launch: "))
    raised = RAISED.findall(own)
    for line in (*raised, *own.splitlines()):
        if OUT_OF_MEMORY.search(line) and "Warning" not in line:
            return "out of memory", _short(line)
    if code == 2:
        return "refused", _short(own)
    if raised:
        return "crashed", _short(raised[-1])
    last = said_by_launcher[-1].removeprefix("launch: ") if said_by_launcher else _last_line(own)
    return "crashed", _short(last or f"exit code {code}")


def _short(text: str) -> str:
    """On one line, without ends that say little."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3] + "..."


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _end_politely(process: subprocess.Popen[bytes]) -> None:
    """Ask for the end as Ctrl-C does, and wait; a second signal ends the waiting."""
    try:
        process.send_signal(signal.SIGINT)
        process.wait(POLITE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass


def _kill_all(mark: str, process: subprocess.Popen[bytes] | None) -> None:
    """Kill what is left of a run, its launcher first lest it replaces what is killed. None: it was about to start."""
    if process is not None and process.poll() is None:
        process.kill()
        process.wait()
    if not Path("/proc/self/environ").exists():  # no Linux: its process group is all that can be found
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return
    end = time.monotonic() + 10
    while (left := processes_with(mark)) and time.monotonic() < end:
        for number in left:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.05)


def processes_with(mark: str) -> list[int]:
    """Processes that inherited this mark. Linux only; ended ones that nobody has waited for have no environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # another user's, or gone
                continue
            if wanted in variables:
                found.append(int(folder.name))
    return found
