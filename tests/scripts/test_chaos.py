"""A short run of tests/chaos.py; the default of 50 kills takes too long for a test."""

import re
import sys

import pytest

from tests.commands import run_command

pytestmark = pytest.mark.slow


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_run_that_is_killed_ends_as_if_it_had_not_been_killed() -> None:
    code, out, err = run_command("tests/chaos.py", "--kills", 4, "--steps", 24, "--pause", 0.5, "--seed", 3)
    assert (code, err) == (0, ""), out
    assert len(re.findall(r"^  kill +\d: (?:all processes|one worker   ) after", out, re.MULTILINE)) == 4
    assert re.search(r"^4 kills, (\d) of \1 runs ended as the undisturbed one, to the bit$", out, re.MULTILINE)
