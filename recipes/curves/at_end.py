"""Draws the picture at the end of a run. Imports no torch."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from recipes.files.layout import CURVES

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "plot.py"
LIMIT = 60.0
"""Seconds. On a machine that has never drawn, matplotlib first looks for fonts."""


def draw(folder: Path, *, log: Callable[[str], None]) -> None:
    """Draw a run's curves.png. In a process of its own: whatever happens there, the run ends as it does without."""
    command = [sys.executable, str(SCRIPT), str(folder), "--out", str(folder / CURVES)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT, start_new_session=True
        )
        failure = (
            "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        )
    except subprocess.TimeoutExpired:
        failure = f"it took more than {LIMIT:.0f} s"
    except OSError as error:
        failure = str(error)
    if failure:
        log(f"{CURVES} was not drawn: {failure}; scripts/plot.py {folder} draws it later")
