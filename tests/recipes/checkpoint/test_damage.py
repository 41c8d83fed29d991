"""Damaged files of a checkpoint are found, and the error says where the damage is."""

import random
import re
import shutil
from pathlib import Path

import pytest

from parallel.dist import start, stop
from recipes.checkpoint import files, storage
from recipes.checkpoint.files import read_manifest, verify
from recipes.checkpoint.folder import newest_whole
from recipes.checkpoint.manifest import MANIFEST, Damage
from tests.recipes.checkpoint.golden import GOLDEN
from tests.recipes.checkpoint.small import (
    all_contents,
    build,
    checkpoints_in,
    contents,
    differences,
    names,
    snapshot,
    trained,
)

SHARDED = GOLDEN / "sharded" / "step-00000002"
PLACE = re.compile(r"(shard-0000[01]-of-00002\.safetensors|manifest\.json|note\.txt) .*bytes (\d+) to (\d+)|cut off")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(SHARDED, tmp_path / SHARDED.name)
    return tmp_path / SHARDED.name


def refusal(path: Path) -> str:
    with pytest.raises(Damage) as refused:
        verify(path)
    return str(refused.value)


def test_every_flipped_bit_is_found_and_located(copy: Path) -> None:
    draw = random.Random(0)
    originals = contents(copy)
    tensors = {name: [] for name in originals} | {
        name: [(chunk.offset, chunk.offset + chunk.bytes, tensor) for tensor, chunk in inside.chunks]
        for name, inside in all_contents(read_manifest(copy))
    }
    for number in range(300):  # files in turn: a random choice by size would hardly ever hit the small ones
        name = list(originals)[number % len(originals)]
        byte = draw.randrange(len(originals[name]))
        content = bytearray(originals[name])
        content[byte] ^= 1 << draw.randrange(8)
        (copy / name).write_bytes(content)
        said = refusal(copy)
        (copy / name).write_bytes(originals[name])
        found = PLACE.search(said)
        assert found and str(copy / name) in said, said
        if found[2]:
            assert int(found[2]) <= byte < int(found[3]) or name == MANIFEST, said
        for begin, end, tensor in tensors[name]:
            assert (f"belong to {tensor}[" in said) == (begin <= byte < end), said
    verify(copy)


def test_truncated_files_are_found(copy: Path) -> None:
    draw = random.Random(1)
    for name, content in contents(copy).items():
        for end in {0, 1, len(content) - 1, *draw.sample(range(len(content)), min(8, len(content)))}:
            (copy / name).write_bytes(content[:end])
            assert "cut off" in refusal(copy)
        (copy / name).write_bytes(content)


def test_files_that_are_too_long_are_found(copy: Path) -> None:
    for name, content in contents(copy).items():
        (copy / name).write_bytes(content + b"\n")
        assert "too long" in refusal(copy) or name == MANIFEST
        (copy / name).write_bytes(content)


def test_missing_files_are_found(copy: Path) -> None:
    for name, content in contents(copy).items():
        (copy / name).unlink()
        assert refusal(copy) == f"{copy / name} is missing"
        (copy / name).write_bytes(content)


def test_swapped_files_are_found(copy: Path) -> None:
    originals = contents(copy)
    for name, content in originals.items():
        for other, foreign in originals.items():
            if other != name:
                (copy / name).write_bytes(foreign)
                refusal(copy)
        (copy / name).write_bytes(content)
    verify(copy)


def test_shard_of_another_step_is_found(tmp_path: Path) -> None:
    """It has the same tensors and the same size; only the values differ."""
    start("cpu", seed=0)
    for steps in (1, 2):
        checkpoints = checkpoints_in(tmp_path, keep=2)
        checkpoints.save(*trained(steps), step=steps)
    stop()
    one, two = (next(checkpoints.path(steps).glob("*.safetensors")) for steps in (1, 2))
    verify(checkpoints.path(1))
    one.write_bytes(two.read_bytes())
    assert re.search(r"bytes \d+ to \d+, the checksums of its tensors", refusal(checkpoints.path(1)))


def test_run_resumes_from_the_older_checkpoint_if_the_newest_is_damaged(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever bit is flipped, the older checkpoint is loaded bit for bit."""
    for place in (files, storage):
        monkeypatch.setattr(place, "BLOCK_BYTES", 256)
    draw = random.Random(2)
    checkpoints = checkpoints_in(tmp_path, keep=2, files={"data.json": "{}"}, log=lambda line: None)
    run = trained(1)
    checkpoints.save(*run, step=1)
    before = snapshot(*run)
    for number in range(12):
        checkpoints.save(*run, step=2)
        path = checkpoints.path(2)
        name = draw.choice(names(path)) if number % 3 == 0 else "shard-00000-of-00001.safetensors"
        content = bytearray((path / name).read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (path / name).write_bytes(content)
        logged: list[str] = []
        newest = newest_whole(tmp_path, log=logged.append)
        fresh = build(seed=number + 5)
        if newest == 2:
            resuming = checkpoints_in(tmp_path, keep=2, log=logged.append)
            assert resuming.resume(*fresh, step=2, check=lambda path: None)["step"] == 1
        else:
            assert newest == 1
            checkpoints.load(*fresh, step=1)
        assert (name in logged[0] and "bytes" in logged[0]) or "cut off" in logged[0], logged
        assert differences(snapshot(*fresh), before) == []
        shutil.rmtree(tmp_path / "damaged-step-00000002")
