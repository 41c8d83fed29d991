"""Saves that are interrupted at any point leave the old checkpoint or the new one intact."""

import errno
import shutil
from pathlib import Path

import pytest
from torch import nn
from torch.optim import Optimizer

from recipes.checkpoint.files import verify
from recipes.checkpoint.folder import newest_whole
from recipes.files.layout import checkpoint_steps, step_folder
from tests.recipes.checkpoint.operations import Names, Operation, Recorder, replay, torn
from tests.recipes.checkpoint.small import build, checkpoints_in, contents, differences, names, snapshot, step, trained

Run = tuple[nn.Module, Optimizer]


pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.slow]


@pytest.fixture
def run() -> Run:
    return trained(2)


def no_damage(line: str) -> None:
    raise AssertionError(line)


def recorded(run: Run, folder: Path, name: str = "checkpoints") -> tuple[list[Operation], int]:
    """The operations of a save of step 1 and of one of step 2, which deletes the first; how many the first has."""
    recorder = Recorder(folder)
    checkpoints = checkpoints_in(folder / name, keep=1, files={"data.json": "{}\n"})
    with recorder.recording():
        checkpoints.save(*run, step=1)
        first = len(recorder.operations)
        step(*run, seed=9)
        checkpoints.save(*run, step=2)
    assert checkpoints.steps() == [2]
    return recorder.operations, first


@pytest.mark.parametrize("durable_only", [False, True], ids=["killed", "power cut"])
def test_interrupted_save_leaves_the_old_or_the_new_checkpoint_intact(
    durable_only: bool, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "recorded").mkdir()
    operations, first = recorded(run, tmp_path / "recorded")
    kinds = [kind for kind, _, _ in operations]
    assert kinds.count("rename") == 3 and kinds.count("unlink") == 3  # two commits, one deletion
    final = contents(step_folder(tmp_path / "recorded" / "checkpoints", 2))
    seen = []
    for number, beginning in enumerate(torn(operations)):
        root = tmp_path / str(number)
        root.mkdir()
        replay(beginning, root, durable_only=durable_only)
        folder = root / "checkpoints"
        newest = newest_whole(folder, log=no_damage)
        for found in checkpoint_steps(folder):  # also the older one, while it exists
            assert verify(step_folder(folder, found)).step == found
        if newest == 2:
            assert contents(step_folder(folder, 2)) == final
        if len(beginning) >= first:
            assert newest is not None
        seen.append(newest or 0)
    assert seen == sorted(seen) and set(seen) == {0, 1, 2}


@pytest.mark.parametrize("durable_only", [False, True], ids=["killed", "power cut"])
def test_run_resumes_after_an_interrupted_save_and_its_next_save_deletes_the_rest(
    durable_only: bool, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "recorded").mkdir()
    operations, _ = recorded(run, tmp_path / "recorded")
    before = snapshot(*run)
    commits = [number for number, (kind, _, _) in enumerate(operations) if kind == "rename"]
    root = tmp_path / "interrupted"
    root.mkdir()
    replay(operations[: commits[1]], root, durable_only=durable_only)  # just before the new one gets its name
    checkpoints = checkpoints_in(root / "checkpoints", keep=2)
    assert names(checkpoints.folder) == [".partial-00000002", "step-00000001"] and checkpoints.steps() == [1]
    fresh = build(seed=5)
    checkpoints.load(*fresh, step=1)
    step(*fresh, seed=9)
    assert differences(snapshot(*fresh), before) == []
    checkpoints.save(*fresh, step=2)
    assert checkpoints.finish() == 2 and names(checkpoints.folder) == ["step-00000001", "step-00000002"]


def test_power_cut_that_loses_unsynced_names_leaves_an_intact_checkpoint(run: Run, tmp_path: Path) -> None:
    """It may lose all unsynced names, none, any single one, or all but one."""
    (tmp_path / "recorded").mkdir()
    name = "runs/one/checkpoints"
    operations, first = recorded(run, tmp_path / "recorded", name)
    disk, number, seen = Names(), 0, set()
    for done, operation in enumerate(operations, 1):
        disk.apply(operation)
        waiting = set(range(len(disk.changes)))
        chances = {frozenset(), frozenset(waiting)}
        chances |= {frozenset(kept) for one in waiting for kept in ({one}, waiting - {one})}
        for kept in sorted(chances, key=sorted):
            number += 1
            root = tmp_path / str(number)
            disk.write(root, set(kept))
            newest = newest_whole(root / name, log=no_damage)
            for found in checkpoint_steps(root / name):
                assert verify(step_folder(root / name, found)).step == found
            if done >= first:
                assert newest is not None, (done, operation)
            if done == len(operations):
                assert newest == 2
            seen.add(newest)
            shutil.rmtree(root)
    assert seen == {None, 1, 2}


def test_error_at_any_operation_costs_no_older_checkpoint(run: Run, tmp_path: Path) -> None:
    """Whatever fails, the old checkpoint stays, training continues, and the next save succeeds."""
    operations, first = recorded(run, tmp_path)
    (tmp_path / "checkpoints" / "step-00000002").rename(tmp_path / "checkpoints" / "step-00000001x")
    reasons = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is exceeded", errno.EIO: "OSError"}
    for at in range(len(operations) - first):
        code = list(reasons)[at % 3]
        folder = tmp_path / f"at-{at}"
        logged: list[str] = []
        checkpoints = checkpoints_in(folder, keep=1, files={"data.json": "{}\n"}, log=logged.append)
        checkpoints.save(*run, step=1)
        checkpoints.finish()
        before = snapshot(*run)
        recorder = Recorder(tmp_path, refuse_at=at, error=OSError(code, "refused"))
        with recorder.recording():
            checkpoints.save(*run, step=2)
            checkpoints.finish()
        assert differences(snapshot(*run), before) == []
        assert logged[0].startswith("step      1  saved")
        newest = newest_whole(folder, log=no_damage)
        assert newest is not None
        for found in checkpoint_steps(folder):
            verify(step_folder(folder, found))
        if "NOT SAVED" in logged[-1]:
            assert reasons[code] in logged[-1] and len(logged) == 2, (at, logged)
        else:  # it is saved, but the old one was not deleted, or only in part
            assert newest == 2 and reasons[code] in logged[1], (at, logged)
            assert "cannot be deleted" in logged[1] or "older checkpoints are kept" in logged[1], (at, logged)
        logged.clear()
        checkpoints.save(*run, step=3)
        assert checkpoints.finish() == 3 and names(folder) == ["step-00000003"], (at, logged)
