"""Processes of a test that compile the same graphs, one after the other."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch._inductor import compile_fx


@contextmanager
def compiling_in_turn() -> Iterator[None]:
    """Let one process compile at a time: the next one finds the same graph in torch's cache on disk."""
    compile_graph = compile_fx._compile_fx_inner

    def in_turn(*arguments: Any, **options: Any) -> Any:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            return compile_graph(*arguments, **options)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

    path = Path(tempfile.gettempdir()) / f"shardwright-compiling-{os.getuid()}.lock"
    with open(path, "w") as file, mock.patch.object(compile_fx, "_compile_fx_inner", in_turn):
        yield
