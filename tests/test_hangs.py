"""Runs in real processes that hang: they exit with 77 and name the process that the others wait for."""

import json
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.files.exit_codes import FAILED, HUNG, OUT_OF_MEMORY, REFUSED
from tests.commands import rank_of_fork, run_command
from tests.processes import descendants
from tests.scripts.nodes import ROOT, arguments
from tests.scripts.nodes import environment as plain_environment
from tests.test_signals import Started, start, words

__all__ = ["start"]  # a fixture

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc"), pytest.mark.slow]
TIMEOUT = 5.0
"""Seconds. A step takes some hundredths of a second on an idle machine."""
SHORT = ("--run.hang_timeout", str(TIMEOUT))


PIPELINE = ("--mesh.pipeline", "2", "--checkpoint.every", "0")
MUON = ("--optimizer.name", "muon", "--optimizer.ns_steps", "99")
"""Most of a step is Newton-Schulz, and what owners of matrices send each other."""


@pytest.mark.parametrize(
    ("ill", "options"),
    [
        (0, ("--mesh.shard", "2")),
        (1, ("--mesh.tensor", "2")),
        (1, (*MUON, "--mesh.shard", "2")),
        (1, (*MUON, "--mesh.tensor", "2")),
        (1, ("--mesh.context", "2", "--mesh.context_by", "gather")),
        (0, PIPELINE),
        (1, PIPELINE),
    ],
    ids=str,
)
def test_a_frozen_process_is_named_and_ended(ill: int, options: tuple[str, ...], start: Callable[..., Started]) -> None:
    run = start(*SHORT, "--run.steps", "100000", *options)
    run.read_until("step      2/")
    time.sleep(TIMEOUT / 2)  # what others know of a frozen process is what it reported last
    family = [run.process.pid, *descendants(run.process.pid)]
    [frozen] = [process for process in run.workers() if rank_of_fork(process) == ill]
    os.kill(frozen, signal.SIGSTOP)
    code, _, err = run.end()
    assert code == HUNG, err
    assert "does not answer; the process is frozen or its node is gone:\n" in err
    places = [f" (place {rank + 1} of 2 in its pipeline)" if options == PIPELINE else "" for rank in (0, 1)]
    seen = f"  rank {ill} on {platform.node()}{places[ill]}: last seen in phase "
    assert seen in err
    assert f"  1 of 2 processes wait for it, rank {1 - ill} on {platform.node()}{places[1 - ill]} in phase " in err
    assert "Traceback" not in err and "launch: a worker did not stop in time and was killed\n" in err
    log = (run.folder / "log.txt").read_text()
    assert log.count("HUNG: no progress for ") == 1 and seen in log
    [stacks] = (run.folder / "hang").iterdir()  # the frozen process writes none
    assert stacks.name == f"rank-{1 - ill}.txt"
    assert "most recent call first" in stacks.read_text() and "in _loop\n" in stacks.read_text()
    assert not [pid for pid in family if words(pid)]


def test_a_run_continues_after_all_its_processes_were_stopped_and_continued(start: Callable[..., Started]) -> None:
    """As with Ctrl-Z or a debugger: the time in between is not a hang."""
    run = start(*SHORT, "--checkpoint.every", "0", "--run.steps", "100000")
    run.read_until("step      2/")
    family = [run.process.pid, *descendants(run.process.pid)]
    for process in family:
        os.kill(process, signal.SIGSTOP)
    time.sleep(1.5 * TIMEOUT)
    for process in family:
        os.kill(process, signal.SIGCONT)
    for _ in range(20):
        run.read_until("step ")
    time.sleep(TIMEOUT)
    run.send(signal.SIGTERM, "launcher")
    code, _, err = run.end()
    assert code == 128 + signal.SIGTERM and "HUNG" not in err, err


def ill_run(folder: Path, corpus: Path, fault: str, *overrides: str, ill: int = 1) -> tuple[int, str]:
    """Exit code and standard error of a run of two processes with a fault on one rank from step 6 on."""
    launcher = ["scripts/launch.py", "--standalone", "--nproc-per-node=2"]
    train = [ROOT / "tests/ill_train.py", fault, str(ill), "5", *arguments(folder, corpus, "ill", *overrides)]
    code, _, err = run_command(*launcher, *train, env=plain_environment())
    return code, err


@pytest.mark.parametrize(
    ("fault", "ill", "options", "phase", "place"),
    [
        ("stuck_in_data", 1, (), "data", "parallel/"),
        ("stuck", 1, (), "step", "parallel/"),
        # The neighbour waits inside of a block, for the tokens of its tensor group; then a stage for the other one.
        ("stuck_in_forward", 1, ("--mesh.tensor", "2"), "step", "parallel/ten"),
        ("stuck_in_backward", 0, PIPELINE, "step", "parallel/pipeline.py:"),
        ("stuck_in_backward", 1, PIPELINE, "step", "parallel/pipeline.py:"),
    ],
    ids=str,
)
def test_a_stuck_process_is_named_with_phase_and_place_and_not_its_neighbour(
    fault: str, ill: int, options: tuple[str, ...], phase: str, place: str, tmp_path: Path, corpus: Path
) -> None:
    code, err = ill_run(tmp_path, corpus, fault, *SHORT, *options, ill=ill)
    assert code == HUNG, err
    assert "busy on its own while others wait for it:\n" in err
    places = [f" (place {rank + 1} of 2 in its pipeline)" if options == PIPELINE else "" for rank in (0, 1)]
    assert f"  rank {ill} on {platform.node()}{places[ill]}: phase {phase} of step 6" in err
    assert f"  1 of 2 processes wait for it, rank {1 - ill} on " in err and f" of step 6, at {place}" in err
    if options != PIPELINE:  # there a hook of autograd is stuck
        assert f"phase {phase} of step 6, at tests/ill_train.py:" in err
    if not options:
        assert len(err.splitlines()) == 4
        hang = tmp_path / "runs" / "ill" / "hang"
        assert {path.name for path in hang.iterdir()} == {"rank-0.txt", "rank-1.txt"}
        assert f" {fault}\n" in (hang / "rank-1.txt").read_text()


@pytest.mark.parametrize(
    ("fault", "ill", "expected", "said"),
    [
        ("fails_in_block", 0, FAILED, "AssertionError: this rank alone"),
        ("fails_in_backward", 1, FAILED, "AssertionError: this rank alone"),
        ("out_of_memory_in_block", 1, OUT_OF_MEMORY, "OUT OF MEMORY: the host of rank 1 on "),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_an_error_of_one_stage_ends_all_with_its_own_traceback_alone(
    fault: str, ill: int, expected: int, said: str, schedule: str, tmp_path: Path, corpus: Path
) -> None:
    """torch puts errors of its own around it, and would print the whole schedule."""
    stages = ("--pipeline.schedule", schedule, "--pipeline.stages_per_rank", "2" if schedule == "zbv" else "1")
    options = (*PIPELINE, *stages, "--model.layers", "4", "--fsdp.reshard_after_forward", "false")
    code, err = ill_run(tmp_path, corpus, fault, *options, ill=ill)
    assert code == expected and said in err and "HUNG" not in err, err
    assert "direct cause" not in err and "failed to run" not in err.lower() and "chedule:" not in err, err
    assert err.count(f"[rank{ill}]: Traceback") == (expected == FAILED)


def test_an_error_in_the_validation_of_one_rank_ends_all_of_a_tensor_group(tmp_path: Path, corpus: Path) -> None:
    """The others wait for it in a collective; the launcher ends them, long before the watchdog does."""
    validation = ("--validation.every", "3", "--validation.batches", "2", "--data.validation_fraction", "0.1")
    code, err = ill_run(tmp_path, corpus, "fails_in_validation", *validation, "--mesh.tensor", "2")
    assert code == 1 and "AssertionError: this rank alone" in err and "HUNG" not in err, err


@pytest.mark.parametrize(
    ("fault", "expected", "said"),
    [
        ("fails_in_step", FAILED, "ValueError: this rank alone"),
        ("interrupted_in_step", 128 + signal.SIGUSR1, ""),
        ("out_of_memory", OUT_OF_MEMORY, "OUT OF MEMORY: the host of rank 1 on "),
        ("out_of_memory_at_start", OUT_OF_MEMORY, "OUT OF MEMORY: the host of rank 1 on "),
    ],
)
def test_an_error_of_one_rank_ends_the_run_although_nccl_would_wait_for_the_others(
    fault: str, expected: int, said: str, tmp_path: Path, corpus: Path
) -> None:
    """destroy_process_group() would wait in this rank for those that wait for it in a step."""
    code, err = ill_run(tmp_path, corpus, f"as_nccl:{fault}", "--run.hang_timeout", "60")
    assert code == expected and said in err and "HUNG" not in err, err
    log = tmp_path / "runs" / "ill" / "log.txt"
    if expected == FAILED:
        assert " rank 1 failed after step 5\nTraceback" in log.read_text() and said in log.read_text()


def test_a_refusal_does_not_wait_for_the_ranks_that_leave_it_to_rank_0(tmp_path: Path) -> None:
    """These sleep, and NCCL would wait for them in rank 0."""
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n" * 10_000)
    code, err = ill_run(tmp_path, blank, "as_nccl:well")
    assert code == REFUSED and err.startswith("data.source") and len(err.splitlines()) == 1, err


def test_a_collective_left_out_on_one_rank_shows_where_each_process_waits(tmp_path: Path, corpus: Path) -> None:
    code, err = ill_run(tmp_path, corpus, "left_out", *SHORT)
    assert code == HUNG, err
    assert "the processes wait for each other in different places:\n" in err
    for rank, place in enumerate((r"passes.py:\d+ sum_over_group", r"fsdp.py:\d+ __call__")):  # a sum, a gather
        assert re.search(rf"  rank {rank} on .*: phase step of step 5, at parallel/{place}", err), err


def test_a_first_step_and_a_first_validation_that_compile_are_no_hang(tmp_path: Path, corpus: Path) -> None:
    """They may take longer than the limit of later ones."""
    validation = ("--validation.every", "10", "--validation.batches", "2", "--data.validation_fraction", "0.1")
    code, err = ill_run(tmp_path, corpus, "slow_at_first", *SHORT, *validation, "--run.steps", "20")
    assert (code, err) == (0, "")
    found = [json.loads(line) for line in (tmp_path / "runs/ill/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in found if "loss" in row]
    assert steps[0]["step_seconds"] > TIMEOUT and steps[-1]["wall_seconds"]["validation"] > TIMEOUT
    assert not (tmp_path / "runs/ill/hang").exists()
