"""Limits of the shell or job (ulimit) that are too low for a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.files.interpreter import limit_behind

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("-v 300000", "ulimit -v is 300000, and torch needs more than 600000; raise it"),
        ("-v 650000", "ulimit -v (650,000)"),
    ],
)
def test_a_limit_that_is_too_low_is_named(limit: str, said: str, tmp_path: Path) -> None:
    command = f'ulimit {limit}; exec "{sys.executable}" train.py configs/smollm3_debug.toml --run.output {tmp_path}'
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ))
    assert ended.returncode == 2
    assert said in ended.stderr and "raise" in ended.stderr and "Traceback" not in ended.stderr


def test_other_errors_are_not_explained() -> None:
    assert limit_behind(RuntimeError("shapes differ")) == ""
