"""Disks and networks that fail for a moment, or for longer, while a checkpoint is looked for and read."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import Optimizer

from parallel.dist import start, stop
from parallel.errors import TemporaryError, UserError
from recipes.checkpoint.checkpoints import Checkpoints
from recipes.checkpoint.folder import newest_whole
from recipes.files import reading
from recipes.files.layout import checkpoint_steps, holds_results
from tests.processes import run_processes
from tests.recipes.checkpoint.small import checkpoints_in, contents, differences, names, snapshot, trained

Run = tuple[nn.Module, Optimizer]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAUSES", (0, 0))


def break_calls(monkeypatch: pytest.MonkeyPatch, name: str, number: int, *, on: str = "", times: int = 10**9) -> None:
    """Let a function of os fail with this error for paths, or descriptors of paths, that contain `on`."""
    whole, left = getattr(os, name), [times]

    def broken(what: Any, *arguments: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
        if on in path and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), None if isinstance(what, int) else path)
        return whole(what, *arguments, **options)

    monkeypatch.setattr(os, name, broken)


@pytest.fixture
def saved(alone: None, tmp_path: Path) -> Checkpoints:
    """Checkpoints of steps 1 and 2."""
    checkpoints = checkpoints_in(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(*trained(step), step=step)
    checkpoints.finish()
    return checkpoints


BREAKS: dict[str, Callable[[pytest.MonkeyPatch, int, int], None]] = {
    "listing": lambda monkeypatch, number, times: break_calls(monkeypatch, "listdir", number, times=times),
    "looking": lambda monkeypatch, number, times: break_calls(monkeypatch, "stat", number, on="step-", times=times),
    "opening": lambda monkeypatch, number, times: break_calls(monkeypatch, "open", number, on="step-", times=times),
    "manifest": lambda monkeypatch, number, times: break_calls(
        monkeypatch, "preadv", number, on="manifest", times=times
    ),
    "shard": lambda monkeypatch, number, times: break_calls(monkeypatch, "preadv", number, on="shard", times=times),
}


@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EACCES])
def test_fault_that_stays_stops_the_resume_for_later_and_changes_nothing(
    broken: str, number: int, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        BREAKS[broken](patch, number, 10**9)
        with pytest.raises(TemporaryError, match=f"{saved.folder}.* cannot be read: {os.strerror(number)}"):
            step = newest_whole(saved.folder, log=pytest.fail)
            saved.resume(*trained(1), step=step or 0, check=lambda path: None)
    assert names(saved.folder) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("broken", BREAKS)
def test_fault_that_passes_is_waited_for(
    broken: str, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BREAKS[broken](monkeypatch, errno.EIO, 2)
    fresh = trained(1)
    assert newest_whole(saved.folder, log=pytest.fail) == 2
    assert saved.resume(*fresh, step=2, check=lambda path: None)["step"] == 2
    assert differences(snapshot(*fresh), snapshot(*trained(2))) == []


def test_folder_that_cannot_be_listed_does_not_look_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_calls(monkeypatch, "listdir", errno.EACCES)
    for look in (checkpoint_steps, holds_results):
        with pytest.raises(TemporaryError, match=f"{tmp_path} cannot be read: Permission denied"):
            look(tmp_path)


def test_folder_behind_a_dead_link_and_a_file_are_not_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "not-mounted")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"link is a link to .*not-mounted, which does not exist"):
        newest_whole(tmp_path / "link", log=pytest.fail)
    with pytest.raises(UserError, match="file cannot be read: Not a directory"):
        checkpoint_steps(tmp_path / "file")


def test_names_that_lead_nowhere_are_not_checkpoints(saved: Checkpoints) -> None:
    (saved.folder / "step-00000003").symlink_to(saved.folder / "gone")
    (saved.folder / "step-00000004").symlink_to("step-00000004")
    (saved.folder / "step-00000005").touch()
    (saved.folder / "step-00000002" / ".nfs000000000000001a").touch()
    assert newest_whole(saved.folder, log=pytest.fail) == 2


def test_new_checkpoint_that_cannot_be_read_back_stays_and_so_do_the_older_ones(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    checkpoints = checkpoints_in(saved.folder, keep=1, log=logged.append)
    with monkeypatch.context() as patch:
        BREAKS["shard"](patch, errno.ESTALE, 10**9)
        checkpoints.save(*trained(1), step=3)
        assert checkpoints.finish() == 3
    assert "is complete, but" in logged[0] and "Stale file handle" in logged[0]
    assert len(names(saved.folder)) == 3


def resume_with_one_blind_rank(folder: Path, fault: str) -> tuple[str, str]:
    """What a process raises when one of two meets a fault that the other does not see, and the names left."""
    rank = int(os.environ["RANK"])
    start("cpu", seed=0)
    checkpoints = checkpoints_in(folder, keep=2)
    for step in (1, 2):
        checkpoints.save(*trained(step), step=step)
    reading.PAUSES = (0,)
    patch = pytest.MonkeyPatch()
    if rank == 1:
        break_calls(patch, "open", {"missing": errno.ENOENT, "stale": errno.ESTALE}[fault], on="step-00000002/shard")
    try:
        checkpoints.resume(*trained(1), step=2, check=lambda path: None)
        said = "resumed"
    except UserError as error:
        said = f"{type(error).__name__}: {error}"
    patch.undo()
    stop()
    return said, " ".join(names(folder))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["missing", "stale"])
def test_file_that_only_one_process_cannot_see_is_not_damage(fault: str, tmp_path: Path) -> None:
    before = "step-00000001 step-00000002"
    for said, left in run_processes(2, resume_with_one_blind_rank, tmp_path, fault):
        assert said.startswith("TemporaryError: ") and "shard-00001-of-00002" in said, said
        assert left == before


def save_with_one_blind_rank(folder: Path) -> list[str]:
    """The names left after a save of which one of two processes cannot read its shard back."""
    start("cpu", seed=0)
    checkpoints = checkpoints_in(folder, keep=1)
    checkpoints.save(*trained(1), step=1)
    checkpoints.finish()
    reading.PAUSES = (0,)
    patch = pytest.MonkeyPatch()
    if os.environ["RANK"] == "1":
        break_calls(patch, "preadv", errno.EIO, on="step-00000002/shard")
    checkpoints.save(*trained(2), step=2)
    checkpoints.finish()
    patch.undo()
    stop()
    return names(folder)


@pytest.mark.slow
def test_older_checkpoint_stays_until_every_process_has_read_its_shard_of_the_new_one(tmp_path: Path) -> None:
    assert run_processes(2, save_with_one_blind_rank, tmp_path) == [["step-00000001", "step-00000002"]] * 2


def test_mark_holds_the_newest_step_and_a_save_does_not_need_it(saved: Checkpoints, tmp_path: Path) -> None:
    logged: list[str] = []
    for mark in (tmp_path / "mark", tmp_path / "no" / "folder" / "mark"):
        checkpoints = checkpoints_in(tmp_path / mark.parent.name, keep=2, mark=mark, log=logged.append)
        checkpoints.save(*trained(1), step=4)
        assert checkpoints.finish() == 4 and contents(checkpoints.path(4))
    assert (tmp_path / "mark").read_text() == "4" and not (tmp_path / "no").exists()
