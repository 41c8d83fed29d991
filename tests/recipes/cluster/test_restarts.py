"""When a job starts once more, and when it does not."""

from pathlib import Path

import pytest

from recipes.cluster.restarts import Attempt, End, History, end_of, reason_to_stop

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
        ([None, None], (CRASHED, 1)),
    ],
)
def test_the_cause_is_told_from_its_consequences(codes: list[int | None], expected: tuple[End, int]) -> None:
    assert end_of(codes) == expected
    assert end_of(codes[::-1]) == expected


def stops(attempts: list[tuple[int, End | None]], *, step: int, restarts: int = 10) -> str | None:
    return reason_to_stop([Attempt(*attempt) for attempt in attempts], step=step, restarts=restarts)


def test_a_job_starts_again_while_it_comes_further() -> None:
    assert stops([], step=0) is None
    assert stops([(0, CRASHED)], step=0) is None
    assert stops([(0, CRASHED), (0, CRASHED)], step=0) is None
    assert stops([(0, PREEMPTED), (10, CRASHED), (20, None), (30, PREEMPTED)], step=40) is None
    assert stops([(0, CRASHED), (0, CRASHED), (0, CRASHED)], step=10) is None


def test_a_crash_loop_ends() -> None:
    assert "two restarts got no further than step 0" in (stops([(0, CRASHED)] * 3, step=0) or "")
    assert "no further than step 10" in (stops([(0, CRASHED), (10, CRASHED), (10, None)], step=10) or "")
    assert "no further than step 10" in (stops([(0, CRASHED), (10, PREEMPTED), (10, PREEMPTED)], step=10) or "")


def test_what_the_scheduler_takes_away_is_no_crash() -> None:
    assert stops([(0, TAKEN)] * 9, step=0) is None
    assert stops([(0, CRASHED), (0, TAKEN), (0, CRASHED), (0, TAKEN)], step=0) is None
    assert stops([(0, CRASHED), (0, TAKEN), (0, CRASHED), (0, TAKEN), (0, None)], step=0)


def test_a_node_that_does_not_answer_is_no_crash_loop() -> None:
    assert stops([(0, CRASHED), (0, End.UNSTARTED), (0, End.UNSTARTED)], step=0) is None
    assert stops([(0, End.UNSTARTED)] * 3, step=0, restarts=2) == "it crashed 3 times, and RESTARTS=2"


def test_crashes_are_counted_and_preemptions_are_not() -> None:
    often: list[tuple[int, End | None]] = [(step, PREEMPTED) for step in range(50)]
    assert stops(often, step=50, restarts=0) is None
    assert stops([*often, (50, CRASHED)], step=60, restarts=1) is None
    assert stops([*often, (50, CRASHED), (60, None)], step=70, restarts=1) == "it crashed 2 times, and RESTARTS=1"


@pytest.mark.parametrize("end", [End.DONE, End.FINAL])
def test_an_end_is_an_end(end: End) -> None:
    assert stops([(0, end)], step=10)


def test_the_history_outlives_the_job(tmp_path: Path) -> None:
    path = tmp_path / "attempts.json"
    history = History(path)
    history.begin(0)
    history.end(CRASHED)
    history.begin(10)  # and the node dies
    again = History(path)
    assert again.attempts == [Attempt(0, CRASHED), Attempt(10)]
    again.begin(20)
    again.end(End.DONE)
    assert History(path).attempts == [Attempt(0, CRASHED), Attempt(10), Attempt(20, End.DONE)]
