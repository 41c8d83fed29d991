"""Tracking at Weights & Biases: what goes wrong there neither ends nor delays a run. All of it with the real wandb."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.full_disk import files_of_at_most
from tests.processes import PATIENCE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
KEY = "0123456789" * 4

# Writes six rows. After the third one it waits until wandb has taken them, and then for the test to do harm. It says
# which threads called wandb, of which a server or a process may keep them waiting.
RUN = """
import os, sys, threading, time
from contextlib import suppress
from pathlib import Path
from recipes.metrics import tracking
from recipes.metrics.config import MetricsConfig
from recipes.metrics.writer import MetricsWriter
tracking.END_SECONDS = float(os.environ.get("END_SECONDS", tracking.END_SECONDS))
folder = Path(sys.argv[1])
said, callers = [], set()
with suppress(ImportError):
    import wandb
    def noting(work):
        def call(*arguments, **options):
            callers.add(threading.current_thread().name)
            return work(*arguments, **options)
        return call
    wandb.init, wandb.Run.log, wandb.Run.finish = map(noting, (wandb.init, wandb.Run.log, wandb.Run.finish))
config = MetricsConfig(wandb=True, wandb_project="p")
writer = MetricsWriter(folder, config, enabled=True, run_name="r", recipe={}, before={}, log=said.append)
for step in range(1, 7):
    writer.write({"step": step, "loss": 1.5, "tried": step})
    if step == 3 and len(sys.argv) > 2:
        while not writer._sinks["wandb"]._tracker._rows.empty():
            time.sleep(0.05)
        print("ready", flush=True)
        sys.stdin.readline()
writer.close()
print(*callers, *said, sep="\\n", flush=True)
os._exit(0)  # as a run ends
"""


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    folder.mkdir()
    home = {"PATH": "/usr/bin:/bin", "HOME": str(folder.parent / "home"), "WANDB_SILENT": "true"}
    command = [sys.executable, "-c", RUN, folder, *arguments]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=home | environment, text=True, **pipes)


def ended(run: subprocess.Popen[str], folder: Path) -> str:
    """What the run said. Every row must be in metrics.jsonl, and only a thread of its own may have called wandb."""
    out, err = run.communicate("\n", timeout=PATIENCE)
    assert run.returncode == 0, err
    rows = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 4, 5, 6]
    assert "MainThread" not in out
    return out.removeprefix("Weights & Biases\n").rstrip("\n")


def recorded(folder: Path) -> bytes:
    """What wandb keeps on the disk for `wandb sync`."""
    return b"".join(file.read_bytes() for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")))


def core(run: subprocess.Popen[str]) -> int:
    """The process of wandb-core, once it has taken three rows."""
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    children = Path(f"/proc/{run.pid}/task").glob("*/children")
    return int(" ".join(file.read_text() for file in children).split()[0])


def test_an_unreachable_server_leaves_the_run_tracked_offline(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    environment = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "1"}
    said = ended(start(folder, WANDB_HTTP_TIMEOUT="1", **environment), folder)
    assert "Weights & Biases: offline, because it cannot start (CommError: Timed out while retrying" in said
    assert f"`wandb sync {folder}/wandb/offline-run-*` sends it later" in said
    assert recorded(folder).count(b"tried") >= 6


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"WANDB_API_KEY": "short"}, "WANDB_API_KEY invalid: API key must have 40+ characters, has 5."),
        ({"WANDB_MODE": "online"}, "No API key configured"),
    ],
)
def test_a_key_that_cannot_work_leaves_the_run_tracked_offline(
    variables: dict[str, str], reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    said = ended(start(folder, **variables), folder)
    assert "offline, because it cannot start (" in said and f": {reason}" in said
    assert recorded(folder).count(b"tried") >= 6


def test_settings_that_wandb_refuses_turn_tracking_off(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = ended(start(folder, WANDB_MODE="rubbish"), folder)
    assert "tracking is off, and metrics.jsonl has every row" in said
    assert len(said.splitlines()) <= 5


def test_tracking_starts_again_after_its_process_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(folder, "wait")
    os.kill(core(run), signal.SIGKILL)
    said = ended(run, folder)
    assert "tracking starts again, and metrics.jsonl has every row" in said
    files = [path.name for path in folder.glob("wandb/offline-run-*/run-*.wandb")]
    assert len(files) == 2 and len(set(files)) == 1  # of one run
    assert recorded(folder).count(b"tried") >= 6


def test_a_full_disk_puts_no_tracebacks_of_wandbs_log_on_the_screen(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with files_of_at_most(1000):  # its debug.log is longer, six rows are shorter
        run = start(folder, WANDB_MODE="offline")
    out, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0 and len((folder / "metrics.jsonl").read_text().splitlines()) == 6
    assert "Logging error" not in out + err and "Traceback" not in out + err


def test_a_missing_wandb_turns_tracking_off(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("raise ImportError('No module named wandb')\n")
    folder = tmp_path / "run"
    said = ended(start(folder, PYTHONPATH=str(tmp_path)), folder)
    assert said == "Weights & Biases: off, because wandb cannot be imported (ImportError: No module named wandb);" + (
        " metrics.jsonl has every row"
    )


def test_a_silent_wandb_process_delays_neither_a_row_nor_the_end_for_long(tmp_path: Path) -> None:
    """The run ends while it is still silent."""
    folder = tmp_path / "run"
    run = start(folder, "wait", END_SECONDS="2")
    process = core(run)
    os.kill(process, signal.SIGSTOP)
    assert run.stdin is not None
    run.stdin.write("\n")
    run.stdin.flush()
    run.wait(PATIENCE)
    os.kill(process, signal.SIGKILL)  # it holds the pipes open
    said = ended(run, folder)
    assert "no answer within 2 s" in said and "wandb sync" in said
