"""What a node has of the newest steps in its memory: who keeps what, what counts as whole, and what is deleted."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from parallel.config import MeshDegrees
from parallel.errors import UserError
from parallel.nodes import Node
from recipes.checkpoint.files import complete, write_shard
from recipes.checkpoint.manifest import MANIFEST, Damage
from recipes.checkpoint.memory import SHARD
from recipes.checkpoint.memory_folder import (
    OF,
    Mark,
    Parts,
    folder_of,
    look,
    note,
    own_folder,
    read_mark,
    remove_stale,
    require,
)
from recipes.checkpoint.storage import assemble, make_plan, spreads_of
from recipes.files.layout import MEMORY, step_folder

MARK = Mark("0a1b2c3d", "hash", 4)
ALL = slice(None)


def nodes_of(*sizes: int) -> list[Node]:
    last = [*accumulate(sizes)]
    return [Node(f"node{end}", (*range(end - size, end),)) for end, size in zip(last, sizes, strict=True)]


def parts_on(*sizes: int, **degrees: int) -> Parts:
    """Of nodes with so many processes."""
    return Parts(nodes_of(*sizes), MeshDegrees(**{"shard": sum(sizes), "replicate": 1} | degrees))


def test_each_part_of_a_large_run_has_a_taker_of_its_own_in_another_node() -> None:
    parts = parts_on(*[8] * 2048, shard=2048, tensor=8)
    takers = parts.takers()
    assert sorted(takers) == sorted(takers.values()) == list(range(16_384))
    assert all(giver // 8 != taker // 8 for giver, taker in takers.items())


@pytest.mark.parametrize(
    ("parts", "givers"),
    [
        (parts_on(2, 2, replicate=2, shard=2), []),
        (parts_on(2, 2, replicate=2, shard=1, pipeline=2), [0, 1, 2, 3]),  # both replicas of a stage are in one node
        (parts_on(2, 2, 2, 2, replicate=2, shard=2, pipeline=2), []),
        (parts_on(4), []),
        (parts_on(3, 1), [0, 3]),  # the smaller node has no process left for the others
        (parts_on(2, 1, 2), [0, 2, 3, 4]),
    ],
    ids=["replicas", "replicas in one node", "stages of replicas", "one node", "3 + 1", "2 + 1 + 2"],
)
def test_a_part_without_a_replica_in_another_node_is_copied_to_the_next_node(parts: Parts, givers: list[int]) -> None:
    takers = parts.takers()
    assert sorted(takers) == givers
    assert len({*takers.values()}) == len(givers)
    node_of = {rank: node.name for node in parts.nodes for rank in node.ranks}
    assert all(node_of[giver] != node_of[taker] for giver, taker in takers.items())


def test_the_newest_step_of_which_no_part_is_missing_is_chosen() -> None:
    parts = parts_on(1, 1)
    older = {(4, "a", 0): [(0, 0)], (4, "a", 1): [(1, 1)]}
    assert parts.choose(older | {(6, "a", 0): [(0, 0)]}, after=0) == (4, "a", [])
    assert parts.choose(older | {(6, "a", 0): [(0, 0)], (6, "a", 1): [(1, 1)]}, after=0) == (6, "a", [])
    assert parts.choose(older, after=4) is None


def test_parts_that_several_starts_have_computed_are_not_mixed() -> None:
    """A node comes back with its part of a step that the others have not kept before, but now."""
    parts = parts_on(1, 1)
    older = {(4, "a", 0): [(0, 0)], (4, "a", 1): [(0, 1)]}
    assert parts.choose(older | {(6, "a", 1): [(1, 1)], (6, "b", 0): [(0, 0)]}, after=0) == (4, "a", [(0, 1, 1)])
    assert parts.choose({(6, "a", 1): [(1, 1)], (6, "b", 0): [(0, 0)], (6, "b", 1): [(0, 1)]}, after=0) == (
        6,
        "b",
        [(0, 1, 1)],
    )


def test_a_part_that_only_a_copy_has_moves_to_its_process() -> None:
    assert parts_on(1, 1).choose({(4, "a", 0): [(0, 0)], (4, "a", 1): [(0, 1)]}, after=0) == (
        4,
        "a",
        [(0, 1, 1)],
    )


def test_replicas_serve_one_another() -> None:
    parts = parts_on(2, 2, replicate=2, shard=2)
    assert parts.choose({(4, "a", 0): [(0, 0)], (4, "a", 1): [(1, 1)]}, after=0) == (
        4,
        "a",
        [(0, 0, 2), (1, 1, 3)],
    )


def kept(node: Path, *, rank: int = 0, step: int = 4, state: object = (MARK.id, 0, "a")) -> Path:
    """A part as a run keeps it."""
    path, tensors = step_folder(folder_of(node, rank), step), {"weight": torch.arange(256.0)}
    path.mkdir(parents=True)
    plan = make_plan(tensors, [(None, spreads_of(tensors))], rank=0, processes=1)
    shard = write_shard(path / SHARD, plan.pieces, [tensors["weight"].numpy().data.cast("B")])
    record = {"progress": {}, "optimizer": [], OF: state}
    complete(path, assemble(step, record, plan.stored, {SHARD: shard}), {"model.json": "{}"})
    return path


def test_a_whole_part_is_found_by_the_process_whose_share_it_is(tmp_path: Path) -> None:
    kept(tmp_path, state=[MARK.id, 0, "a"])
    kept(tmp_path, rank=1, state=[MARK.id, 1, "a"])
    parts = parts_on(1, 1)
    assert look(tmp_path, MARK, parts, share=ALL, by=5) == ({(4, "a", 0): [(5, 0)], (4, "a", 1): [(5, 1)]}, [])
    assert look(tmp_path, MARK, parts, share=slice(1, None, 2), by=0) == ({(4, "a", 1): [(0, 1)]}, [])
    assert look(tmp_path / "none", MARK, parts, share=ALL, by=0) == ({}, [])


def flip(name: str) -> Callable[[Path], object]:
    def change_last_byte(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[-2] ^= 1
        (path / name).write_bytes(content)

    return change_last_byte


@pytest.mark.parametrize(
    "spoil",
    [
        *map(flip, (MANIFEST, SHARD, "model.json")),
        lambda path: (path / MANIFEST).unlink(),
        lambda path: (path / SHARD).unlink(),
        lambda path: path.rename(path.with_name("step-00000006")),
        lambda path: path.parent.rename(path.parent.with_name("rank-00001")),
        lambda path: path.parent.rename(path.parent.with_name("rank-one")),
        lambda path: path.parent.rename(path.parent.with_name("rank-0")),
    ],
    ids=["manifest", "shard", "small file", "half", "no shard", "step", "rank", "no rank", "rank of one digit"],
)
def test_a_part_that_is_not_as_a_process_of_this_run_kept_it_is_passed_over_in_words(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    spoil(kept(tmp_path, state=[MARK.id, 0, "a"]))
    _, [problem] = look(tmp_path, MARK, parts_on(1, 1), share=ALL, by=0)
    assert isinstance(problem, str) and problem


@pytest.mark.parametrize(
    "state", [["another", 0, "a"], [MARK.id, 1, "a"], [MARK.id, 0, "b"], [MARK.id, 0], [MARK.id, 0, 1], None]
)
def test_a_part_of_another_run_part_or_start_is_refused(tmp_path: Path, state: object) -> None:
    path = kept(tmp_path, state=state)
    with pytest.raises(Damage, match="is of another run, start, step or process"):
        require(path, MARK, 0, "a")


def a_file(place: Path) -> None:
    place.touch(0o700)


def a_link(place: Path) -> None:
    (target := place.with_name("other")).mkdir(0o700)
    place.symlink_to(target)


def a_folder_of_another_user(place: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can make one")
    place.mkdir(0o700)
    os.chown(place, 1, 1)


@pytest.mark.parametrize(
    "make",
    [a_file, a_link, lambda place: place.mkdir(0o750), a_folder_of_another_user, lambda place: place.parent.rmdir()],
)
def test_a_place_where_others_could_write_is_refused(tmp_path: Path, make: Callable[[Path], object]) -> None:
    (folder := tmp_path / "memory").mkdir()
    make(folder / f"shardwright-{os.geteuid()}")
    with pytest.raises(UserError, match=r"^checkpoint\.memory_folder: "):
        own_folder(str(folder))


def test_the_place_is_of_this_user_alone(tmp_path: Path) -> None:
    place = own_folder(str(tmp_path))
    assert place.stat().st_mode & 0o777 == 0o700


def test_only_what_the_mark_of_a_run_names_stays(tmp_path: Path) -> None:
    """And what is of a run whose folder is not to be seen here, for a while."""
    place = tmp_path / "place"
    runs = [tmp_path / name for name in ("this", "other", "begun-anew", "ended", "rubbish", "gone", "long-gone")]
    marks = [replace(MARK, id=name) for name in ("a", "b", "c", "d", "e", "f", "g")]
    place.mkdir()
    for run, mark in zip(runs, marks, strict=True):
        run.mkdir()
        mark.write(run)
        (place / mark.id / "node").mkdir(parents=True)
        note(place, mark, run)
    replace(MARK, id="x").write(runs[2])
    (runs[3] / MEMORY).unlink()
    (runs[4] / MEMORY).write_text('{"id": 5, "of": 6, "step": []}')
    for run in runs[5:]:
        shutil.rmtree(run)
    os.utime(place / "g.json", (0, 0))
    for number, rubbish in enumerate(("", "[]", "{}", '{"run": 5}', '{"run": "\\u0000"}', "[" * 100_000)):
        (old := place / f"rubbish-{number}.json").write_text(rubbish)
        os.utime(old, (0, 0))
    (place / "folder.json").mkdir()
    remove_stale(place)
    left = {"a", "a.json", "b", "b.json", "f", "f.json", "folder.json"}
    assert {path.name for path in place.iterdir()} == left


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", "[" * 100_000, *(json.dumps(asdict(MARK) | one) for one in (
        {"id": ""}, {"id": ".."}, {"id": "a/b"}, {"id": 5}, {"id": None}, {"step": "4"}, {"step": None}, {"more": 1}))],
    ids=lambda text: text[:60],
)  # fmt: skip
def test_a_mark_that_no_run_wrote_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / MEMORY).write_text(text)
    assert read_mark(tmp_path) is None


def test_a_mark_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_mark(tmp_path) is None
    MARK.write(tmp_path)
    assert read_mark(tmp_path) == MARK
