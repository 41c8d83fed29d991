"""The quick tier stays quick: a test without the mark `slow` fails when it does slow work."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.quick import only_quick_work
from tests.sources import ROOT

UNMARKED = """
import os
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import torch

import recipes.training.trainer
from tests.processes import run_processes


def test_popen():
    subprocess.run([sys.executable, "-c", ""])


def test_fork_server():
    run_processes(1, os.getpid)


def test_fork():
    os.fork()


def test_compile():
    torch.compile(torch.sin)(torch.ones(1))


def test_compile_of_a_module():
    torch.nn.Linear(1, 1).compile()


def test_trainer():
    recipes.training.trainer.Trainer.run(None)


@pytest.fixture(scope="module")
def process():
    subprocess.run([sys.executable, "-c", ""])


def test_fixture(process):
    pass


def test_swallowed():
    with suppress(BaseException):
        os.fork()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread():
    thread = threading.Thread(target=os.fork)
    thread.start()
    thread.join()


@pytest.mark.proof
def test_proof_of_another_file():
    os.fork()


@pytest.mark.slow
def test_marked():
    subprocess.run([sys.executable, "-c", ""], check=True)


def test_quick():
    pass
"""


@pytest.mark.slow
def test_tests_that_do_slow_work_without_the_mark_fail_with_the_sentence(tmp_path: Path) -> None:
    (tmp_path / "test_unmarked.py").write_text(UNMARKED)
    options = [*("-p", "tests.conftest"), *("-p", "no:cacheprovider"), *("-o", "addopts="), *("-o", "markers=slow: x\nproof: x")]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir=.", "--junit-xml=found.xml", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
    )
    found = {}
    for case in ElementTree.parse(tmp_path / "found.xml").iter("testcase"):
        said = " ".join(problem.attrib["message"] for problem in case)
        found[case.attrib["name"]] = re.sub(r".*(mark this test slow: it [\w ]+).*", r"\1", said)
    process, compiles = "mark this test slow: it starts a process", "mark this test slow: it compiles"
    starting = ["test_popen", "test_fork_server", "test_fork", "test_fixture", "test_swallowed", "test_thread"]
    starting += ["test_proof_of_another_file"]
    assert found == {
        **dict.fromkeys(starting, process),
        **dict.fromkeys(["test_compile", "test_compile_of_a_module"], compiles),
        "test_trainer": "mark this test slow: it trains a run",
        **dict.fromkeys(["test_marked", "test_quick"], ""),
    }


def test_slow_work_is_allowed_again_after_a_test_without_the_mark() -> None:
    allowed = subprocess.Popen.__init__, os.fork  # this test's own refusals
    with only_quick_work():
        assert (subprocess.Popen.__init__, os.fork) != allowed
    assert (subprocess.Popen.__init__, os.fork) == allowed
