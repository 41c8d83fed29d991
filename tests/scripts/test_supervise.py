"""RESTARTS=N scripts/run.sh on one node; tests/scripts/test_nodes.py has several."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from os import kill
from pathlib import Path

import pytest

from recipes.files.exit_codes import PREEMPTED, REFUSED
from tests.commands import rank_of_fork
from tests.processes import descendants, untimed, wait_for
from tests.scripts.nodes import EVERY, ROOT, arguments, launch, losses, reached, run_sh

pytestmark = pytest.mark.slow


def worker(process: int) -> int:
    for child in descendants(process):
        with suppress(OSError):
            if rank_of_fork(child) == 1:
                return child
    raise AssertionError("no process of rank 1")


def test_a_run_restarts_after_a_crash_but_not_after_a_signal(tmp_path: Path, corpus: Path) -> None:
    words = arguments(tmp_path, corpus, "run", "--run.steps", "100000", "--mesh.tensor", "2")
    process = launch(tmp_path, words, NPROC="2", RESTARTS="1")
    wait_for("a checkpoint", lambda: reached(tmp_path, "run", EVERY + 2))
    kill(worker(process.pid), signal.SIGKILL)
    log = tmp_path / "runs" / "run" / "log.txt"
    wait_for("the restart", lambda: "resumed from " in log.read_text())
    wait_for("steps of it", lambda: len(losses(tmp_path, "run")) >= 3 * EVERY)
    process.terminate()
    out, err = process.communicate()
    assert process.returncode == PREEMPTED, err
    assert "SIGTERM: interrupted after step " in out
    told = [line for line in err.splitlines() if not line.startswith("[rank")]  # rank 0 may have met the loss itself
    assert len(told) == 3, err
    killed, crashed, stopped = untimed("\n".join(told)).splitlines()
    assert killed == "launch: rank 1 was killed by SIGKILL (often: out of memory)"
    assert crashed.startswith("supervise: attempt 1 crashed, exit code 137; newest checkpoint: step ")
    assert stopped.startswith("launch: SIGTERM: ")
    assert [step for step, _ in losses(tmp_path, "run")] == list(range(1, len(losses(tmp_path, "run")) + 1))


def test_a_crash_loop_stops_with_the_reason(tmp_path: Path, corpus: Path) -> None:
    """The worker crashes when it imports torch, which the check of the recipe does not."""
    (tmp_path / "torch.py").write_text("raise SystemExit(3)")
    process = run_sh(tmp_path, arguments(tmp_path, corpus, "loop"), NPROC="1", RESTARTS="9", PYTHONPATH=str(tmp_path))
    out, err = process.communicate()
    assert (process.returncode, out) == (3, "")
    ended = "launch: rank 0 ended with exit code 3"
    crashed = "supervise: attempt {} crashed, exit code 3; newest checkpoint: step 0"
    assert untimed(err).splitlines() == [
        *(line.format(n) for n in (1, 2, 3) for line in (ended, crashed)),
        "supervise: stopped: two restarts got no further than step 0 (a crash loop, or checkpoints too far apart)",
    ]


def test_restarts_that_is_not_a_number_is_refused(tmp_path: Path, corpus: Path) -> None:
    process = run_sh(tmp_path, arguments(tmp_path, corpus, "none"), NPROC="1", RESTARTS="many")
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err == "RESTARTS=many: must be a number of restarts, 0 or more\n"


@pytest.mark.parametrize("command", [("bash", "scripts/slurm.sbatch"), (sys.executable, "scripts/slurm.py")])
def test_the_slurm_script_says_what_to_write_outside_of_slurm(command: tuple[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [command[0], ROOT / command[1], "configs/smollm3_debug.toml"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    expected = "slurm: not in a SLURM job: sbatch --nodes=N scripts/slurm.sbatch RECIPE, or scripts/run.sh RECIPE\n"
    said = untimed(done.stdout)
    assert done.returncode == REFUSED and said.startswith(expected)
    assert set(said.removeprefix(expected).splitlines()) <= {"slurm: refused: nothing was started"}
