"""A script called in the process of the test, with what trains a recipe replaced: for tests that are not about how the
command starts and ends the runs."""

import contextlib
import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from recipes.lab.sweep import runner
from recipes.lab.sweep.runner import Ended

ROOT = Path(__file__).resolve().parents[2]


@cache
def script(name: str) -> ModuleType:
    """scripts/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / f"scripts/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(
    name: str,
    arguments: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    train: Callable[..., Ended],
) -> tuple[int, str, str]:
    """Exit code, output and errors of a script, called from a folder. train: instead of runner.run."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
        for variable, value in environment.items():
            patch.setenv(variable, value)
        patch.setattr(runner, "run", train)
        patch.setattr(runner, "stop_signals", contextlib.nullcontext)  # signals are for pytest
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = script(name).main([*arguments])
    return code, out.getvalue(), err.getvalue()
