"""The launcher of one process, which needs no torchrun."""

import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.files.end import read_end
from recipes.files.exit_codes import PREEMPTED, ended_by
from recipes.lab.curves.listing import listing
from tests.commands import run_command
from tests.scripts.nodes import arguments, environment

pytestmark = pytest.mark.slow

LAUNCH = Path(__file__).resolve().parents[3] / "scripts" / "launch.py"
WORKER = """if True:
    import os, signal, sys, time
    what, place = sys.argv[1:]
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    open(place, "w").write(str(os.getpid()))
    if what == "wait":
        time.sleep(60)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(what))
"""


def launched(folder: Path, what: str) -> tuple[subprocess.Popen[str], Path]:
    """The launcher of a worker that does this, and the file in which that leaves its process id once it runs."""
    script, place = folder / "worker.py", folder / "pid"
    script.write_text(WORKER)
    words = [str(LAUNCH), "--standalone", "--nproc-per-node=1", str(script), what, str(place)]
    started = subprocess.Popen([sys.executable, "-X", "importtime", *words], stderr=subprocess.PIPE, text=True)
    return started, place


def until_it_runs(place: Path) -> int:
    end = time.monotonic() + 60
    while not (place.exists() and place.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return int(place.read_text())


@pytest.mark.parametrize(("what", "code"), [("0", 0), ("3", 3), ("killed", ended_by(signal.SIGKILL))])
def test_its_exit_code_is_that_of_its_process_and_it_imports_no_torch(tmp_path: Path, what: str, code: int) -> None:
    launcher, _ = launched(tmp_path, what)
    said = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == code, said
    assert "| torch\n" not in said
    assert ("rank 0 was killed by SIGKILL (often: out of memory)" in said) == (what == "killed")


def test_a_signal_reaches_its_process_which_may_save(tmp_path: Path) -> None:
    launcher, place = launched(tmp_path, "wait")
    until_it_runs(place)
    launcher.send_signal(signal.SIGTERM)
    assert "SIGTERM: the workers finish their step" in launcher.communicate(timeout=60)[1]
    assert launcher.returncode == PREEMPTED


def test_its_process_ends_with_it(tmp_path: Path) -> None:
    launcher, place = launched(tmp_path, "wait")
    number = until_it_runs(place)
    launcher.kill()
    launcher.communicate(timeout=60)
    end = time.monotonic() + 20
    while Path(f"/proc/{number}/stat").exists() and " Z " not in Path(f"/proc/{number}/stat").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("killed_once", ended_by(signal.SIGKILL), " was killed by SIGKILL (often: out of memory)"),
        ("fails_in_step", 1, ": ValueError: this rank alone"),
        ("out_of_memory", 78, ": OUT OF MEMORY: the host of rank 1 on "),
    ],
)
def test_what_killed_a_run_is_said_by_name(fault: str, code: int, said: str, tmp_path: Path, corpus: Path) -> None:
    train, ill = str(LAUNCH.parents[1] / "train.py"), LAUNCH.parents[1] / "tests/ill_train.py"
    more = ("--mesh.replicate", "2", "--mesh.shard", "1", "--batch.global_batch_size", "128")  # steps of a second
    recipe, *words = arguments(tmp_path, corpus, "ill", *more)
    launcher = [str(LAUNCH), "--standalone", "--nproc-per-node=2", str(ill), fault, "1", "2", train]
    ended, _, err = run_command(*launcher, str(LAUNCH.parents[1] / recipe), *words, cwd=tmp_path, env=environment())
    assert ended == code, err
    folder = tmp_path / "runs" / "ill"
    assert str(read_end(folder)).startswith(f"rank 1 on {platform.node()}{said}")
    assert f" {listing(folder)[1][1]} ".startswith(f" rank 1 on {platform.node()}{said[:20]}")
    log = (folder / "log.txt").read_text()
    assert "SIGTERM ended the run" not in log and (said in log or said.removeprefix(": ") in log)
