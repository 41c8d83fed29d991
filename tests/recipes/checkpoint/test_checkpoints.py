"""Checkpoints of one process: what comes back, what is kept, what is passed over."""

import errno
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.optim import Optimizer

from parallel.errors import UserError
from recipes.checkpoint import checkpoints as module
from recipes.checkpoint import files, storage
from recipes.checkpoint.checkpoints import Checkpoints
from recipes.checkpoint.files import read_manifest, verify
from tests.recipes.checkpoint.small import build, contents, differences, names, snapshot, step, trained

Run = tuple[nn.Module, Optimizer]


pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def run() -> Run:
    return trained(3)


# What comes back


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_parameters_and_moments_come_back_to_the_bit(mode: str, asynchronous: bool, run: Run, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, asynchronous=asynchronous)
    before = snapshot(*run)
    assert {name.split()[-1] for name in before if name.count(" ") == 1} >= {"exp_avg", "exp_avg_sq", "step"}
    checkpoints.save(*run, step=3, progress={"tokens": 99, "wandb": None})
    assert differences(snapshot(*run), before) == []  # saving moves nothing

    fresh = build(seed=7, mode=mode)  # other weights, no moments, perhaps other names inside
    assert checkpoints.load(*fresh, step=3) == {"tokens": 99, "wandb": None}
    assert differences(snapshot(*fresh), before) == []
    assert [group["weight_decay"] for group in fresh[1].param_groups] == [0.1, 0.0]
    assert [group["betas"] for group in fresh[1].param_groups] == [(0.9, 0.95)] * 2

    assert step(*fresh, seed=4) == step(*run, seed=4)
    assert differences(snapshot(*fresh), snapshot(*run)) == []


def test_training_draws_no_random_numbers(run: Run) -> None:
    """Why a checkpoint holds no state of torch's generator."""
    before = torch.get_rng_state()
    step(*run, seed=4)
    assert torch.equal(torch.get_rng_state(), before)


def test_loading_replaces_what_was_trained_meanwhile(run: Run, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    before = snapshot(*run)
    checkpoints.save(*run, step=3)
    step(*run, seed=4)
    assert set(differences(snapshot(*run), before)) == set(before)
    checkpoints.load(*run, step=3)
    assert differences(snapshot(*run), before) == []


def test_blocks_are_read_in_part_and_in_whole(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tensors of a large model have many blocks; here they are small instead."""
    for place in (files, storage):
        monkeypatch.setattr(place, "BLOCK_BYTES", 64)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(*run, step=3)
    manifest = verify(checkpoints.path(3))
    assert manifest.block_bytes == 64
    assert len(manifest.tensors["model.embedding.weight"].chunks[0].blocks) == 20 * 16 * 4 // 64
    before = snapshot(*run)
    fresh = build(seed=1)
    checkpoints.load(*fresh, step=3)
    assert differences(snapshot(*fresh), before) == []


def test_other_libraries_read_the_shards(run: Run, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, files={"note.txt": "ä"})
    checkpoints.save(*run, step=3)
    assert names(checkpoints.path(3)) == ["manifest.json", "note.txt", "shard-00000-of-00001.safetensors"]
    with safe_open(checkpoints.path(3) / "shard-00000-of-00001.safetensors", framework="pt") as shard:
        assert set(shard.keys()) == set(read_manifest(checkpoints.path(3)).tensors)
        for name, parameter in run[0].named_parameters():
            assert torch.equal(shard.get_tensor(f"model.{name}"), parameter.full_tensor())
            assert torch.equal(
                shard.get_tensor(f"optimizer.{name}.exp_avg"), run[1].state[parameter]["exp_avg"].full_tensor()
            )


def test_another_optimizer_is_refused(run: Run, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(*run, step=3)
    model, _ = build(seed=0)
    other = torch.optim.AdamW(model.parameters(), fused=True)  # one group instead of two
    with pytest.raises(UserError, match="another optimizer, or other groups"):
        checkpoints.load(model, other, step=3)


def test_options_of_another_torch_are_no_other_optimizer(run: Run, tmp_path: Path) -> None:
    """An option that AdamW has now and had not then, or the other way round, keeps torch's default."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    for group in run[1].param_groups:
        group |= {"old_option": 7}
    checkpoints.save(*run, step=3)
    for group in run[1].param_groups:
        del group["old_option"]
        group |= {"new_option": 0.5, "lr": 0.3}
    checkpoints.load(*run, step=3)
    for group in run[1].param_groups:
        assert group["new_option"] == 0.5 and group["lr"] == 0.01 and "old_option" not in group


# Beside the training


def test_a_slow_writer_writes_what_was_there(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters change while their copy waits to be written."""
    go, write = threading.Event(), module.write_shard

    def slow(*arguments):
        assert go.wait(60)
        return write(*arguments)

    monkeypatch.setattr(module, "write_shard", slow)
    told: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=3, asynchronous=True, log=told.append)
    before = snapshot(*run)
    checkpoints.save(*run, step=3)
    step(*run, seed=4)
    checkpoints.report()
    assert checkpoints.steps() == [] and told == []
    go.set()
    after = snapshot(*run)
    checkpoints.save(*run, step=4)  # waits for the one before, whose memory it takes
    assert told == [f"step      3  saved {checkpoints.path(3)}"]
    step(*run, seed=5)
    assert checkpoints.finish() == 4 and checkpoints.steps() == [3, 4]
    for number, expected in ((3, before), (4, after)):
        checkpoints.load(*run, step=number)
        assert differences(snapshot(*run), expected) == []


def test_beside_the_training_the_same_is_written(run: Run, tmp_path: Path) -> None:
    for asynchronous in (True, False):
        checkpoints = Checkpoints(tmp_path / str(asynchronous), keep=1, asynchronous=asynchronous)
        checkpoints.save(*run, step=3)
        assert checkpoints.finish() == 3
    assert contents(tmp_path / "True" / "step-00000003") == contents(tmp_path / "False" / "step-00000003")


def test_memory_is_used_again(run: Run, tmp_path: Path) -> None:
    memory = storage.HostMemory()
    memory.SEGMENT = 1000  # several, and tensors larger than one
    tensors = [torch.arange(n, dtype=torch.float32) for n in (3, 300, 100, 200, 1, 700)] + [
        torch.tensor(2.0).bfloat16()
    ]
    for _ in range(2):
        assert [bytes(copy) for copy in memory.copy(tensors)] == [bytes(storage.raw(tensor)) for tensor in tensors]
        places = [segment.data_ptr() for segment in memory._segments]
        tensors = [tensor + 1 for tensor in tensors]
    assert [segment.data_ptr() for segment in memory._segments] == places
    assert bytes(memory.copy([torch.ones(4, 6).t()])[0]) == bytes(storage.raw(torch.ones(6, 4)))


# What is kept


def test_the_oldest_are_deleted(run: Run, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "a" / "checkpoints", keep=2)
    assert checkpoints.steps() == []  # nor is there a folder yet
    kept = []
    for number in (3, 9, 20, 100):
        checkpoints.save(*run, step=number)
        kept.append(checkpoints.steps())
    assert kept == [[3], [3, 9], [9, 20], [20, 100]]
    assert names(checkpoints.folder) == ["step-00000020", "step-00000100"]
    Checkpoints(checkpoints.folder, keep=1).save(*run, step=123_456_789)
    assert names(checkpoints.folder) == ["step-123456789"]
    assert checkpoints.steps() == [123_456_789]


def test_every_nth_stays(run: Run, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, keep_every=20)
    for number in range(10, 80, 10):
        checkpoints.save(*run, step=number)
    assert checkpoints.steps() == [20, 40, 60, 70]


def test_nothing_is_deleted_for_one_that_does_not_read_back(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=1, log=told.append)
    checkpoints.save(*run, step=3)
    commit = module.folders.commit

    def spoil(folder: Path, number: int) -> None:
        commit(folder, number)
        shard = next(checkpoints.path(number).glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")

    monkeypatch.setattr(module.folders, "commit", spoil)
    checkpoints.save(*run, step=6)
    checkpoints.report()
    assert "which belong to" in told[-1] and "set aside as damaged-step-00000006" in told[-1]
    assert names(tmp_path) == ["damaged-step-00000006", "step-00000003"]
    assert checkpoints.finish() == 3


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO], ids=["ESTALE", "EIO"])
def test_one_that_cannot_be_read_back_is_no_damaged_one(
    code: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system that fails for a while: both stay, and the next save tidies up."""
    import os

    def refuse(*arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    told: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=1, log=told.append)
    checkpoints.save(*run, step=3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        checkpoints.save(*run, step=6)
    assert checkpoints.finish() == 6 and checkpoints.steps() == [3, 6]
    assert "is complete, but" in told[1] and os.strerror(code) in told[1]
    assert told[1].endswith("; older checkpoints are kept") and "saved" in told[2]
    checkpoints.save(*run, step=9)
    assert checkpoints.finish() == 9 and names(tmp_path) == ["step-00000009"]


def test_a_folder_that_does_not_sync_costs_no_checkpoint(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one has its name by then: it is saved, and the old one kept for a power cut that takes the name."""
    import os

    fsync = os.fsync
    folder = tmp_path.stat().st_ino

    def refuse(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == folder:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    told: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=1, log=told.append)
    checkpoints.save(*run, step=3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        checkpoints.save(*run, step=6)
    assert checkpoints.finish() == 6 and checkpoints.steps() == [3, 6]
    assert told[1] == "step      6  is complete, but OSError: [Errno 5] Input/output error; older checkpoints are kept"
    verify(checkpoints.path(6))


def test_an_old_one_that_cannot_be_deleted_is_told(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path, number: int) -> None:
        raise PermissionError(13, "no")

    told: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=1, log=told.append)
    checkpoints.save(*run, step=3)
    monkeypatch.setattr(module.folders, "delete", refuse)
    checkpoints.save(*run, step=6)
    assert checkpoints.finish() == 6 and checkpoints.steps() == [3, 6]
    assert told[1:] == [
        "step      3  cannot be deleted: the folder may not be written to",
        f"step      6  saved {checkpoints.path(6)}",
    ]


def test_what_a_kill_left_is_passed_over_and_cleared(run: Run, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
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


def test_a_left_over_that_cannot_be_cleared_is_told_and_costs_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file is that an NFS server still has open, or another user's: all else goes, and saves go on."""
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
    told: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=2, log=told.append)
    for number in (6, 7):
        checkpoints.save(*run, step=number)
    assert checkpoints.finish() == 7
    assert [names(tmp_path / f".partial-{number:08d}") for number in (5, 6)] == [[".nfs0001"]] * 2
    assert "NOT SAVED" in told[1] and "busy" in told[1]  # whose own place is taken
    for line, left_over in zip([told[0], *told[2:4]], (5, 5, 6), strict=True):
        assert f".partial-{left_over:08d}, a left-over, cannot be cleared: OSError" in line
    assert told[4:] == [f"step      7  saved {checkpoints.path(7)}"]


def test_other_names_are_ignored(run: Run, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    others = ["step-5", "step-00000007-backup", "step-", "step-0000000x", "best", "old-step-00000009"]
    # Digits of another script, and a step's second name.
    others += ["step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0669", "step-000000009", "step-000000003"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000099").write_text("a file")
    assert checkpoints.steps() == []
    for number in (3, 4):
        checkpoints.save(*run, step=number)
    assert checkpoints.steps() == [4]
    assert names(tmp_path) == sorted([*others, "step-00000099", "step-00000004"])
