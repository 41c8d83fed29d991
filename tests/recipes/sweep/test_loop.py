"""The folder of a sweep while its rows run."""

import fcntl
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.sweep.loop import LOCK, run_sweep
from recipes.sweep.plan import read_sweep

TINY = Path(__file__).resolve().parents[3] / "configs/sweeps/cpu/tiny.toml"


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f'base = "{TINY}"\nskip_steps = 2\n[[runs]]\nname = "a"\n')
    sweep = read_sweep(tmp_path / "mine.toml", output=tmp_path, processes=1)
    sweep.folder.mkdir()
    with (sweep.folder / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another sweep is at work in .*mine; wait for it, or write another --out"):
            run_sweep(sweep, retry=False, say=print)
    assert not (sweep.folder / "results.jsonl").exists() and not (sweep.folder / "table.md").exists()
