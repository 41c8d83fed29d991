"""When a job starts again, and when it does not."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.cluster.restarts import Attempt, End, History, Launcher, end_of, pause_after, reason_to_stop, supervise
from recipes.cluster.slurm import Job
from recipes.files.exit_codes import is_there
from tests.full_disk import files_of_at_most
from tests.processes import PATIENCE, ROOT, wait_for

CRASHED, PREEMPTED, TAKEN = End.CRASHED, End.PREEMPTED, End.TAKEN


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], (End.DONE, 0)),
        ([2, 143], (End.FINAL, 2)),
        ([143, None, 74], (End.FINAL, 74)),
        ([75, 143, 138], (PREEMPTED, 143)),
        ([143, None], (CRASHED, 1)),  # one node is lost, and the other was stopped for it
        ([143, 137], (CRASHED, 137)),
        ([137, 1, 77, None], (CRASHED, 77)),  # the frozen process was killed
        ([0, None], (CRASHED, 1)),
        ([0, 1], (CRASHED, 1)),
        ([143, 71], (End.TEMPORARY, 71)),  # a fault that may pass
        ([137, 79, 1], (CRASHED, 79)),  # bad memory; the other nodes lost their peer
        ([137, 78, None], (End.FINAL, 78)),  # out of device memory, as with every start
        ([None, None], (CRASHED, 1)),
    ],
)
def test_the_exit_code_of_the_cause_wins_in_any_order_of_nodes(
    codes: list[int | None], expected: tuple[End, int]
) -> None:
    assert end_of(codes) == expected
    assert end_of(codes[::-1]) == expected


def stops(attempts: list[tuple[int, End | None]], *, step: int, restarts: int = 10) -> str | None:
    return reason_to_stop([Attempt(*attempt) for attempt in attempts], step=step, restarts=restarts)


@pytest.mark.parametrize(
    ("attempts", "step"),
    [
        ([], 0),
        ([(0, CRASHED)], 0),
        ([(0, CRASHED), (0, CRASHED)], 0),
        ([(0, PREEMPTED), (10, CRASHED), (20, None), (30, PREEMPTED)], 40),
        ([(0, CRASHED), (0, CRASHED), (0, CRASHED)], 10),
        ([(0, TAKEN)] * 9, 0),  # ends by the scheduler do not count
        ([(0, CRASHED), (0, TAKEN), (0, CRASHED), (0, TAKEN)], 0),
        ([(0, CRASHED), (0, End.UNSTARTED), (0, End.UNSTARTED)], 0),  # nor do nodes that do not answer
    ],
)
def test_a_job_starts_again_while_it_makes_progress(attempts: list[tuple[int, End | None]], step: int) -> None:
    assert stops(attempts, step=step) is None


@pytest.mark.parametrize(
    ("attempts", "step"),
    [
        ([(0, CRASHED)] * 3, 0),
        ([(0, CRASHED), (10, CRASHED), (10, None)], 10),
        ([(0, CRASHED), (10, PREEMPTED), (10, PREEMPTED)], 10),
        ([(0, CRASHED), (0, TAKEN), (0, CRASHED), (0, TAKEN), (0, None)], 0),
    ],
)
def test_two_restarts_without_progress_stop_a_job(attempts: list[tuple[int, End | None]], step: int) -> None:
    assert f"two restarts got no further than step {step}" in (stops(attempts, step=step) or "")


@pytest.mark.parametrize(
    ("crashes", "restarts", "said"),
    [
        ([], 0, None),  # pre-emptions are not limited
        ([CRASHED], 1, None),
        ([CRASHED, None], 1, "it crashed 2 times, and RESTARTS=1"),
        ([End.UNSTARTED] * 3, 2, "it crashed 3 times, and RESTARTS=2"),
        ([End.DONE], 9, "done"),
        ([End.FINAL], 9, "ended for a reason that a restart does not mend"),
    ],
)
def test_crashes_are_limited_by_restarts(crashes: list[End | None], restarts: int, said: str | None) -> None:
    preempted: list[tuple[int, End | None]] = [(step, PREEMPTED) for step in range(50)]
    ends = [(50 + 10 * number, end) for number, end in enumerate(crashes)]
    assert stops([*preempted, *ends], step=99, restarts=restarts) == said


UTC = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


def ends(history: History) -> list[tuple[int, End | None]]:
    return [(attempt.step, attempt.end) for attempt in history.attempts]


def test_a_requeued_job_continues_the_history(tmp_path: Path) -> None:
    path = tmp_path / "attempts.json"
    history = History(path, log=print)
    history.begin(0)
    history.end(CRASHED)
    history.begin(10)  # the node dies before it can record an end
    again = History(path, log=print)
    assert ends(again) == [(0, CRASHED), (10, None)]
    again.begin(20)
    again.end(End.DONE)
    assert ends(History(path, log=print)) == [(0, CRASHED), (10, None), (20, End.DONE)]
    for attempt, has_ended in zip(again.attempts, (True, False, True), strict=True):
        assert re.fullmatch(UTC, attempt.began) and bool(re.fullmatch(UTC, attempt.ended)) == has_ended


def test_attempts_of_a_version_without_times_are_read(tmp_path: Path) -> None:
    (tmp_path / "attempts.json").write_text('[{"step": 5, "end": "crashed"}, {"step": 7, "end": null}]')
    assert History(tmp_path / "attempts.json", log=print).attempts == [Attempt(5, CRASHED), Attempt(7)]


def test_attempts_are_kept_in_memory_while_the_disk_is_full(tmp_path: Path) -> None:
    path, said = tmp_path / "attempts.json", list[str]()
    history = History(path, log=said.append)
    history.begin(0)
    before = path.read_bytes()
    with files_of_at_most(10):
        history.end(CRASHED)
        history.begin(10)
    assert [path.read_bytes()] == [file.read_bytes() for file in tmp_path.iterdir()] == [before]
    assert ends(history) == [(0, CRASHED), (10, None)] and history.unsaved
    assert said == [f"{path} cannot be written: File too large; only this process knows the attempts"]
    history.end(PREEMPTED)
    assert not history.unsaved and History(path, log=print).attempts == history.attempts


@pytest.mark.parametrize("text", ['[{"step": 10, "en', "", "7", '[{"step": 1, "end": "?"}]', "\0\0\0", "[3]"])
def test_damaged_attempts_are_reported_and_counted_anew(text: str, tmp_path: Path) -> None:
    path, said = tmp_path / "attempts.json", list[str]()
    path.write_text(text)
    history = History(path, log=said.append)
    assert history.attempts == [] and len(said) == 1 and f"{path} cannot be read (" in said[0]
    history.begin(20)
    assert ends(History(path, log=print)) == [(20, None)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codes", "starts"),
    [((1, 69, 71, 77, 79, 137), 2), ((0, 2, 74, 75, 76, 78, 80, 143), 1)],
    ids=["restarts", "does not"],
)
def test_a_run_restarts_after_the_codes_that_the_page_marks_and_after_no_other(
    codes: tuple[int, ...], starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.cluster.restarts.PAUSE_SECONDS", 0)
    monkeypatch.setattr("recipes.cluster.restarts.FAULT_SECONDS", 0)
    for code in codes:
        (folder := tmp_path / str(code)).mkdir()
        count = folder / "count"
        command = [sys.executable, "-S", "-c", f"open({str(count)!r}, 'a').write('.'); raise SystemExit({code})"]
        assert supervise(Launcher(command), folder, steps=10, restarts=1) == code
        assert len(count.read_text()) == starts, code


def test_faults_that_may_pass_are_waited_for_up_to_the_number_of_restarts() -> None:
    faults = [Attempt(10, End.TEMPORARY)] * 4
    assert [pause_after(faults[:number]) for number in range(1, 5)] == [30, 60, 120, 240]
    assert pause_after([*faults, *faults]) == 300 and pause_after([*faults, Attempt(10, CRASHED)]) == 1
    assert reason_to_stop(faults, step=10, restarts=4) is None
    assert reason_to_stop(faults, step=10, restarts=3) == "it crashed 4 times, and RESTARTS=3"


@pytest.fixture
def prepares(tmp_path: Path) -> Iterator[Launcher]:
    """Its launchers append to tmp_path/said, and the first runs until there is the file tmp_path/end."""
    text = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from recipes.cluster import quiet
quiet.QUIET_SECONDS = 0.0
def say(what):
    print(os.getpid(), what, "torch" in sys.modules, flush=True, file=open({str(tmp_path / "said")!r}, "a"))
say("starts")
quiet.await_turn()
say("runs")
while not os.path.exists({str(tmp_path / "end")!r}):
    time.sleep(0.1)
"""
    launcher = Launcher([sys.executable, "-c", text], prepared=True)
    yield launcher
    launcher.end()


def said(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "said").read_text().splitlines()]


@pytest.mark.slow
def test_the_next_launcher_has_imported_torch_when_it_is_needed_and_goes_with_the_supervisor(
    tmp_path: Path, prepares: Launcher
) -> None:
    def has_torch(process: int) -> bool:
        return "libtorch" in Path(f"/proc/{process}/maps").read_text()

    first = threading.Thread(target=prepares.run)
    first.start()
    wait_for("two launchers", lambda: (tmp_path / "said").exists() and len(said(tmp_path)) == 3)
    [(one, _, _), *_] = [line for line in said(tmp_path) if line[1] == "runs"]
    [other] = {process for process, _, _ in said(tmp_path)} - {one}
    wait_for("its import", lambda: has_torch(int(other)))
    (tmp_path / "end").touch()
    first.join()
    assert prepares.run() == 0
    assert [line for line in said(tmp_path) if line[1] == "runs"] == [[one, "runs", "False"], [other, "runs", "True"]]
    wait_for("the third", lambda: len({process for process, _, _ in said(tmp_path)}) == 3)
    [third] = {int(process) for process, _, _ in said(tmp_path)} - {int(one), int(other)}
    prepares.end()
    assert not is_there(third)


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_another_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("recipes.cluster.restarts.FAULT_SECONDS", 4 * PATIENCE)
    monkeypatch.setattr("recipes.cluster.restarts.LONGEST_PAUSE", 4 * PATIENCE)
    launcher = Launcher([sys.executable, "-S", "-c", "raise SystemExit(71)"])
    timer = threading.Timer(1, launcher.stop, [signal.SIGTERM, None])
    timer.start()
    began = time.monotonic()
    assert supervise(launcher, tmp_path, steps=10, restarts=1) == 71
    assert time.monotonic() - began < PATIENCE
    assert f"starts again in {4 * PATIENCE:g} s" in capfd.readouterr().err


@pytest.mark.slow
def test_a_slurm_job_checks_its_recipe_again_after_a_fault_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.cluster.restarts.FAULT_SECONDS", 0)
    check = f"echo checked; test -e {tmp_path}/again || {{ touch {tmp_path}/again; exit 71; }}"
    variables = {**os.environ, "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "a"}
    for restarts, expected in (("0", 71), ("1", 0)):
        job = Job(["bash", "-c", check], variables | {"RESTARTS": restarts}, on_node=[])
        assert job.checked_recipe() == (expected, "checked\n")
        (tmp_path / "again").unlink()
