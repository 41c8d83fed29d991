"""Checkpoints of one process: what is restored, what is kept, what is ignored."""

import errno
import re
import threading
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.optim import Optimizer

from parallel.errors import TemporaryError, UserError
from recipes.checkpoint import files, storage
from recipes.checkpoint import folder as folders
from recipes.checkpoint.files import read_manifest, verify
from tests.processes import PATIENCE
from tests.recipes.checkpoint.small import (
    build,
    checkpoints_in,
    contents,
    differences,
    names,
    snapshot,
    spoil,
    step,
    trained,
)

Run = tuple[nn.Module, Optimizer]


pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def run() -> Run:
    return trained(3)


# Loading


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_load_restores_parameters_and_moments_bit_for_bit(
    mode: str, asynchronous: bool, run: Run, tmp_path: Path
) -> None:
    checkpoints = checkpoints_in(tmp_path / "checkpoints", keep=1, asynchronous=asynchronous)
    before = snapshot(*run)
    assert {name.split()[-1] for name in before if name.count(" ") == 1} >= {"exp_avg", "exp_avg_sq", "step"}
    checkpoints.save(*run, step=3, progress={"tokens": 99, "wandb": None})
    assert differences(snapshot(*run), before) == []  # saving changes nothing

    fresh = build(seed=7, mode=mode)  # other weights, no moments, and with mode "full" other names of modules
    assert checkpoints.load(*fresh, step=3) == {"tokens": 99, "wandb": None}
    assert differences(snapshot(*fresh), before) == []
    assert [group["weight_decay"] for group in fresh[1].param_groups] == [0.1, 0.0]
    assert [group["betas"] for group in fresh[1].param_groups] == [(0.9, 0.95)] * 2

    assert step(*fresh, seed=4) == step(*run, seed=4)
    assert differences(snapshot(*fresh), snapshot(*run)) == []


def test_training_uses_no_random_numbers(run: Run) -> None:
    """This is why a checkpoint does not hold the state of torch's generator."""
    before = torch.get_rng_state()
    step(*run, seed=4)
    assert torch.equal(torch.get_rng_state(), before)


def test_tensors_of_many_blocks_are_restored(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tensors of a large model have many blocks; here the blocks are small instead."""
    for place in (files, storage):
        monkeypatch.setattr(place, "BLOCK_BYTES", 64)
    checkpoints = checkpoints_in(tmp_path, keep=1)
    checkpoints.save(*run, step=3)
    manifest = verify(checkpoints.path(3))
    assert manifest.block_bytes == 64
    blocks = sum(-(-chunk.bytes // 64) for _, chunk in manifest.contents(0).chunks)
    assert manifest.contents(0).blocks == blocks > 3 * 20 * 16 * 4 // 64
    before = snapshot(*run)
    fresh = build(seed=1)
    checkpoints.load(*fresh, step=3)
    assert differences(snapshot(*fresh), before) == []


def test_safetensors_library_reads_the_shards(run: Run, tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path, keep=1, files={"note.txt": "ä"})
    checkpoints.save(*run, step=3)
    assert names(checkpoints.path(3)) == ["manifest.json", "note.txt", "shard-00000-of-00001.safetensors"]
    with safe_open(checkpoints.path(3) / "shard-00000-of-00001.safetensors", framework="pt") as shard:
        assert set(shard.keys()) == {*read_manifest(checkpoints.path(3)).tensors, files.BLOCK_SUMS}
        for name, parameter in run[0].named_parameters():
            assert torch.equal(shard.get_tensor(f"model.{name}"), parameter.full_tensor())
            assert torch.equal(
                shard.get_tensor(f"optimizer.{name}.exp_avg"), run[1].state[parameter]["exp_avg"].full_tensor()
            )


def test_load_refuses_a_different_optimizer(run: Run, tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path, keep=1)
    checkpoints.save(*run, step=3)
    model, _ = build(seed=0)
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UserError, match="was saved with a different optimizer"):
        checkpoints.load(model, other, step=3)


def test_moments_load_into_other_parameter_groups(run: Run, tmp_path: Path) -> None:
    """A fork may decay embeddings, which moves them to another group."""
    checkpoints = checkpoints_in(tmp_path, keep=1)
    checkpoints.save(*run, step=3)
    model, _ = build(seed=0)
    other = torch.optim.AdamW(model.parameters(), fused=True)  # one group instead of two
    checkpoints.load(model, other, step=3)
    for mine, theirs in zip(model.parameters(), run[0].parameters(), strict=True):
        assert torch.equal(other.state[mine]["exp_avg"].full_tensor(), run[1].state[theirs]["exp_avg"].full_tensor())


def test_optimizer_options_that_only_one_version_of_torch_has_keep_their_defaults(run: Run, tmp_path: Path) -> None:
    """AdamW may have gained or lost an option since the checkpoint was saved."""
    checkpoints = checkpoints_in(tmp_path, keep=1)
    for group in run[1].param_groups:
        group |= {"old_option": 7}
    checkpoints.save(*run, step=3)
    for group in run[1].param_groups:
        del group["old_option"]
        group |= {"new_option": 0.5, "lr": 0.3}
    checkpoints.load(*run, step=3)
    for group in run[1].param_groups:
        assert group["new_option"] == 0.5 and "old_option" not in group
        assert group["lr"] == 0.3  # the recipe says so, which a stage or a fork may have changed


# Asynchronous saves


def test_asynchronous_save_writes_the_state_of_its_step(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters change before their copy is written."""
    go, write = threading.Event(), files.write_shard

    def slow(*arguments):
        assert go.wait(PATIENCE)
        return write(*arguments)

    monkeypatch.setattr("recipes.checkpoint.checkpoints.write_shard", slow)
    logged: list[str] = []
    checkpoints = checkpoints_in(tmp_path, keep=3, asynchronous=True, log=logged.append)
    before = snapshot(*run)
    checkpoints.save(*run, step=3)
    step(*run, seed=4)
    checkpoints.report()
    assert checkpoints.steps() == [] and logged == []
    go.set()
    after = snapshot(*run)
    checkpoints.save(*run, step=4)  # waits for the previous save, whose memory it reuses
    assert logged == [f"step      3  saved {checkpoints.path(3)}"]
    step(*run, seed=5)
    assert checkpoints.finish() == 4 and checkpoints.steps() == [3, 4]
    for number, expected in ((3, before), (4, after)):
        checkpoints.load(*run, step=number)
        assert differences(snapshot(*run), expected) == []


def test_asynchronous_and_synchronous_saves_write_the_same_files(run: Run, tmp_path: Path) -> None:
    for asynchronous in (True, False):
        checkpoints = checkpoints_in(tmp_path / str(asynchronous), keep=1, asynchronous=asynchronous)
        checkpoints.save(*run, step=3)
        assert checkpoints.finish() == 3
    assert contents(tmp_path / "True" / "step-00000003") == contents(tmp_path / "False" / "step-00000003")


def test_host_memory_is_reused() -> None:
    memory = storage.HostCopies()
    memory.SEGMENT = 1000  # several segments, and tensors larger than one
    tensors = [torch.arange(n, dtype=torch.float32) for n in (3, 300, 100, 200, 1, 700)] + [
        torch.tensor(2.0).bfloat16()
    ]
    for _ in range(2):
        assert [bytes(copy) for copy in memory.copy(tensors)] == [bytes(storage.raw(tensor)) for tensor in tensors]
        places = [segment.data_ptr() for segment in memory._segments]
        tensors = [tensor + 1 for tensor in tensors]
    assert [segment.data_ptr() for segment in memory._segments] == places


def test_a_save_allocates_nothing_that_was_prepared(run: Run, tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path, keep=1, asynchronous=True)
    checkpoints.prepare(*run)
    assert checkpoints._memory._thread is not None
    checkpoints._memory._thread.join()
    places = [segment.data_ptr() for segment in checkpoints._memory._segments]
    checkpoints.save(*run, step=3)
    assert checkpoints.finish() == 3
    assert places == [segment.data_ptr() for segment in checkpoints._memory._segments] != []


def test_host_memory_copies_tensors_that_are_not_contiguous() -> None:
    tensor = torch.arange(24.0).reshape(4, 6).t()
    assert bytes(storage.HostCopies().copy([tensor])[0]) == bytes(storage.raw(tensor.contiguous()))


# Keeping and deleting


def test_oldest_checkpoints_are_deleted(run: Run, tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path / "a" / "checkpoints", keep=2)
    assert checkpoints.steps() == []  # the folder does not exist yet
    kept = []
    for number in (3, 9, 20, 100):
        checkpoints.save(*run, step=number)
        kept.append(checkpoints.steps())
    assert kept == [[3], [3, 9], [9, 20], [20, 100]]
    assert names(checkpoints.folder) == ["step-00000020", "step-00000100"]


def test_step_of_nine_digits_is_newer_than_one_of_eight(run: Run, tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path, keep=1)
    for number in (99_999_999, 123_456_789):
        checkpoints.save(*run, step=number)
    assert names(tmp_path) == ["step-123456789"] and checkpoints.steps() == [123_456_789]


def test_multiples_of_keep_every_are_kept(run: Run, tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path, keep=2, keep_every=20)
    for number in range(10, 80, 10):
        checkpoints.save(*run, step=number)
    assert checkpoints.steps() == [20, 40, 60, 70]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("keep_best", "kept"), [("", [5, 6]), ("loss", [3, 5, 6]), ("min:loss", [3, 5, 6]), ("max:loss", [2, 5, 6])]
)
def test_best_checkpoint_is_kept(keep_best: str, kept: list[int], asynchronous: bool, run: Run, tmp_path: Path) -> None:
    """Step 4 has no validation, and step 5 another column. Step 6 is as good as the best, which came first."""
    values = {1: {"loss": 3.0}, 2: {"loss": 4.0}, 3: {"loss": 1.0}, 4: None, 5: {"other": 0.0}, 6: {"loss": 1.0}}
    for begin, end in ((1, 4), (4, 7)):  # the second time as after a restart
        checkpoints = checkpoints_in(tmp_path, keep=2, asynchronous=asynchronous, keep_best=keep_best)
        for number in range(begin, end):
            progress = {} if values[number] is None else {"validation": values[number]}
            checkpoints.save(*run, step=number, progress=progress)
        checkpoints.finish()
    assert checkpoints.steps() == kept


def test_second_best_is_kept_where_the_best_is_gone_or_damaged(run: Run, tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path, keep=3, keep_best="loss")
    for number, loss in enumerate([1.0, 2.0, 3.0, 4.0], 1):
        checkpoints.save(*run, step=number, progress={"validation": {"loss": loss}})
    assert checkpoints.steps() == [1, 2, 3, 4]
    (checkpoints.path(1) / "manifest.json").write_text("damaged")
    folders.delete(tmp_path, 3)
    checkpoints = checkpoints_in(tmp_path, keep=1, keep_best="loss")
    checkpoints.save(*run, step=5, progress={"validation": {"loss": 5.0}})
    assert checkpoints.steps() == [2, 5]


def test_nothing_is_deleted_while_a_manifest_cannot_be_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be that of the best checkpoint."""
    checkpoints = checkpoints_in(tmp_path, keep=1, keep_best="loss")
    checkpoints.save(*run, step=1, progress={"validation": {"loss": 1.0}})
    fresh = checkpoints_in(tmp_path, keep=1, keep_best="loss")

    def fails(path: Path) -> NoReturn:
        raise TemporaryError("the disk fails now")

    with monkeypatch.context() as patched:
        patched.setattr("recipes.checkpoint.checkpoints.read_manifest", fails)
        for number in (2, 3):
            fresh.save(*run, step=number, progress={"validation": {"loss": 2.0}})
    assert fresh.steps() == [1, 2, 3]
    fresh.save(*run, step=4, progress={"validation": {"loss": 2.0}})
    assert fresh.steps() == [1, 4]


def test_damaged_new_checkpoint_is_set_aside_and_no_old_one_is_deleted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    checkpoints = checkpoints_in(tmp_path, keep=1, log=logged.append)
    checkpoints.save(*run, step=3)
    commit = folders.commit

    def commit_and_spoil(folder: Path, number: int) -> None:
        commit(folder, number)
        spoil(next(checkpoints.path(number).glob("*.safetensors")))

    monkeypatch.setattr(folders, "commit", commit_and_spoil)
    checkpoints.save(*run, step=6)
    checkpoints.report()
    assert "which belong to" in logged[-1] and "set aside as damaged-step-00000006" in logged[-1]
    assert names(tmp_path) == ["damaged-step-00000006", "step-00000003"]
    assert checkpoints.finish() == 3


def test_folder_that_cannot_be_synced_costs_no_checkpoint(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new checkpoint has its name by then. The old one is kept, because a power cut may undo the renaming."""
    import os

    fsync = os.fsync
    folder = tmp_path.stat().st_ino

    def refuse(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == folder:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    logged: list[str] = []
    checkpoints = checkpoints_in(tmp_path, keep=1, log=logged.append)
    checkpoints.save(*run, step=3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        checkpoints.save(*run, step=6)
    assert checkpoints.finish() == 6 and checkpoints.steps() == [3, 6]
    fault = f"OSError: [Errno 5] Input/output error: '{tmp_path}'"
    assert logged[1] == f"step      6  is complete, but {fault}; older checkpoints are kept"
    verify(checkpoints.path(6))


def test_old_checkpoint_that_cannot_be_deleted_is_logged(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, number: int) -> None:
        raise PermissionError(13, "no")

    logged: list[str] = []
    checkpoints = checkpoints_in(tmp_path, keep=1, log=logged.append)
    checkpoints.save(*run, step=3)
    monkeypatch.setattr(folders, "retire", refuse)
    checkpoints.save(*run, step=6)
    assert checkpoints.finish() == 6 and checkpoints.steps() == [3, 6]
    assert logged[1:] == [
        "step      3  cannot be deleted: the folder is not writable",
        f"step      6  saved {checkpoints.path(6)}",
    ]


def test_left_overs_of_a_kill_are_ignored_and_deleted_by_the_next_save(run: Run, tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path, keep=2)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (tmp_path / ".partial-00000007").symlink_to(tmp_path / "elsewhere")
    for left_over in (5, 6):
        (tmp_path / f".partial-{left_over:08d}").mkdir()
        (tmp_path / f".partial-{left_over:08d}" / "shard-00000-of-00001.safetensors").write_text("half of it")
    assert checkpoints.steps() == []
    checkpoints.save(*run, step=6)
    assert names(tmp_path) == ["elsewhere", "step-00000006"]
    assert (tmp_path / "elsewhere" / "file").exists()
    before = snapshot(*run)
    fresh = build(seed=1)
    checkpoints.load(*fresh, step=6)
    assert differences(snapshot(*fresh), before) == []


def test_left_over_that_cannot_be_deleted_is_logged_and_blocks_only_its_own_step(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a file that an NFS server still has open, or another user's. Everything else is deleted."""
    import os

    unlink = os.unlink

    def refuse(path: str, **others: int | None) -> None:
        if os.path.basename(path) == ".nfs0001":
            raise OSError(errno.EBUSY, "Device or resource busy", path)
        unlink(path, **others)

    for left_over in (5, 6):
        (tmp_path / f".partial-{left_over:08d}").mkdir()
        for name in (".nfs0001", "a", "z"):
            (tmp_path / f".partial-{left_over:08d}" / name).touch()
    monkeypatch.setattr(os, "unlink", refuse)
    logged: list[str] = []
    checkpoints = checkpoints_in(tmp_path, keep=2, log=logged.append)
    for number in (6, 7):
        checkpoints.save(*run, step=number)
    assert checkpoints.finish() == 7
    assert [names(tmp_path / f".partial-{number:08d}") for number in (5, 6)] == [[".nfs0001"]] * 2
    assert "NOT SAVED" in logged[1] and "busy" in logged[1]  # the left-over is in its place
    for line, left_over in zip([logged[0], *logged[2:4]], (5, 5, 6), strict=True):
        assert re.search(rf"the left-over .*\.partial-{left_over:08d} cannot be deleted: OSError", line)
    assert logged[4:] == [f"step      7  saved {checkpoints.path(7)}"]


def test_other_names_in_the_folder_are_ignored(run: Run, tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path, keep=1)
    others = ["step-5", "step-00000007-backup", "step-", "step-0000000x", "best", "old-step-00000009"]
    # Digits of another script, and a second name of a step.
    others += ["step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0669", "step-000000009", "step-000000003"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000099").write_text("a file")
    assert checkpoints.steps() == []
    for number in (3, 4):
        checkpoints.save(*run, step=number)
    assert checkpoints.steps() == [4]
    assert names(tmp_path) == sorted([*others, "step-00000099", "step-00000004"])
