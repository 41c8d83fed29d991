"""Fixtures for all tests, and the order of test files."""

import os
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from parallel.dist import World
    from recipes.schema import Recipe

# Before torch is imported: pytest's workers and the processes they start share the cores, and OpenMP's threads would
# wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parents[1]
# Longest first, so that no worker is left alone with one of them at the end; scripts/test.sh hands out whole files in
# this order. Files that mostly wait for their processes (nodes, slurm) stand beside files that compute.
SLOW_FILES = (
    "tests/parallel/test_combinations.py",
    "tests/scripts/test_nodes.py",
    "tests/scripts/test_sweep.py",
    "tests/scripts/test_slurm.py",
    "tests/scripts/test_slurm_pack.py",
    "tests/recipes/training/test_trainer.py",
    "tests/test_signals.py",
    "tests/parallel/test_transformers.py",
    "tests/test_hangs.py",
    "tests/parallel/test_tensor_plan.py",
    "tests/test_run.py",
    "tests/recipes/sweep/test_runner.py",
    "tests/parallel/test_float8_casts.py",
    "tests/parallel/test_order.py",
    "tests/models/test_parity.py",
    "tests/recipes/cluster/test_stragglers.py",
    "tests/recipes/training/test_stages.py",
    "tests/recipes/evaluation/test_validation_tasks.py",
    "tests/recipes/optimization/test_muon_meshes.py",
    "tests/recipes/checkpoint/test_copies.py",
    "tests/scripts/test_prepare_parts.py",
    "tests/recipes/data/test_training.py",
    "tests/recipes/checkpoint/test_resharding.py",
    "tests/recipes/training/test_resume.py",
    "tests/recipes/training/test_other_models.py",
    "tests/recipes/training/test_transformers_resume.py",
    "tests/scripts/test_chaos.py",
    "tests/scripts/test_bench.py",
    "tests/scripts/test_supervise.py",
    "tests/recipes/training/test_forks.py",
    "tests/recipes/evaluation/test_harness.py",
    "tests/recipes/data/test_history.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """For `-n auto`, one worker more than cores: many tests wait, for processes, time-outs and schedulers."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist reads it
    return 1 + (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slow files first; the order within a file stays."""
    if missing := [name for name in SLOW_FILES if not (ROOT / name).is_file()]:
        raise pytest.UsageError(f"SLOW_FILES of tests/conftest.py names files that do not exist: {missing}")
    place = {name: number for number, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Give every test the same random numbers, whatever ran before it."""
    import torch

    torch.manual_seed(0)
    yield


@pytest.fixture(autouse=True)
def broken_pipes_raise() -> Iterator[None]:
    """Undo what --help and --check do in this process: a later test's broken pipe would end all tests."""
    yield
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python starts


@pytest.fixture(scope="module", autouse=True)
def nobody_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test file that leaves processes running. (Reads /proc, so it finds none on macOS.)"""
    yield
    folder = str(tmp_path_factory.getbasetemp())
    end = time.monotonic() + 20
    while (left := processes_in(folder)) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left, left


def processes_in(folder: str) -> dict[int, str]:
    """Processes that run in this folder or name a path in it in their command: process id -> command."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            command = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
            if command and (folder in command or str((process / "cwd").readlink()).startswith(folder)):
                found[int(process.name)] = command
    return found


@pytest.fixture
def alone() -> Iterator["World"]:
    """A process group of this process alone."""
    from parallel.dist import start, stop

    yield start("cpu", seed=0)
    stop()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real text in one file: some sources of the standard library."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    names = ["argparse.py", "ast.py", "inspect.py", "pathlib.py", "typing.py", "dataclasses.py", "enum.py"]
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(
        "\n\n".join((stdlib / name).read_text(encoding="utf-8") for name in names if (stdlib / name).exists())
    )
    return path


@pytest.fixture(scope="module")
def small(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> "Recipe":
    """The small recipe (tests/training.py) on the corpus; the runs of one test file go to one folder."""
    from tests.training import small_recipe

    return small_recipe(corpus, tmp_path_factory.mktemp("small"))
