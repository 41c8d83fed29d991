"""The processes of a run: how they ended, and that none of them is left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recipes.lab.sweep.runner import Ended, Stopped, outcome_and_reason, processes_with, run, stop_signals
from tests.processes import PATIENCE, wait_for

ROOT = Path(__file__).resolve().parents[4]
# A worker as torchrun starts one, in its own session, that ignores SIGINT and SIGTERM; with children of its own.
STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, __file__], start_new_session=True)
    subprocess.Popen([sys.executable, __file__])
open(f"pid-{os.getpid()}", "w").close()
time.sleep(600)
"""


def finish(tmp_path: Path, code: str, timeout: float = PATIENCE) -> Ended:
    return run(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=tmp_path / "out",
        stderr=tmp_path / "err",
        timeout=timeout,
        environment=dict(os.environ),
    )


@pytest.mark.slow
def test_a_run_with_exit_code_0_is_done_and_its_output_is_kept(tmp_path: Path) -> None:
    ended = finish(tmp_path, "import sys; print('fine'); print('warning', file=sys.stderr)")
    assert (ended.outcome, ended.reason) == ("done", "")
    assert ended.seconds > 0
    assert (tmp_path / "out").read_text() == "fine\n"
    assert (tmp_path / "err").read_text() == "warning\n"


@pytest.mark.slow
def test_a_run_without_enough_memory_is_out_of_memory(tmp_path: Path) -> None:
    ended = finish(tmp_path, "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30,) * 2); b'x' * 2**31")
    assert (ended.outcome, ended.reason) == ("out of memory", "MemoryError")


@pytest.mark.parametrize(
    ("code", "errors", "outcome", "reason"),
    [
        (0, "torch.OutOfMemoryError: caught and logged", "done", ""),
        (2, "1 problem in x.toml\n  float8: no units\nlaunch: over", "refused", "1 problem in x.toml float8: no units"),
        (1, "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried\nValueError: x", "out of memory", None),
        (1, "Traceback\nValueError: a\n\nDuring handling\nmine.OtherError: b\nnote", "crashed", "mine.OtherError: b"),
        (137, "launch: rank 3 was killed by SIGKILL (often: out of memory)", "crashed", None),
        (139, "", "crashed", "exit code 139"),
        (1, "x.py:3: UserWarning: this may run out of memory soon\nValueError: a", "crashed", "ValueError: a"),
        (
            1,
            "UserWarning: CUDA out of memory, smaller blocks\nValueError: a",
            "crashed",
            "ValueError: a",
        ),
        (1, "RuntimeError: the ring ran out of memory of its neighbours", "crashed", None),
        (1, "torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be", "out of memory", None),
        (1, "RuntimeError: CUDA driver error: out of memory", "out of memory", None),
        (1, "RuntimeError: Triton Error [CUDA]: out of memory", "out of memory", None),
        (
            1,
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "out of memory",
            None,
        ),
        (
            1,
            "torch.distributed.DistBackendError: NCCL error\nLast error:\nCuda failure 2 'out of memory'",
            "out of memory",
            None,
        ),
        (
            1,
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory:"
            " you tried to allocate 256000000000000 bytes. Error code 12 (Cannot allocate memory)",
            "out of memory",
            None,
        ),
        (
            134,
            "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
            "out of memory",
            None,
        ),
        (1, "OSError: [Errno 12] Cannot allocate memory", "out of memory", None),
    ],
)
def test_exit_code_and_standard_error_give_outcome_and_reason(
    code: int, errors: str, outcome: str, reason: str | None
) -> None:
    found = outcome_and_reason(code, errors)
    assert found[0] == outcome
    if reason is not None:
        assert found[1] == reason
    else:
        assert found[1].removeprefix("[rank1]: ") in errors.replace("launch: ", "")


def stubborn(tmp_path: Path) -> list[str]:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    return [sys.executable, str(tmp_path / "stubborn.py"), "with children"]


def running(folder: Path, command: list[str], signals: str, *, children: int) -> subprocess.Popen[str]:
    """A process that runs the command, once its children have started. signals: what decides about signals."""
    code = f"""
        import os, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup
        sys.path.insert(0, {str(ROOT)!r})
        from contextlib import nullcontext
        from pathlib import Path
        from recipes.lab.sweep.runner import Stopped, run, stop_signals
        try:
            with {signals}():
                run({command!r}, stdout=Path("out"), stderr=Path("err"), timeout=600, environment=dict(os.environ))
        except Stopped as stop:
            sys.exit(100 + stop.number)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True)
    wait_for("its children", lambda: len(list(folder.glob("pid-*"))) == children)
    return process


def alive(folder: Path) -> list[int]:
    """The stubborn processes that still run; zombies do not count."""
    found = []
    for path in folder.glob("pid-*"):
        try:
            state = Path(f"/proc/{path.name.removeprefix('pid-')}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(int(path.name.removeprefix("pid-")))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")
def test_a_run_that_hangs_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = subprocess.Popen.wait

    def wait_for_start(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        """The time-out passes when all run, however fast or slow this machine is."""
        if timeout != 5:
            return wait(process, timeout)
        wait_for("three processes", lambda: len(list(tmp_path.glob("pid-*"))) == 3)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_start)
    ended = run(
        stubborn(tmp_path), stdout=tmp_path / "out", stderr=tmp_path / "err", timeout=5, environment=dict(os.environ)
    )
    assert (ended.outcome, ended.reason) == ("timed out", "no end after 5 s; all its processes were killed")
    assert alive(tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")
def test_a_second_interrupt_kills_a_run_that_ignores_the_first(tmp_path: Path) -> None:
    process = running(tmp_path, stubborn(tmp_path), "nullcontext", children=3)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None  # still waiting for a clean exit
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert alive(tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_asks_the_run_to_stop_and_kills_its_other_processes(number: signal.Signals, tmp_path: Path) -> None:
    """The run stops at Ctrl-C; its two children ignore every signal but SIGKILL."""
    stubborn(tmp_path)
    (tmp_path / "polite.py").write_text(
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "for _ in range(2):\n"
        "    subprocess.Popen([sys.executable, 'stubborn.py'], start_new_session=True)\n"
        "try:\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    open('asked', 'w').close()\n"
    )
    process = running(tmp_path, [sys.executable, "polite.py"], "stop_signals", children=2)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 100 + number
    assert (tmp_path / "asked").exists()
    assert alive(tmp_path) == []


def test_sighup_stays_ignored_under_nohup() -> None:
    with ignoring_hangups(), stop_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.1)


def test_sigterm_stops_the_sweep_under_nohup() -> None:
    with ignoring_hangups(), pytest.raises(Stopped), stop_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


@contextmanager
def ignoring_hangups() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_processes_without_the_mark_are_not_found() -> None:
    assert processes_with("no such mark") == []
