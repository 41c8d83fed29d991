"""The processes that tests start are as new ones, though they share the imports of one server."""

import os
import sys
import threading

import pytest
import torch

from tests.processes import run_processes

pytestmark = pytest.mark.slow

forked = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="starts new interpreters instead of forking"
)


def facts() -> dict[str, object]:
    torch.ones(256, 256) @ torch.ones(256, 256)
    found = {"mark": os.environ.get("MARK"), "rank": os.environ["RANK"], "seen": getattr(torch, "seen", False)}
    torch.seen = True
    return found | {
        "preloaded": "tests.preload" in sys.modules,
        "torch threads": torch.get_num_threads(),
        "threads": threading.active_count(),
        "parent": os.getppid(),
        "folder": os.getcwd(),
    }


def test_processes_have_the_environment_and_folder_of_the_test(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("MARK", "of this test")
    monkeypatch.chdir(tmp_path)
    for rank, found in enumerate(run_processes(2, facts)):
        assert (found["mark"], found["rank"], found["folder"]) == ("of this test", str(rank), str(tmp_path))


def test_processes_see_no_changes_that_earlier_ones_made_to_modules() -> None:
    assert [found["seen"] for found in run_processes(1, facts) + run_processes(1, facts)] == [False, False]


def test_processes_compute_with_one_thread() -> None:
    assert [(found["torch threads"], found["threads"]) for found in run_processes(2, facts)] == [(1, 1)] * 2


@forked
def test_processes_share_the_imports_of_one_server() -> None:
    first, second = run_processes(1, facts) + run_processes(1, facts)
    assert first["preloaded"] and second["preloaded"]
    assert first["parent"] == second["parent"] != os.getpid()


def crash() -> None:
    os._exit(3)


def hang() -> None:
    if os.environ["RANK"] == "1":
        threading.Event().wait()


def test_a_process_that_dies_without_an_answer_fails_the_caller_and_not_the_next() -> None:
    with pytest.raises(AssertionError, match="1 of 1 processes did not answer"):
        run_processes(1, crash)
    assert run_processes(1, os.getenv, "RANK") == ["0"]


def test_a_process_that_hangs_is_killed_after_the_timeout() -> None:
    with pytest.raises(AssertionError, match="1 of 2 processes did not answer"):
        run_processes(2, hang, timeout=1, patience=0.1)
    assert run_processes(1, os.getenv, "RANK") == ["0"]


def fail() -> None:
    raise KeyError("no such thing")


def test_a_process_that_raises_fails_the_caller_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"rank 0 of 1 failed:\n(.*\n)*KeyError: 'no such thing'"):
        run_processes(1, fail)
