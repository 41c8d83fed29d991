"""Commands whose screen is full, closed or gone: nothing that is only printed changes how they end."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.files.exit_codes import OUT_OF_MEMORY, PREEMPTED, REFUSED
from tests.processes import descendants, rank_of, untimed, wait_for
from tests.scripts.nodes import EVERY, ROOT, arguments, environment, kill, losses, reached

pytestmark = pytest.mark.slow

ENDLESS = ("--run.steps", "100000")


def with_streams(streams: str, *command: str | Path) -> list[str]:
    """The command with its streams redirected as the shell's `command streams` does."""
    return ["bash", "-c", f'exec "$0" "$@" {streams}', *map(str, command)]


def log(folder: Path) -> str:
    return untimed((folder / "runs" / "run" / "log.txt").read_text())


def test_a_run_without_screens_restarts_after_a_crash_and_saves_after_a_signal(tmp_path: Path, corpus: Path) -> None:
    words = arguments(tmp_path, corpus, "run", *ENDLESS)
    variables = environment(NPROC="1", RESTARTS="1")
    command = with_streams("<&- >&- 2>/dev/full", "bash", ROOT / "scripts/run.sh", *words)
    process = subprocess.Popen(command, cwd=tmp_path, env=variables)
    try:
        wait_for("a checkpoint", lambda: process.poll() is not None or reached(tmp_path, "run", EVERY + 2))
        worker = next(child for child in descendants(process.pid) if rank_of(child) is not None)
        os.kill(worker, signal.SIGKILL)
        wait_for("the restart", lambda: process.poll() is not None or "\nresumed from " in log(tmp_path))
        before = len(losses(tmp_path, "run"))
        wait_for("steps of it", lambda: len(losses(tmp_path, "run")) > before + EVERY)
        process.terminate()
        assert process.wait() == PREEMPTED
    finally:
        process.kill()
    assert "SIGTERM: interrupted after step " in log(tmp_path).splitlines()[-1]


def test_a_run_saves_when_its_terminal_is_closed(tmp_path: Path, corpus: Path) -> None:
    words = arguments(tmp_path, corpus, "run", *ENDLESS)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", "bash", str(ROOT / "scripts/run.sh"), *words],
        cwd=tmp_path,
        env=environment(NPROC="2", TERM="xterm"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # ignored if the tests run under nohup
    )
    os.close(theirs)
    try:
        wait_for("a checkpoint", lambda: process.poll() is not None or reached(tmp_path, "run", EVERY + 2))
        os.close(ours)  # the kernel sends SIGHUP
        assert process.wait() == PREEMPTED
    finally:
        kill([*descendants(process.pid), process.pid])
    assert "SIGTERM: interrupted after step " in log(tmp_path)


@pytest.mark.parametrize("streams", ["2>/dev/full", "2> >(true)"])
def test_a_run_out_of_memory_has_its_exit_code_without_screens(streams: str, tmp_path: Path, corpus: Path) -> None:
    ill = [sys.executable, ROOT / "tests/ill_train.py", "out_of_memory", "0", "2"]
    command = with_streams(streams, *ill, *arguments(tmp_path, corpus, "run"))
    assert subprocess.run(command, cwd=ROOT, env=environment()).returncode == OUT_OF_MEMORY
    assert "\nOUT OF MEMORY: " in log(tmp_path)


@pytest.mark.parametrize("streams", ["2>/dev/full", "2>&-", ">&- 2>&-", "2> >(true)"])
def test_a_refusal_has_its_exit_code_without_screens(streams: str, tmp_path: Path) -> None:
    bad = [ROOT / "configs/smollm3_debug.toml", "--run.stepps", "3"]
    train = [sys.executable, ROOT / "train.py", *bad]
    supervise = [sys.executable, ROOT / "scripts/supervise.py", ROOT / "train.py", *bad]
    for command in (train, [*train, "--check"], supervise):
        done = subprocess.run(with_streams(streams, *command), cwd=tmp_path, env=environment(RESTARTS="1"))
        assert done.returncode == REFUSED, command
