"""Disks without room, damaged and misnamed checkpoints: what each costs, and what is told."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from parallel.errors import UserError
from recipes.checkpoint import checkpoints as module
from recipes.checkpoint.checkpoints import Checkpoints
from recipes.checkpoint.files import read_manifest
from recipes.checkpoint.manifest import Damage
from tests.full_disk import files_of_at_most
from tests.recipes.checkpoint.small import contents, names, trained

Run = tuple[nn.Module, Optimizer]


pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def run() -> Run:
    return trained(3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_costs_that_checkpoint_alone(asynchronous: bool, run: Run, tmp_path: Path) -> None:
    told: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=asynchronous, log=told.append)
    checkpoints.save(*run, step=3)
    assert checkpoints.finish() == 3
    before = contents(checkpoints.path(3))
    with files_of_at_most(1024):
        checkpoints.save(*run, step=6)
        assert checkpoints.finish() == 3
    assert told[-1] == "step      6  NOT SAVED: File too large; older checkpoints are as they were"
    assert names(tmp_path) == ["step-00000003"] and contents(checkpoints.path(3)) == before
    checkpoints.save(*run, step=9)
    assert checkpoints.finish() == 9 and names(tmp_path) == ["step-00000009"]


def test_a_checkpoint_is_never_written_over(run: Run, tmp_path: Path) -> None:
    told: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=2, log=told.append)
    checkpoints.path(6).mkdir(parents=True)  # empty: rename() would replace it without a word
    for number in (3, 3, 6):
        checkpoints.save(*run, step=number)
    checkpoints.report()
    assert ["NOT SAVED" in line for line in told] == [False, True, True]
    assert "never written over" in told[1]
    assert names(tmp_path) == ["step-00000003", "step-00000006"] and not any(checkpoints.path(6).iterdir())


def test_a_damaged_one_is_set_aside_and_the_one_before_it_loaded(run: Run, tmp_path: Path) -> None:
    told: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=3, log=told.append)
    for number in (1, 2, 3):
        checkpoints.save(*run, step=number, progress={"tokens": number})
    for number in (2, 3):
        shard = next(checkpoints.path(number).glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    checkpoints.finish()
    told.clear()
    checked: list[Path] = []
    assert checkpoints.resume(*run, step=3, check=checked.append) == {"tokens": 1, "step": 1}
    assert checked == [checkpoints.path(number) for number in (3, 2, 1)]
    assert names(tmp_path) == ["damaged-step-00000002", "damaged-step-00000003", "step-00000001"]
    assert "which belong to" in told[0] and told[0].endswith("; it is set aside as damaged-step-00000003")
    assert told[-1] == f"resumed from {checkpoints.path(1)}"

    checkpoints.save(*run, step=2)  # its name is free again
    shard = next(checkpoints.path(2).glob("*.safetensors"))
    for path in (shard, next(checkpoints.path(1).glob("*.safetensors"))):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="no older checkpoint is left; the same command begins the run anew"):
        checkpoints.resume(*run, step=2, check=checked.append)
    assert names(tmp_path) == [f"damaged-step-0000000{end}" for end in ("1", "2", "2.1", "3")]


def test_what_looks_like_an_older_version_gives_way_to_a_whole_one(run: Run, tmp_path: Path) -> None:
    """A lost manifest and a stray .metadata must not keep a run from its older checkpoints; alone, it stays."""
    told: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=3)
    for number in (1, 2, 3):
        checkpoints.save(*run, step=number)
    for number in (2, 3):
        (checkpoints.path(number) / "manifest.json").unlink()
        (checkpoints.path(number) / ".metadata").touch()
    assert module.folders.newest_whole(tmp_path, log=told.append) == 1
    assert names(tmp_path) == ["damaged-step-00000002", "damaged-step-00000003", "step-00000001"]
    assert all("an older version of this program" in line and "set aside as damaged-" in line for line in told)

    (checkpoints.path(1) / "manifest.json").unlink()
    (checkpoints.path(1) / ".metadata").touch()
    with pytest.raises(UserError, match="an older version of this program"):
        module.folders.newest_whole(tmp_path, log=told.append)
    assert checkpoints.steps() == [1] and len(told) == 2


def test_a_checkpoint_under_another_name_is_refused(run: Run, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(*run, step=1)
    checkpoints.path(1).rename(checkpoints.path(2))
    with pytest.raises(Damage, match="holds the checkpoint of another step: 1"):
        checkpoints.load(*run, step=2)


def test_room_is_looked_for_before_the_first_step(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    from types import SimpleNamespace

    told: list[str] = []
    parameters = list(run[0].parameters())
    size = sum(12 * parameter.numel() + 4 for parameter in parameters)
    checkpoints = Checkpoints(tmp_path / "not" / "there" / "yet", keep=2, log=told.append)
    for free in (10 * size, 2 * size, size - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda place, free=free: SimpleNamespace(free=free))
        if free < size:
            with pytest.raises(UserError, match=r"a checkpoint takes 31.3 kB, but the disk of .* has 31.3 kB free"):
                checkpoints.require_room(parameters)
        else:
            checkpoints.require_room(parameters)
    assert told[0].endswith("each, the disk has room for 10")
    assert told[1].endswith("each, the disk has room for 2; checkpoint.keep = 2 needs 3")
    checkpoints.save(*run, step=1)
    shard = next(checkpoints.path(1).glob("*.safetensors"))
    assert size < shard.stat().st_size < 1.5 * size + 4000


def test_what_a_kill_left_counts_as_free(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save clears it; before that it is nobody's to delete."""
    import shutil
    from types import SimpleNamespace

    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0))
    told: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=2, log=told.append)
    (tmp_path / ".partial-00000004").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(bytes(1 << 20))
    (tmp_path / ".partial-00000005").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="has 0 B free"):
        checkpoints.require_room(run[0].parameters())
    (tmp_path / ".partial-00000004" / "shard").write_bytes(bytes(40_000))
    checkpoints.require_room(run[0].parameters())
    assert "the disk has room for 1" in told[0] and (tmp_path / ".partial-00000004" / "shard").exists()


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_the_size_that_is_told_is_that_of_the_numbers(
    moments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of the files beside them; what says where they are comes on top."""
    sizes: list[int] = []

    def note(folder: Path, *, checkpoint_bytes: int, keep: int) -> str:
        sizes.append(checkpoint_bytes)
        return ""

    monkeypatch.setattr(module, "room", note)
    model, optimizer = trained(1, moments=moments)
    checkpoints = Checkpoints(tmp_path, keep=2, files={"tokenizer.json": "ä" * 10_000})
    checkpoints.require_room(model.parameters(), moments=getattr(torch, moments))
    checkpoints.save(model, optimizer, step=1)
    manifest = read_manifest(checkpoints.path(1))
    numbers = sum(chunk.bytes for tensor in manifest.tensors.values() for chunk in tensor.chunks)
    assert sizes == [numbers + 20_000]
