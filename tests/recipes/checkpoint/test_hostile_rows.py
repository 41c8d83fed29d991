"""Malicious manifests of version 2, whose rows of boxes say what a line per box said before."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from recipes.checkpoint.boxes import Boxes, overlap, rows_overlap
from recipes.checkpoint.files import read_manifest, verify
from recipes.checkpoint.manifest import MANIFEST, Damage
from tests.recipes.checkpoint.golden import GOLDEN
from tests.recipes.checkpoint.test_hostile import rewrite, silent

STEP = "step-00000002"
SHARD = "shard-00000-of-00004.safetensors"
EMBEDDING = "model.embedding.weight"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "version2" / STEP, tmp_path / STEP)
    return tmp_path / STEP


def row(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    """Changes the one row of the embedding: boxes (10, 16) at (0, 0) and (10, 0) in shards 2 and 3."""
    return lambda content: content["tensors"][EMBEDDING]["boxes"][0].update(changes)


def tensor(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content["tensors"][EMBEDDING].update(changes)


def file(name: str = SHARD, **changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content["files"].setdefault(name, dict(content["files"][SHARD])).update(changes)


def renamed(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content["files"].update({name: content["files"].pop(SHARD)})


BOX = {"file": 0, "start": [0, 0], "shape": [20, 16]}
HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a shard of a far number": (row(file=2**61), "that is not there"),
    "a negative shard": (row(file=-1), "greater than or equal to 0"),
    "no boxes in a row": (row(count=0), "greater than or equal to 1"),
    "a billion boxes": (row(count=2**30), "outside of its shape"),
    "a billion boxes in one shard": (row(count=2**30, stride=0), "overlap or share a file"),
    "boxes far apart": (row(stride=2**61), "that is not there"),
    "boxes in one place": (row(step=[0, 0]), "overlap or share a file"),
    "boxes that overlap": (row(step=[9, 0]), "overlap or share a file"),
    "boxes with a gap": (row(step=[11, 0]), "outside of its shape"),
    "a step of another number of dimensions": (row(step=[10]), "another number of dimensions"),
    "a start of another number of dimensions": (row(start=[0]), "another number of dimensions"),
    "a box outside": (row(start=[2**40, 0]), "outside of its shape"),
    "an empty box": (row(shape=[10, 0]), "0 bytes for a part"),
    "a float": (row(count=2.0), "valid integer"),
    "no boxes": (tensor(boxes=[]), "do not make up the shape"),
    "all of it twice": (tensor(boxes=[BOX, BOX]), "do not make up the shape"),
    "an absurd shape": (tensor(shape=[2**40, 2**40]), "has the shape"),
    "no such type": (tensor(dtype="object"), "elements of type 'object'"),
    "rows of version 1": (lambda content: content.update(version=1), "does not describe"),
    "contents of its own": (lambda content: content.update(explicit={SHARD: 1}), "does not describe"),
    "a path upwards": (renamed(f"../{SHARD}"), f"a file called '../{SHARD}'"),
    "a folder upwards": (renamed(f"shards-00000/../{SHARD}"), "a file called"),
    "a shard in the wrong folder": (renamed(f"shards-00000/{SHARD}"), "in the wrong folder"),
    "a shard of another name": (renamed("weights"), "a shard called 'weights'"),
    "a shard beyond the last": (renamed("shard-00004-of-00004.safetensors"), "as the name of a file"),
    "shards of two saves": (renamed("shard-00000-of-00005.safetensors"), "different numbers of processes"),
    "shards of ten million processes": (renamed("shard-00000-of-9999999.safetensors"), "as the name of a file"),
    "a small file as shard": (file(header_bytes=0), "as the name of a file"),
    "a header larger than the file": (file(header_bytes=2**50), "a header larger than itself"),
    "another size": (file(bytes=10168), "its tensors end at 10160"),
    "a header of gigabytes": (file(bytes=(1 << 33) + 7984, header_bytes=1 << 33), "more than its tensors need"),
    "blocks of a prime": (lambda content: content.update(block_bytes=1009), "cut elements"),
    "other blocks": (lambda content: content.update(block_bytes=64), "its tensors end at"),
    "other checksums": (file(sums_checksum="0" * 16), "the checksums of its tensors"),
    "no checksums": (file(sums_checksum=""), "the checksums of its tensors"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_reading_ends_with_one_clear_error_and_no_side_effect(name: str, path: Path) -> None:
    change, said = HOSTILE[name]
    rewrite(path, change)
    with silent(path.parent), pytest.raises(Damage) as refused:
        verify(path)
    assert said in str(refused.value) and str(path) in str(refused.value) and len(str(refused.value)) < 500


def test_any_change_of_a_manifest_is_refused_by_name_or_harmless(path: Path) -> None:
    """Numbers, names and lists are changed at random, and the checksum is made right."""
    draw = random.Random(0)
    original = (path / MANIFEST).read_bytes()
    values = [0, 1, -1, 2, 3, 8, 17, 2**31, 2**62, 2**63, 1.5, True, None, "", "x", [], [0], [1, 2, 3], {}]

    def change(content: dict[str, Any]) -> None:
        place: Any = content
        while True:
            key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
            if isinstance(place[key], dict | list) and place[key] and draw.random() < 0.9:
                place = place[key]
                continue
            place[key] = draw.choice(values)
            return

    refused = 0
    for number in range(600):
        (path / MANIFEST).write_bytes(original)
        rewrite(path, change)
        try:
            read_manifest(path) if number % 10 else verify(path)
        except UserError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 400


def test_rows_overlap_if_their_boxes_do() -> None:
    """Also where the smallest boxes around two rows overlap, but no two of their boxes do."""
    draw = random.Random(0)
    seen = set()
    for _ in range(300):
        rows = []
        for _ in range(draw.randrange(1, 4)):
            step = (draw.randrange(2, 5), draw.choice([0, 0, 3]))
            start = draw.randrange(8), draw.randrange(8)
            rows.append(Boxes(0, start, (draw.randrange(1, 3), 2), draw.randrange(2, 5), 1, step))
        boxes = [Boxes(0, row.start_of(number), row.shape) for row in rows for number in range(row.count)]
        assert rows_overlap(rows) == overlap(boxes)
        seen.add(overlap(boxes))
        box = Boxes(0, (3, 1), (4, 2))
        met = [overlap([box, one]) for row in rows for one in boxes_of(row)]
        assert met == [number in row.meeting(box.start, box.shape) for row in rows for number in range(row.count)]
    assert seen == {True, False}


def boxes_of(row: Boxes) -> list[Boxes]:
    return [Boxes(0, row.start_of(number), row.shape) for number in range(row.count)]
