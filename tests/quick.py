"""What a test without the mark `slow` may not do: start a process, compile or train a run. The small process that runs
a chat template is allowed, and so are the four proofs of one file, which are marked `proof`."""

import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest

from recipes.data.text.chat import SERVE

PROOFS = "tests/recipes/lab/prove/test_axes.py"


def may_be_slow(test: pytest.Item) -> bool:
    """Whether a test may do slow work."""
    is_proof = test.get_closest_marker("proof") is not None and test.nodeid.partition("::")[0] == PROOFS
    return is_proof or test.get_closest_marker("slow") is not None


@contextmanager
def only_quick_work() -> Iterator[None]:
    """Fail a test that does slow work; also where its own code, or a thread, swallows the failure."""
    import torch

    refused: list[str] = []

    def refusing(what: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> None:
            refused.append(f"mark this test slow: it {what}")
            pytest.fail(refused[0])

        return refuse

    start = refusing("starts a process")
    popen = subprocess.Popen.__init__

    def start_other(self: Any, command: Any, *more: Any, **named: Any) -> None:
        (popen if SERVE in command else start)(self, command, *more, **named)

    slow = [(subprocess.Popen, "__init__", start_other), (multiprocessing.process.BaseProcess, "start", start)]
    slow += [(os, name, start) for name in ("fork", "forkpty", "posix_spawn") if hasattr(os, name)]
    slow += [(torch, "compile", refusing("compiles"))]
    if trainer := sys.modules.get("recipes.training.trainer"):
        slow += [(trainer.Trainer, "run", refusing("trains a run"))]
    with ExitStack() as patches:
        for owner, name, refuse in slow:
            patches.enter_context(mock.patch.object(owner, name, refuse))
        yield
    if refused:
        pytest.fail(refused[0])
