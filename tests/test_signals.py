"""Signals to a run in real processes: which, to whom, when. ALL_SIGNALS=1 runs all 72 combinations."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from recipes.bench.crash import descendants
from recipes.files.exit_codes import PREEMPTED, SIGNALS, ended_by
from tests.test_run import ROOT, command, environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")

PHASES = ("import", "start-up", "compile", "step", "validation", "save")
TARGETS = ("one worker", "all", "launcher")
FEW = [
    ("import", "SIGTERM", "all"),
    ("import", "SIGINT", "launcher"),
    ("start-up", "SIGUSR1", "launcher"),
    ("start-up", "SIGTERM", "one worker"),
    ("compile", "SIGINT", "launcher"),
    ("compile", "SIGTERM", "all"),
    ("step", "SIGINT", "launcher"),
    ("step", "SIGTERM", "one worker"),
    ("step", "SIGUSR2", "all"),
    ("validation", "SIGUSR1", "one worker"),
    ("validation", "SIGINT", "all"),
    ("save", "SIGTERM", "launcher"),
    ("save", "SIGUSR2", "one worker"),
]
EVERY = [(phase, number.name, target) for phase in PHASES for number in SIGNALS for target in TARGETS]
MATRIX = EVERY if os.environ.get("ALL_SIGNALS") else FEW


class Started:
    """A run of two processes on small data, and what is on its screen."""

    def __init__(self, folder: Path, corpus: Path, *overrides: str) -> None:
        small = {"run.name": "run", "run.steps": "400", "checkpoint.every": "200", "validation.every": "0"}
        small |= {
            "model.layers": "2",
            "model.width": "64",
            "model.feed_forward_width": "96",
            "schedule.kind": "constant",
        }
        small |= {"schedule.decay_steps": "0", "data.cache": str(corpus.parent / "signals-cache")}
        options = [part for key, value in small.items() for part in (f"--{key}", value)]
        self.folder = folder / "runs" / "run"
        self.process = subprocess.Popen(
            ["bash", *command(corpus, *options, *overrides)],
            cwd=folder,
            env=environment(folder) | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.screen: IO[str] = self.process.stdout
        self.seen = ""

    def read_until(self, beginning: str) -> None:
        while not (line := self.screen.readline()).startswith(beginning):
            assert line, f"{self.seen}\n{self.process.communicate()[1]}"
            self.seen += line
        self.seen += line

    def wait_for(self, look: Callable[[], bool]) -> None:
        """A short wait that notices what is over soon."""
        while not look():
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.001)

    def workers(self) -> list[int]:
        """The processes that run train.py; none while run.sh checks the recipe."""
        found = {pid: words(pid) for pid in descendants(self.process.pid)}
        return [pid for pid, line in found.items() if str(ROOT / "train.py") in line and "--check" not in line]

    def send(self, number: int, target: str) -> None:
        workers = self.workers()
        assert len(workers) == 2
        chosen = {
            "launcher": [self.process.pid],
            "one worker": [random.choice(workers)],
            # As a scheduler does it: compilers and whatever else there is among them.
            "all": [self.process.pid, *descendants(self.process.pid)],
        }[target]
        for process in chosen:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue

    def end(self) -> tuple[int, str, str]:
        """Exit code, all that was on the screen, and errors; when no process holds those any more."""
        out, err = self.process.communicate(timeout=300)  # a compilation on a busy machine
        return self.process.returncode, self.seen + out, err

    def saved_step(self) -> int:
        """Of the newest checkpoint; nothing else may lie beside them."""
        names = sorted(path.name for path in (self.folder / "checkpoints").iterdir())
        assert all(name.startswith("step-") for name in names), names
        return int(names[-1].removeprefix("step-"))

    def logged_step(self) -> int:
        return json.loads((self.folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]


def words(pid: int) -> list[str]:
    """A process's command; nothing of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


@pytest.fixture
def start(tmp_path: Path, corpus: Path) -> Iterator[Callable[..., Started]]:
    runs: list[Started] = []

    def begin(*overrides: str) -> Started:
        runs.append(Started(tmp_path, corpus, *overrides))
        return runs[-1]

    yield begin
    for run in runs:
        for process in [*descendants(run.process.pid), run.process.pid]:
            if run.process.poll() is None:
                os.kill(process, signal.SIGKILL)
        run.process.communicate()


def reach(phase: str, start: Callable[..., Started]) -> Started:
    """A run that is in this phase, as far as can be seen from outside."""
    overrides = {
        "compile": ("--compile.enabled", "true"),
        # So long that it is still under way when the line of the step before it has been read.
        "validation": ("--validation.every", "2", "--validation.batches", "400"),
        "save": ("--checkpoint.every", "2", "--checkpoint.asynchronous", "false"),
    }
    run = start(*overrides.get(phase, ()))
    if phase == "import":
        run.wait_for(lambda: len(run.workers()) == 2)
    elif phase == "start-up":
        run.read_until("  mesh: ")
    elif phase == "compile":
        run.wait_for((run.folder / "log.txt").exists)
    else:
        run.read_until("step      2/")
    if phase == "save":
        run.wait_for(lambda: any((run.folder / "checkpoints").glob("*00002")))
    return run


@pytest.mark.parametrize(("phase", "name", "target"), MATRIX)
def test_a_signal_loses_at_most_a_step(phase: str, name: str, target: str, start: Callable[..., Started]) -> None:
    number = signal.Signals[name]
    run = reach(phase, start)
    family = [run.process.pid, *descendants(run.process.pid)]
    run.send(number, target)
    code, out, err = run.end()
    assert "Traceback" not in err + out, err
    assert len(err.splitlines()) <= 1, err  # what the launcher says of it
    assert not [pid for pid in family if words(pid)]
    if phase in ("import", "start-up"):
        assert code == ended_by(number), (out, err)
        assert not run.folder.exists()
    elif phase == "compile" and target == "all" and code != PREEMPTED:
        assert code == ended_by(number), (out, err)  # the compiler among the processes has ended, and so the step
        assert f"{name} ended the run in the middle of a step; NOT SAVED" in out
    else:
        assert code == PREEMPTED, (out, err)
        assert f"{name}: interrupted after step {run.saved_step()}; the same command goes on from there" in out
        assert run.saved_step() == run.logged_step() < 400


def test_a_second_signal_ends_a_run_at_once(start: Callable[..., Started]) -> None:
    """While it validates, say, which takes longer than anybody wants to wait."""
    long = ("--validation.every", "1", "--validation.batches", "100000", "--data.validation_fraction", "0.9")
    for target in ("launcher", "one worker"):
        run = start(*long, "--run.name", target)
        run.read_until("step      1/")
        family = [run.process.pid, *descendants(run.process.pid)]
        run.send(signal.SIGTERM, "launcher")
        time.sleep(1.2)  # or it is an echo
        assert run.process.poll() is None
        run.send(signal.SIGTERM, target)
        code, out, err = run.end()
        assert code == ended_by(signal.SIGTERM)
        assert "Traceback" not in err + out and "interrupted" not in out
        assert not [pid for pid in family if words(pid)]


def test_nothing_is_promised_where_nothing_is_saved(start: Callable[..., Started]) -> None:
    run = start("--checkpoint.every", "0")
    run.read_until("step      2/")
    run.send(signal.SIGTERM, "launcher")
    code, out, _ = run.end()
    assert code == ended_by(signal.SIGTERM)
    assert "; not saved, as checkpoint.every = 0\n" in out
    assert not (run.folder / "checkpoints").exists()
