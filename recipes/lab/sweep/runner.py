"""Train a recipe of a sweep or a ladder in processes of its own, and find out how they ended. Imports no torch."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from parallel.errors import UserError
from recipes.files import screen
from recipes.files.atomic import write_whole
from recipes.files.exit_codes import ended_by, exit_code, with_parent
from recipes.recipe.load import to_toml
from recipes.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parents[3]

Outcome = Literal["done", "out of memory", "crashed", "refused", "timed out"]
MARK = "SHARDWRIGHT_SWEEP_RUN"
"""Environment variable that marks a run's processes. The group does not: torchrun gives each worker its own session."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLITE_SECONDS = 35.0
"""How long an interrupted run may take to finish its step and exit."""
LONGEST_REASON = 300

# On CUDA: torch, runtime and driver, Triton, cuBLAS and cuDNN, NCCL. On CPUs: torch, C++, Python, Linux.
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA (driver )?(error: )?out of memory|Triton Error \[CUDA\]: out of memory"
    r"|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|Cuda failure (\d+ )?'out of memory'"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc|MemoryError\b|\[Errno 12\]"
)
RAISED = re.compile(r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)


class Stopped(KeyboardInterrupt):
    """A signal asks the sweep to stop: Ctrl-C, SIGTERM from a scheduler, or SIGHUP from a closed terminal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def stop_signals() -> Iterator[None]:
    """Raise Stopped at a signal; otherwise SIGTERM and SIGHUP would leave an orphaned run on the device."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    before = {number: signal.getsignal(number) for number in STOPS}
    for number in STOPS:
        if number != signal.SIGHUP or before[number] != signal.SIG_IGN:  # nohup keeps working
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code_of(work: Callable[[], int], *, interrupted: str) -> int:
    """The exit code that `work` returns; 2 or 71 after a UserError, 128 + n after signal n, each with a message."""
    try:
        with stop_signals():
            return work()
    except UserError as error:
        with suppress(OSError):  # nobody may read standard error any more
            screen.say(error, to=2)
        return exit_code(error)
    except Stopped as stop:
        with suppress(OSError):
            screen.say(f"\n{interrupted}", to=2)
        return ended_by(stop.number)


def say(line: str) -> None:
    """Print a line; a command goes on when its terminal is gone."""
    screen.Screen().write(f"{screen.safe(line)}\n")


@dataclass(frozen=True)
class Ended:
    """How a run ended; reason: why it failed, or empty."""

    outcome: Outcome
    reason: str
    seconds: float


def write_recipe(recipe: Recipe, folder: Path) -> Path:
    """Write a run of this folder as a file that scripts/run.sh takes. Raises UserError if it cannot be written."""
    path = folder / "recipes" / f"{recipe.run.name}.toml"
    try:
        for needed in (path.parent, folder / "logs"):
            needed.mkdir(parents=True, exist_ok=True)
        write_whole(path, to_toml(recipe))  # a task of an array may read it now
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; write another --output") from None
    return path


def train_apart(recipe: Recipe, folder: Path, *, processes: int, timeout: float) -> Ended:
    """Train a recipe in processes of its own, started as scripts/run.sh starts them; their output goes to logs/."""
    words = ["train.py", str(write_recipe(recipe, folder))]
    return launch(words, folder / "logs" / recipe.run.name, processes=processes, timeout=timeout)


def launch(words: Sequence[str], logs: Path, *, processes: int, timeout: float) -> Ended:
    """Run a script in processes of its own, which share the cores. Output goes to LOGS.out and LOGS.err."""
    start = [sys.executable, str(ROOT / "scripts/launch.py"), "--standalone", f"--nproc-per-node={processes}"]
    return run(
        [*start, str(ROOT / words[0]), *words[1:]],
        stdout=Path(f"{logs}.out"),
        stderr=Path(f"{logs}.err"),
        timeout=timeout,
        environment={"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)), **os.environ},
    )


def run(command: Sequence[str], *, stdout: Path, stderr: Path, timeout: float, environment: dict[str, str]) -> Ended:
    """Run a command and return how it ended; none of its processes is left afterwards.

    On KeyboardInterrupt (see stop_signals), the command is asked to stop, and the exception continues once it has.

    Args:
        command: program and arguments.
        stdout: file for its standard output.
        stderr: file for its standard error.
        timeout: seconds after which it is killed.
        environment: its environment variables.
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
                start_new_session=True,  # otherwise Ctrl-C reaches it twice, from the terminal and from us
            )
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            if process is not None:
                with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second signal ends the wait
                    process.send_signal(signal.SIGINT)  # as Ctrl-C does
                    process.wait(POLITE_SECONDS)
            raise
        finally:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # another signal here would leave processes
            _kill_all(mark, process)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    seconds = time.monotonic() - begin
    errors = stderr.read_text(encoding="utf-8", errors="replace")
    if code is None:
        return Ended("timed out", f"no end after {timeout:g} s; all its processes were killed", seconds)
    return Ended(*outcome_and_reason(code, errors), seconds)


def outcome_and_reason(code: int, errors: str) -> tuple[Outcome, str]:
    """How a run ended and why, from its exit code and standard error."""
    if code == 0:
        return "done", ""
    launcher_lines = [line for line in errors.splitlines() if line.startswith("launch: ")]
    said = "\n".join(line for line in errors.splitlines() if not line.startswith("launch: "))
    raised = RAISED.findall(said)
    for line in (*raised, *said.splitlines()):
        if OUT_OF_MEMORY.search(line) and "Warning" not in line:
            return "out of memory", short_reason(line)
    if code == 2:
        return "refused", short_reason(said)
    if raised:
        return "crashed", short_reason(raised[-1])
    last = launcher_lines[-1].removeprefix("launch: ") if launcher_lines else said.rstrip().rpartition("\n")[2]
    return "crashed", short_reason(last or f"exit code {code}")


def short_reason(text: str) -> str:
    """The text on one line of limited length."""
    return textwrap.shorten(text, LONGEST_REASON, placeholder="...")


def _kill_all(mark: str, process: subprocess.Popen[bytes] | None) -> None:
    """Kill what is left of a run, the launcher first so that it restarts nothing. None: it had not started."""
    if process is not None and process.poll() is None:
        process.kill()
        process.wait()
    if not Path("/proc/self/environ").exists():  # not Linux: only the process group is known
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return
    end = time.monotonic() + 10
    killed: set[int] = set()
    while ((left := processes_with(mark)) or any(map(_exists, killed))) and time.monotonic() < end:
        for number in left:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        killed.update(left)
        time.sleep(0.05)


def _exists(number: int) -> bool:
    """Whether a process still exists. A dying one gives up its environment before its files, and so its GPU memory."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def processes_with(mark: str) -> list[int]:
    """Processes that inherited this mark (Linux only). Zombies are not among them: they have no environment."""
    wanted = f"{MARK}={mark}".encode()
    numbers = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # of another user, or ended
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    numbers.append(int(folder.name))
    return numbers
