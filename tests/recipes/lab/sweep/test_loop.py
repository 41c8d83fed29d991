"""The lock on a sweep's folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.lab.sweep.grid import read_sweep
from recipes.lab.sweep.loop import run_sweep

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]
TINY = ROOT / "configs/sweeps/cpu/tiny.toml"
HOLD = """
import sys, time
from pathlib import Path
from recipes.files.lock import FolderLock
lock = FolderLock()
lock.take(Path(sys.argv[1]), log=print)
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_sweep_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f'base = "{TINY}"\nskip_steps = 2\n[[runs]]\nname = "a"\n')
    sweep = read_sweep(tmp_path / "mine.toml", output=tmp_path, processes=1)
    sweep.folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD, sweep.folder], cwd=ROOT, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == b"held\n"
            holder = rf"mine is in use: process {other.pid} on .* end that first, or write another --output\."
            with pytest.raises(UserError, match=holder):
                run_sweep(sweep, retry=False, log=print)
        finally:
            other.kill()
    assert not (sweep.folder / "results.jsonl").exists() and not (sweep.folder / "table.md").exists()
