"""Locks on a run's folder and on files: who is excluded, and that nothing keeps the lock after its process."""

import fcntl
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.files.lock import LOCK, FolderLock, NoLocks, open_locked
from tests.processes import PATIENCE

ROOT = Path(__file__).resolve().parents[3]
HOLDER = """
import os, sys, time
from pathlib import Path
from recipes.files.lock import FolderLock
lock = FolderLock()
lock.take(Path(sys.argv[1]), log=print)
if os.fork():
    print("taken", flush=True)
    sys.stdin.read()
    os._exit(0)
os.close(1)
time.sleep(3)  # a child that lives longer
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until it is killed."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        yield process
        process.kill()


def take(folder: Path) -> tuple[FolderLock, list[str]]:
    lock, logged = FolderLock(), list[str]()
    lock.take(folder, log=logged.append, here=0.0, elsewhere=0.0)
    return lock, logged


@pytest.mark.slow
def test_error_names_the_process_that_holds_the_lock(tmp_path: Path) -> None:
    named = f"is in use: process [0-9]+ on {platform.node()} has locked it; end that first, or give this run another"
    with holder(tmp_path) as process, pytest.raises(UserError, match=named) as refused:
        take(tmp_path)
    assert f"process {process.pid} on" in str(refused.value)


@pytest.mark.slow
def test_lock_ends_with_its_process_though_a_child_is_alive_and_the_file_names_it(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        assert take(tmp_path)[1] == []
    assert (tmp_path / LOCK).read_text().startswith("process ")


@pytest.mark.slow
def test_take_waits_for_a_process_that_is_about_to_end(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        logged = take_when_it_ends(tmp_path, process)
    name = f"process {process.pid} on {platform.node()}"
    assert logged == [f"{tmp_path} is in use by {name}; waiting up to {PATIENCE:.0f} s for it to end"]


def take_when_it_ends(folder: Path, holder: subprocess.Popen[str]) -> list[str]:
    """Take the lock from a process that is ended once this one says that it waits; what it says."""
    logged: list[str] = []

    def log(line: str) -> None:
        logged.append(line)
        holder.kill()

    FolderLock().take(folder, log=log, here=PATIENCE, elsewhere=PATIENCE + 1)
    return logged


@pytest.mark.slow
def test_take_waits_longer_for_a_process_on_another_host(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        (tmp_path / LOCK).write_text("process 1 on another-host\n")
        assert f"waiting up to {PATIENCE + 1:.0f} s" in take_when_it_ends(tmp_path, process)[0]


@pytest.mark.slow
def test_removing_the_file_frees_the_folder(tmp_path: Path) -> None:
    with holder(tmp_path):
        (tmp_path / LOCK).unlink()
        assert take(tmp_path)[1] == []


def test_take_does_nothing_without_a_folder(tmp_path: Path) -> None:
    assert take(tmp_path / "none")[1] == [] and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_lock_may_be_taken_again_and_follows_the_name_of_the_folder(tmp_path: Path) -> None:
    lock, logged = FolderLock(), list[str]()
    folder = tmp_path / "r"
    folder.mkdir()
    lock.take(folder, log=logged.append)
    lock.take(folder, log=logged.append)
    folder.rename(tmp_path / "r.1")
    folder.mkdir()
    lock.take(folder, log=logged.append)
    assert logged == [] and (tmp_path / "r.1" / LOCK).exists()
    code = "import sys; from pathlib import Path; from recipes.files.lock import FolderLock"
    code += "; FolderLock().take(Path(sys.argv[1]), log=print, here=0)"
    done = subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, capture_output=True, text=True)
    assert "is in use: process" in done.stderr


def test_folder_that_cannot_be_locked_is_logged_once(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    lock, logged = take(tmp_path)
    lock.take(tmp_path, log=logged.append)
    assert logged == [
        f"{tmp_path / LOCK} cannot be locked (Is a directory): nothing keeps this run from being started twice"
    ]


# open_locked


def test_locks_of_descriptors_exclude_each_other_in_one_process(tmp_path: Path) -> None:
    descriptor = open_locked(tmp_path / LOCK, owner="descriptor")
    assert descriptor is not None
    assert open_locked(tmp_path / LOCK, owner="descriptor") is None
    os.close(descriptor)
    assert open_locked(tmp_path / LOCK, owner="descriptor") is not None


def test_probing_the_lock_of_a_descriptor_does_not_drop_it(tmp_path: Path) -> None:
    assert open_locked(tmp_path / LOCK, owner="descriptor") is not None
    for _ in range(2):
        assert open_locked(tmp_path / LOCK, owner="descriptor", shared=True) is None


def test_shared_lock_needs_a_file_that_exists(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_locked(tmp_path / LOCK, owner="descriptor", shared=True)


def test_lock_of_a_file_replaced_meanwhile_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lock_and_replace(descriptor: int, operation: int) -> None:
        (tmp_path / LOCK).unlink()
        (tmp_path / LOCK).touch()

    monkeypatch.setattr(fcntl, "flock", lock_and_replace)
    assert open_locked(tmp_path / LOCK, owner="descriptor") is None


def test_file_system_without_locks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.raises(NoLocks, match="Operation not supported"):
        open_locked(tmp_path / LOCK, owner="process")
