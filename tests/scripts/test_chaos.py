"""A short run of scripts/chaos.py; the default of 50 kills takes too long for a test."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_run_that_is_killed_ends_as_if_it_had_not_been_killed() -> None:
    found = subprocess.run(
        [sys.executable, ROOT / "scripts/chaos.py", "--kills", "4", "--steps", "24", "--pause", "0.5", "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (found.returncode, found.stderr) == (0, ""), found.stdout
    assert len(re.findall(r"^  kill +\d: (?:all processes|one worker   ) after", found.stdout, re.MULTILINE)) == 4
    assert re.search(r"^4 kills, (\d) of \1 runs ended as the undisturbed one, to the bit$", found.stdout, re.MULTILINE)
