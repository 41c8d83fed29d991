"""What tests compile: the same graphs in one process after the other, or graphs alone, without generated code."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch._functorch.aot_autograd import make_boxed_func
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


@contextmanager
def graphs_only() -> Iterator[None]:
    """Run the graphs that torch.compile hands to Inductor operator by operator, without generating code for them.

    Code takes half a minute for a model of two blocks. Tracing, the joint graph, its partition and what is computed
    again, where our hooks, collectives and checkpoints meet torch.compile, are as in a run.
    """

    def as_it_is(graph: Any, *_: Any, **__: Any) -> Any:
        return make_boxed_func(graph.forward)

    with mock.patch.object(compile_fx, "_compile_fx_inner", as_it_is):
        yield
