"""The launcher of one process, which needs no torchrun."""

import json
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.files.end import read_end
from recipes.files.exit_codes import PREEMPTED, WRONG, ended_by
from recipes.lab.curves.listing import listing
from tests.commands import Command, run_command
from tests.processes import free_ports
from tests.scripts.nodes import arguments, environment, losses

pytestmark = pytest.mark.slow

LAUNCH = Path(__file__).resolve().parents[3] / "scripts" / "launch.py"
WORKER = """if True:
    import os, signal, sys, time
    what, place = sys.argv[1:]
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE")] == ["0", "1"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    open(place, "w").write(str(os.getpid()))
    if what == "wait":
        time.sleep(60)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(what))
"""
PROVER = """if True:
    import os, runpy, sys
    train, *words = sys.argv[1:]
    if words[-1] == "--prove":
        open("proofs", "a").write(os.environ["RANK"])
        sys.exit(int(open("code").read()))
    sys.argv[:] = [train, *words]
    runpy.run_path(train, run_name="__main__")
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


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(["--nproc-per-node=1"], marks=pytest.mark.exhaustive),
        ["--nnodes=2", "--nproc-per-node=1"],
    ],
)
def test_a_recipe_is_proved_before_the_first_step_and_once_for_the_same_recipe(
    place: list[str], tmp_path: Path, corpus: Path
) -> None:
    nodes, [port] = len(place), free_ports(1)
    network = ["--master-addr=127.0.0.1", f"--master-port={port}"] if nodes > 1 else ["--standalone"]
    recipe, *words = arguments(tmp_path, corpus, "run", "--run.steps", "4", "--run.prove_first", "true")
    (tmp_path / "prover.py").write_text(PROVER)

    def start(code: int, *more: str) -> tuple[set[int], str, str]:
        """With this exit code of the proof: those of the launchers, their screen, and the ranks that proved."""
        (tmp_path / "proofs").write_text("")
        (tmp_path / "code").write_text(str(code))
        train = [str(tmp_path / "prover.py"), str(LAUNCH.parents[1] / "train.py"), str(LAUNCH.parents[1] / recipe)]
        numbers = [[f"--node-rank={node}"] if nodes > 1 else [] for node in range(nodes)]
        command = [[*network, *place, *number, *train, *words, *more] for number in numbers]
        started = [Command(str(LAUNCH), *one, cwd=tmp_path, env=environment()) for one in command]
        said = "".join("".join(one.communicate()) for one in started)
        return {one.wait() for one in started}, said, "".join(sorted((tmp_path / "proofs").read_text()))

    everyone = "0" if place == ["--nproc-per-node=1"] else "01"
    assert start(WRONG)[::2] == ({WRONG}, everyone)
    assert not (tmp_path / "runs").exists()
    codes, said, ranks = start(0)
    assert (codes, ranks) == ({0}, everyone), said
    assert said.count("launch: run.prove_first: the processes prove the recipe, and train if they can") == nodes
    assert len(losses(tmp_path, "run")) == 4
    [proved] = json.loads((tmp_path / "runs/run/proof.json").read_text()).values()
    assert proved["nodes"] == [platform.node()] * nodes
    codes, said, ranks = start(WRONG)
    assert (codes, ranks) == ({0}, ""), said
    assert "this run has its 4 steps already" in said
    assert start(WRONG, "--run.steps", "5")[::2] == ({WRONG}, everyone)
    assert len(losses(tmp_path, "run")) == 4
