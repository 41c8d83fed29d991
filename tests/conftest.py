"""Fixtures for all tests."""

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


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same random numbers in every test, whatever ran before it."""
    import torch

    torch.manual_seed(0)
    yield


@pytest.fixture(scope="module", autouse=True)
def nobody_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a file's tests start ends with them, whoever is its parent by then. (Looks into /proc: not on macOS.)"""
    yield
    folder = str(tmp_path_factory.getbasetemp())
    end = time.monotonic() + 20
    while (left := processes_in(folder)) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left, left


def processes_in(folder: str) -> dict[int, str]:
    """Processes that are somewhere in this folder, or were given a path in it: number -> command."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            command = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
            if command and (folder in command or str((process / "cwd").readlink()).startswith(folder)):
                found[int(process.name)] = command
    return found


@pytest.fixture
def alone() -> Iterator["World"]:
    """A process group of one in this process."""
    from parallel.dist import start, stop

    yield start("cpu", seed=0)
    stop()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real text, one file: some of the standard library's sources."""
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
