"""--help of every script explains it and writes nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").iterdir() if path.suffix in (".py", ".sh", ".sbatch"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, without .venv."""
    folder = tmp_path_factory.mktemp("checkout")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    there = b"\0".join(name for name in files.split(b"\0") if (ROOT / os.fsdecode(name)).is_file())
    packed = subprocess.run(["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=there, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
    return folder


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file but Python's caches."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize(
    ("name", "interpreter"),
    [(name, kind) for name in SCRIPTS for kind in ("given", "none") if kind == "given" or not name.endswith(".py")],
)
def test_help_explains_and_writes_nothing(checkout: Path, tmp_path: Path, name: str, interpreter: str) -> None:
    python = name.endswith(".py")
    before = state(checkout)
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "COLUMNS": "100"}
    variables |= {"PYTHON": sys.executable} if interpreter == "given" else {}
    done = subprocess.run(
        [sys.executable if python else "bash", checkout / "scripts" / name, "--help"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) > 20
    assert "torch.distributed.run" not in done.stdout and "--rdzv" not in done.stdout
    assert state(checkout) == before
    assert not list(tmp_path.iterdir())


def test_supervise_alone_says_what_starts_it(checkout: Path) -> None:
    done = subprocess.run([sys.executable, checkout / "scripts/supervise.py", "x"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "scripts/run.sh with RESTARTS=N" in done.stderr and "Traceback" not in done.stderr
