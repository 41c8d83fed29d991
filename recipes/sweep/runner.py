"""One run of a sweep as processes of its own, and how they ended. Imports no torch."""

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["done", "out of memory", "crashed", "refused", "timed out"]
MARK = "SHARDWRIGHT_SWEEP_RUN"
"""Environment variable by which all processes of a run are found again, wherever they moved to: torchrun gives each
worker a session of its own, out of reach of the launcher's process group."""
POLITE_SECONDS = 35.0
"""How long an interrupted run may take to finish its step and end by itself."""
LONGEST_REASON = 300

OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|can't allocate memory|not enough memory|Cannot allocate memory|MemoryError"
    r"|std::bad_alloc|CUBLAS_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
RAISED = re.compile(r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """How a run ended, and why where it did not go well."""

    outcome: Outcome
    reason: str
    seconds: float


def run(command: Sequence[str], *, stdout: Path, stderr: Path, timeout: float, environment: dict[str, str]) -> Ended:
    """Run the command to its end, or to `timeout` seconds. None of its processes is there afterwards.

    Its output goes to the two files. A KeyboardInterrupt is passed on to it, and raised again when it has ended.
    """
    mark = uuid.uuid4().hex
    begin = time.monotonic()
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment | {MARK: mark},
            start_new_session=True,  # else Ctrl-C would reach it twice, from the terminal and from us
        )
        code: int | None = None
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            _end_politely(process)
            raise
        finally:
            _kill_all(mark, process)
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
        if OUT_OF_MEMORY.search(line):
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
    """Ask for the end as Ctrl-C does, and wait; a second Ctrl-C ends the waiting."""
    try:
        process.send_signal(signal.SIGINT)
        process.wait(POLITE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass


def _kill_all(mark: str, process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a run, its launcher first lest it replaces what is killed."""
    if process.poll() is None:
        process.kill()
        process.wait()
    if not Path("/proc/self/environ").exists():  # no Linux: its process group is all that can be found
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
