"""The commands of this checkout, without starting Python and importing torch anew in each of their processes.

They run in forks of the server of tests/processes.py, and Python commands of this checkout that they start are forks of
them. Processes, signals, connections and exit codes are real. Only a new interpreter shows what a command imports, so
each command has a real start in its tests, too.
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch

from recipes.files.exit_codes import DIE_WITH_PARENT, SIGNALS
from tests.processes import PATIENCE, ROOT, process_context

PR_SET_PDEATHSIG = 1  # prctl(2)


class Command:
    """A running command, with what tests use of subprocess.Popen."""

    def __init__(
        self, *command: object, cwd: Path = ROOT, env: dict[str, str] | None = None, network: Path | None = None
    ) -> None:
        """A command in a fork. It must not start others once it has run torch.

        What Python reads at its start and torch at its import, such as PYTHONPATH and CXX, has no effect.

        command: a script and its arguments. env: all variables; None = this process's. network: its namespace.
        """
        pipes = [process_context().Pipe(duplex=False) for _ in range(2)]
        writers = [writer for _, writer in pipes]
        arguments = (list(map(str, command)), cwd, dict(os.environ) if env is None else env, writers, network)
        self._process = process_context().Process(target=_begin, args=arguments)
        self._process.start()
        self.pid: int = self._process.pid
        self.stdout, self.stderr = (os.fdopen(os.dup(reader.fileno())) for reader, _ in pipes)
        for end in (end for pipe in pipes for end in pipe):
            end.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        self._process.join(PATIENCE)
        assert self.returncode is not None, f"process {self.pid} did not end"
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """Standard output and standard error, when no process holds them any more."""
        with ThreadPoolExecutor() as threads:
            out, err = threads.map(lambda stream: stream.read(), (self.stdout, self.stderr))
        self.wait()
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_command(*command: object, cwd: Path = ROOT, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a script."""
    started = Command(*command, cwd=cwd, env=env)
    out, err = started.communicate()
    return started.wait(), out, err


def rank_of_fork(process: int) -> int | None:
    """The rank of a worker, which names its threads by it. /proc shows the launcher's variables and command line."""
    with suppress(OSError):  # it has ended
        name = Path(f"/proc/{process}/comm").read_text()
        return int(name.removeprefix("rank ")) if name.startswith("rank ") else None
    return None


def _begin(command: list[str], cwd: Path, env: dict[str, str], writers: list[Any], network: Path | None) -> None:
    if network and ctypes.CDLL(None, use_errno=True).setns(namespace := os.open(network, os.O_RDONLY), 0):
        raise OSError(ctypes.get_errno(), f"{network}, {namespace}: setns")
    os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, writer in enumerate(writers, start=1):
        os.dup2(writer.fileno(), number)
        writer.close()
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]  # a new Python has not chosen one
    start = subprocess.Popen.__init__

    def start_forked(process: Any, args: Any, *more: Any, **options: Any) -> None:
        if run := in_this_checkout(args):
            sys.stdout.flush()
            options["preexec_fn"] = partial(_become, *run, options.get("env"))
        start(process, args, *more, **options)

    subprocess.Popen.__init__ = start_forked  # type: ignore[assignment, method-assign]
    sys.exit(_run([str(ROOT / command[0]), *command[1:]], env))


def in_this_checkout(command: str | Sequence[str | Path]) -> tuple[list[str], str, bool] | None:
    """Script and arguments of a Python command, the signal at its parent's end, and whether its output is unbuffered.

    None for other commands.
    """
    words, number = [] if isinstance(command, str) else list(map(str, command)), ""
    if tuple(words[:2]) == DIE_WITH_PARENT:
        number, words = words[2], words[3:]
    if unbuffered := words[1:2] == ["-u"]:
        del words[1]
    if len(words) < 2 or words[0] != sys.executable or not words[1].startswith(str(ROOT)):
        return None
    return words[1:], number, unbuffered


def _become(command: list[str], number: str, unbuffered: bool, env: dict[str, str] | None) -> None:
    """Between fork and exec: become the new process, and end."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the parent's store and connections end with it
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None  # type: ignore[attr-defined]
    signal.set_wakeup_fd(-1)
    for stop in (*SIGNALS, signal.SIGHUP):
        signal.signal(stop, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if number:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, getattr(signal, f"SIG{number}"))
    code = 1
    try:
        code = _run(command, dict(os.environ) if env is None else env, buffering=1 if unbuffered else -1)
    finally:
        os._exit(code)


def _run(command: list[str], env: dict[str, str], *, buffering: int = -1) -> int:
    """Run a script in this process as a new Python does. Returns the exit code."""
    os.environ.clear()
    os.environ.update(env)
    # The launcher turns torch's warnings in C++ off before it imports torch, which this process has done already.
    with suppress(OSError, ValueError):  # not on macOS
        c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
        ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level").value = 2 if Path(command[0]).name == "launch.py" else 1
        if "RANK" in env:
            Path("/proc/self/comm").write_text(f"rank {env['RANK']}")
    sys.stdout = open(1, "w", buffering, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, closefd=False)  # noqa: SIM115
    sys.argv[:] = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        code = 0
    with suppress(OSError):
        sys.stdout.flush()
    return code
