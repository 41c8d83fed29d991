"""What every process works out alone: who writes which part of which tensor, at any number of processes."""

import random
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from parallel.errors import UserError
from recipes.checkpoint import storage
from recipes.checkpoint.files import decode
from recipes.checkpoint.manifest import DTYPE_BYTES, SHARDS_PER_FOLDER, StoredTensor, encode
from recipes.checkpoint.plan import Cut, Spread, divide, pieces_of, plan, strides_of
from recipes.checkpoint.storage import cuts_of, make_plan
from tests.scale.checkpoints import opened, spreads_of, stored_by

Box = tuple[tuple[int, ...], tuple[int, ...]]


def cases() -> Iterator[tuple[tuple[int, ...], tuple[int, ...], list[Placement]]]:
    """Shapes of meshes and of tensors, and how the one cuts the other; what FSDP does after tensor parallelism, too."""
    draw = random.Random(0)
    for _ in range(150):
        mesh = tuple(draw.choice([1, 2, 3, 4]) for _ in range(draw.randrange(1, 4)))
        shape = tuple(draw.randrange(1, 14) for _ in range(draw.randrange(1, 4)))
        yield mesh, shape, [draw.choice([Replicate(), Shard(draw.randrange(len(shape)))]) for _ in mesh]
    for fsdp, tensor, each in ((2, 2, 6), (4, 2, 3), (3, 4, 5), (2, 4, 1)):
        yield (fsdp, tensor), (fsdp * tensor * each, 6), [_StridedShard(0, split_factor=tensor), Shard(0)]
        yield (
            (2, fsdp, tensor),
            (fsdp * tensor * each, 6),
            [Replicate(), _StridedShard(0, split_factor=tensor), Shard(0)],
        )


def written(stored: StoredTensor, rank: int) -> list[Box]:
    return [(piece.start, piece.shape) for piece in pieces_of({"x": stored}, rank)]


def test_every_process_writes_what_torch_gives_it_and_every_element_is_written_once() -> None:
    for mesh, shape, placements in cases():
        ranks = numpy.arange(prod(mesh)).reshape(mesh)
        spread = Spread("F32", shape, cuts_of(placements, strides_of(ranks.tolist())))
        stored = plan({"x": spread}, prod(mesh))["x"]
        covered = numpy.zeros(shape, int)
        for rank in range(prod(mesh)):
            place = [int(where[0]) for where in numpy.nonzero(ranks == rank)]
            length, start = _compute_local_shape_and_global_offset(shape, mesh, place, placements)
            for box in written(stored, rank):
                assert box == (tuple(start), tuple(length)), (mesh, shape, placements)
                covered[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))] += 1
        assert (covered == 1).all(), (mesh, shape, placements)


def test_part_of_a_mesh_tells_where_the_others_are() -> None:
    """A process sees its own slice of the mesh: here tensor ranks 1 of a mesh of 2 x 3 x 4."""
    assert strides_of([[1, 5, 9], [13, 17, 21]]) == [(2, 12), (3, 4)]
    assert strides_of([7]) == [(1, 1)]
    with pytest.raises(UserError, match="not at equal distances"):
        strides_of([0, 1, 3])
    with pytest.raises(UserError, match="does not fit 6 processes"):
        divide((8,), (Cut(0, 4, 1),), 6)


def test_replicas_share_the_writing_by_bytes() -> None:
    draw = random.Random(1)
    tensors = {str(n): Spread("F32", (draw.randrange(1, 400), 16), (Cut(0, 4, 2),)) for n in range(60)}
    tensors |= {f"{n} norm": Spread("BF16", (64,), (Cut(0, 4, 2),)) for n in range(20)}
    tensors |= {f"{n} step": Spread("F32", ()) for n in range(60)}
    stored = plan(tensors, 16)
    sizes = [sum(piece.bytes for piece in pieces_of(stored, rank)) for rank in range(16)]
    assert sum(sizes) == sum(prod(about.shape) * DTYPE_BYTES[about.dtype] for about in tensors.values())
    assert max(sizes) < 1.1 * sum(sizes) / 16
    assert list(stored) == list(tensors)  # which is the order within the files


def test_only_the_processes_of_a_stage_write_its_tensors_in_equal_shares() -> None:
    """Two stages of four processes, which cut tensors in two, with two replicas."""
    tensors, of_one = {}, {}
    for number in range(12):
        spread = Spread("F32", (9 + number, 4), (Cut(0, 2, 1),))
        of_one |= {f"{number}": spread, f"{number} step": Spread("F32", ())}
        for stage in (0, 1):
            ranks = (4 * stage, 4 * stage + 4)
            tensors[f"{stage}/{number}"] = replace(spread, ranks=ranks)
            tensors[f"{stage}/{number} step"] = Spread("F32", (), ranks=ranks)
    stored, alone = plan(tensors, 8), plan(of_one, 4)
    for name in tensors:
        stage, _, number = name.partition("/")
        first = 4 * int(stage)
        expected = [written(alone[number], rank) for rank in range(4)]
        assert [written(stored[name], first + rank) for rank in range(4)] == expected, name
        assert not any(written(stored[name], 4 - first + rank) for rank in range(4)), name
    sizes = [sum(piece.bytes for piece in pieces_of(stored, rank)) for rank in range(8)]
    assert max(sizes) < 1.3 * min(sizes)
    manifest = stored_by(tensors, 8)
    assert decode(encode(manifest), where=Path("m")) == manifest


def test_a_process_with_other_tensors_than_its_stage_plans_another_checkpoint_and_writes_nothing() -> None:
    states = [{"a": torch.ones(40, 2), "tied": torch.ones(50)}, {"b": torch.ones(40, 2), "tied": torch.ones(50)}]
    parts = [((2 * stage, 2 * stage + 2), storage.spreads_of(state)) for stage, state in enumerate(states)]
    plans = [make_plan(states[rank // 2], parts, rank=rank, processes=4) for rank in range(4)]
    assert len({plan.identity for plan in plans}) == 1
    assert sorted(piece.tensor for plan in plans for piece in plan.pieces) == ["a", "b", "tied"]
    assert not any(piece.tensor == "tied" for plan in plans[2:] for piece in plan.pieces)  # the first stage writes it
    for wrong in ({"b": torch.ones(40, 2)}, states[1] | {"b": torch.ones(40, 2, dtype=torch.bfloat16)}):
        odd = make_plan(wrong, parts, rank=2, processes=4)
        assert odd.identity != plans[0].identity and not odd.pieces


@pytest.mark.parametrize("shard", [64, 512, 16_384])
def test_the_largest_model_on_16384_processes_has_a_small_manifest_and_bounded_folders(shard: int) -> None:
    manifest = stored_by(spreads_of("llama3_405b", shard=shard), 16_384)
    text = encode(manifest)
    assert len(text) < 6_000_000 and decode(text, where=Path("m")) == manifest
    folders = {name.rpartition("/")[0] for name in manifest.files}
    assert len(manifest.files) / len(folders) <= SHARDS_PER_FOLDER and len(folders) == 17
    sizes = [file.bytes for file in manifest.files.values()]
    assert max(sizes) < (1.3 if shard == 16_384 else 1.05) * sum(sizes) / len(sizes)


@pytest.mark.parametrize(("parts", "most"), [(2048, 1), (1024, 1), (512, 2), (256, 4)])
def test_a_process_opens_only_the_files_that_hold_its_part(parts: int, most: int) -> None:
    """1,024 processes have saved; tensors with more rows than processes are read again in so many parts."""
    stored = plan(spreads_of("llama3_405b", shard=1024), 1024)
    wanted = spreads_of("llama3_405b", shard=parts).items()
    now = {name: about for name, about in wanted if "feed_forward." in name and about.cuts}
    assert opened(stored, now, rank=5) == most
