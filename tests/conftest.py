"""Fixtures for all tests."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same random numbers in every test, whatever ran before it."""
    import torch

    torch.manual_seed(0)
    yield


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
