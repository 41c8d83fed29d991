"""Signals to runs in real processes, by phase, signal and target. ALL_SIGNALS=1 runs all 72 combinations."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipes.files.exit_codes import PREEMPTED, SIGNALS, ended_by
from tests.commands import rank_of_fork
from tests.processes import descendants
from tests.test_run import command, start_here

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc"), pytest.mark.slow]

PHASES = ("import", "start-up", "compile", "step", "validation", "save")
TARGETS = ("one worker", "all", "launcher")
FEW = [
    ("import", "SIGTERM", "all"),
    ("import", "SIGINT", "launcher"),
    ("start-up", "SIGUSR1", "launcher"),
    ("start-up", "SIGTERM", "one worker"),
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
    """A run of two processes on small data, and its screen output."""

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
        self.process = start_here(folder, command(corpus, *options, *overrides))
        self.seen = ""

    def read_until(self, beginning: str) -> None:
        while not (line := self.process.stdout.readline()).startswith(beginning):
            assert line, f"{self.seen}\n{self.process.communicate()[1]}"
            self.seen += line
        self.seen += line

    def wait_for(self, look: Callable[[], bool]) -> None:
        """Poll often, for conditions that hold only briefly."""
        while not look():
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.001)

    def workers(self) -> list[int]:
        """The processes that run train.py."""
        return [pid for pid in descendants(self.process.pid) if rank_of_fork(pid) is not None]

    def send(self, number: int, target: str) -> None:
        workers = self.workers()
        assert len(workers) == 2
        chosen = {
            "launcher": [self.process.pid],
            "one worker": [random.choice(workers)],
            # As a scheduler does, to compilers and all other processes of the run.
            "all": [self.process.pid, *descendants(self.process.pid)],
        }[target]
        for process in chosen:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue

    def end(self) -> tuple[int, str, str]:
        """Exit code, all screen output, and errors, when no process holds them any more."""
        out, err = self.process.communicate()
        return self.process.returncode, self.seen + out, err

    def saved_step(self) -> int:
        """Step of the newest checkpoint; the folder must contain only checkpoints."""
        names = sorted(path.name for path in (self.folder / "checkpoints").iterdir())
        assert all(name.startswith("step-") for name in names), names
        return int(names[-1].removeprefix("step-"))

    def logged_step(self) -> int:
        return json.loads((self.folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]


def words(pid: int) -> list[str]:
    """A process's command line, empty if it has ended."""
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
    """Start a run and wait until it is in this phase, as seen from outside."""
    overrides = {
        "compile": ("--compile.enabled", "true"),
        "step": ("--mesh.context", "2"),
        # So long that it still runs when the line of the step before it has been read.
        "validation": ("--validation.every", "2", "--validation.batches", "400", "--mesh.tensor", "2"),
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


def assert_ended_cleanly(err: str, out: str, family: list[int]) -> None:
    assert "Traceback" not in err + out, err
    assert len(err.splitlines()) <= 1, err  # the launcher's line
    assert not [pid for pid in family if words(pid)]


def cases(phases: tuple[str, ...]) -> pytest.MarkDecorator:
    chosen = [(phase, name, target) for phase, name, target in MATRIX if phase in phases]
    return pytest.mark.parametrize(("phase", "name", "target"), chosen)


@cases(("import", "start-up"))
def test_a_signal_before_the_first_step_ends_the_run_without_a_folder(
    phase: str, name: str, target: str, start: Callable[..., Started]
) -> None:
    run = reach(phase, start)
    family = [run.process.pid, *descendants(run.process.pid)]
    run.send(signal.Signals[name], target)
    code, out, err = run.end()
    assert_ended_cleanly(err, out, family)
    assert code == ended_by(signal.Signals[name]), (out, err)
    assert not run.folder.exists()


@cases(("compile", "step", "validation", "save"))
def test_a_signal_during_training_saves_the_current_step(
    phase: str, name: str, target: str, start: Callable[..., Started]
) -> None:
    run = reach(phase, start)
    family = [run.process.pid, *descendants(run.process.pid)]
    run.send(signal.Signals[name], target)
    code, out, err = run.end()
    assert_ended_cleanly(err, out, family)
    if phase == "compile" and target == "all" and code != PREEMPTED:  # the signal has ended the compiler, too
        assert code == ended_by(signal.Signals[name]), (out, err)
        assert f"{name} ended the run in the middle of a step; NOT SAVED" in out
    else:
        assert code == PREEMPTED, (out, err)
        assert f"{name}: interrupted after step {run.saved_step()}; the same command resumes from there" in out
        assert run.saved_step() == run.logged_step() < 400


@pytest.mark.parametrize("target", ["launcher", "one worker"])
def test_a_second_signal_ends_a_run_at_once(target: str, start: Callable[..., Started]) -> None:
    """During a validation that would take very long."""
    run = start("--validation.every", "1", "--validation.batches", "100000", "--data.validation_fraction", "0.9")
    run.read_until("step      1/")
    family = [run.process.pid, *descendants(run.process.pid)]
    run.send(signal.SIGTERM, "launcher")
    time.sleep(1.2)  # a second signal within 1 s counts as an echo
    assert run.process.poll() is None
    run.send(signal.SIGTERM, target)
    code, out, err = run.end()
    assert code == ended_by(signal.SIGTERM)
    assert "Traceback" not in err + out and "interrupted" not in out
    assert not [pid for pid in family if words(pid)]


@pytest.mark.parametrize(("target", "mesh"), [("launcher", "shard"), ("all", "pipeline")])
def test_a_signal_with_checkpoints_off_says_that_nothing_is_saved(
    target: str, mesh: str, start: Callable[..., Started]
) -> None:
    """The stages of a pipeline end after the same step: none of them waits for another one."""
    run = start("--checkpoint.every", "0", f"--mesh.{mesh}", "2")
    run.read_until("step      2/")
    run.send(signal.SIGTERM, target)
    code, out, err = run.end()
    assert code == ended_by(signal.SIGTERM) and "Traceback" not in err, err
    assert "; not saved, as checkpoint.every = 0\n" in out
    assert not (run.folder / "checkpoints").exists()
