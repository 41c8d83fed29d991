"""One process at a time for a run's folder, and nothing left behind that keeps the next one out."""

import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.files.lock import LOCK, FolderLock

ROOT = Path(__file__).resolve().parents[3]
HOLDER = """
import os, sys, time
from pathlib import Path
from recipes.files.lock import FolderLock
lock = FolderLock()
lock.take(Path(sys.argv[1]), log=print)
if os.fork():
    print("taken", flush=True)
    time.sleep(float(sys.argv[2]))
    os._exit(0)
os.close(1)
time.sleep(3)  # a child that lives longer
"""


@contextmanager
def holder(folder: Path, seconds: float = 60) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock, until it is killed or so many seconds are over."""
    command = [sys.executable, "-c", HOLDER, str(folder), str(seconds)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        yield process
        process.kill()


def take(folder: Path, *, here: float = 0.0, elsewhere: float = 0.0) -> tuple[FolderLock, list[str]]:
    lock, told = FolderLock(), list[str]()
    lock.take(folder, log=told.append, here=here, elsewhere=elsewhere)
    return lock, told


def test_who_has_it_is_named_and_leaves_nothing_by_dying(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(UserError, match=f"is in use: process {process.pid} on {platform.node()} runs it; end that"):
            take(tmp_path)
        process.kill()
        process.wait()
        assert take(tmp_path)[1] == []  # though its child is there, and the file says what it said
    assert (tmp_path / LOCK).read_text().startswith("process ")


def test_what_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    with holder(tmp_path, seconds=1) as process:
        _, told = take(tmp_path, here=60)
        assert told == [
            f"{tmp_path} is in use by process {process.pid} on {platform.node()}; waiting up to 60 s for its end"
        ]
    (tmp_path / "other").mkdir()
    with holder(tmp_path / "other", seconds=1):
        (tmp_path / "other" / LOCK).write_text("process 1 on another-host\n")
        assert "waiting up to 61 s" in take(tmp_path / "other", elsewhere=61)[1][0]


def test_a_removed_file_frees_a_folder(tmp_path: Path) -> None:
    with holder(tmp_path):
        (tmp_path / LOCK).unlink()
        assert take(tmp_path)[1] == []


def test_the_same_run_takes_it_as_often_as_it_likes(tmp_path: Path) -> None:
    lock, told = FolderLock(), list[str]()
    folder = tmp_path / "r"
    lock.take(folder, log=told.append)  # nothing is there to be taken
    folder.mkdir()
    lock.take(folder, log=told.append)
    lock.take(folder, log=told.append)
    folder.rename(tmp_path / "r.1")
    folder.mkdir()
    lock.take(folder, log=told.append)
    assert told == [] and (tmp_path / "r.1" / LOCK).exists()
    code = "import sys; from pathlib import Path; from recipes.files.lock import FolderLock"
    code += "; FolderLock().take(Path(sys.argv[1]), log=print, here=0)"
    done = subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, capture_output=True, text=True)
    assert "is in use: process" in done.stderr


def test_a_folder_without_locks_is_told_once(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    lock, told = take(tmp_path)
    lock.take(tmp_path, log=told.append)
    assert told == [
        f"{tmp_path / LOCK} cannot be locked (Is a directory): nothing keeps this run from being started twice"
    ]
