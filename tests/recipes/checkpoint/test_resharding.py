"""A state saved by any number of processes on any mesh is restored bit for bit on any other."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.dist import start, stop
from recipes.checkpoint import manifest
from recipes.checkpoint.checkpoints import Checkpoints
from recipes.checkpoint.files import verify
from recipes.checkpoint.manifest import Damage
from recipes.checkpoint.storage import make_plan, spreads_of
from tests.full_disk import files_of_at_most
from tests.processes import run_processes
from tests.recipes.checkpoint.golden import fingerprints
from tests.recipes.checkpoint.small import (
    build,
    checkpoints_in,
    differences,
    names,
    snapshot,
    spoil,
    trained,
)

pytestmark = pytest.mark.slow

Run = tuple[nn.Module, Optimizer]


@contextmanager
def saving(folder: Path, **options: Any) -> Iterator[tuple[Run, Checkpoints, list[str]]]:
    """In a process of several: what they train, its checkpoints, and what these log."""
    start("cpu", seed=0)
    logged: list[str] = []
    yield trained(1), checkpoints_in(folder, log=logged.append, **options), logged
    stop()


def in_folders(folder: Path) -> list[str]:
    """Save twice, with at most two shards in a folder; load without one of the shards, and with it."""
    import torch.distributed as dist

    manifest.SHARDS_PER_FOLDER = 2
    (folder / ".partial-00000009" / "shards-00000").mkdir(parents=True, exist_ok=True)
    with saving(folder, keep=1, files={"note.txt": "x"}) as (run, checkpoints, _):
        for step in (1, 2):
            checkpoints.save(*run, step=step)
        assert checkpoints.finish() == 2
        expected = snapshot(*run)
        fresh = build(seed=5)
        shard = checkpoints.path(2) / "shards-00001" / "shard-00002-of-00003.safetensors"
        said = []
        for name in ("moved", shard.name):
            dist.barrier()
            if dist.get_rank() == 0:
                next(shard.parent.iterdir()).rename(shard.with_name(name))
            dist.barrier()
            try:
                assert checkpoints.load(*fresh, step=2) == {}
                said.append("loaded")
            except Damage as damage:
                said.append(str(damage))
        assert differences(snapshot(*fresh), expected) == []
    return said


def test_many_shards_are_in_folders_and_each_is_looked_at_by_one_process(tmp_path: Path) -> None:
    for missing, loaded in run_processes(3, in_folders, tmp_path):
        assert missing == f"{tmp_path}/step-00000002/shards-00001/shard-00002-of-00003.safetensors is missing"
        assert loaded == "loaded"
    assert names(tmp_path) == ["step-00000002"]
    path = tmp_path / "step-00000002"
    assert names(path) == ["manifest.json", "note.txt", "shards-00000", "shards-00001"]
    assert len(names(path / "shards-00000")) == 2 and verify(path).step == 2


def only_one_writes(folder: Path) -> None:
    """Save a state that one of three processes can hold alone: nothing to write, no file."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    start("cpu", seed=0)
    mesh = init_device_mesh("cpu", (3,))
    values = distribute_tensor(torch.arange(8.0), mesh, [Replicate()])
    plan = make_plan({"x": values}, [(None, spreads_of({"x": values}))], rank=mesh.get_rank(), processes=3)
    assert bool(plan.pieces) == (mesh.get_rank() == 0)
    model = torch.nn.Linear(4, 1, bias=False)
    model.weight = torch.nn.Parameter(distribute_tensor(torch.ones(1, 4), mesh, [Replicate()]))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    checkpoints = checkpoints_in(folder, keep=1, log=lambda line: None)
    for step in (1, 2):
        checkpoints.save(model, optimizer, step=step)
        assert checkpoints.finish() == step
    stop()


def test_process_without_anything_to_write_writes_no_file(tmp_path: Path) -> None:
    run_processes(3, only_one_writes, tmp_path)
    assert names(tmp_path) == ["step-00000002"]
    assert names(tmp_path / "step-00000002") == ["manifest.json", "shard-00000-of-00003.safetensors"]
    assert verify(tmp_path / "step-00000002").step == 2


def damaged(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Resume from step 2, of which only one process reads the damaged byte."""
    with saving(folder, keep=1) as (_, checkpoints, logged):
        run = build(seed=5)
        assert checkpoints.resume(*run, step=2, check=lambda path: None)["step"] == 1
        return fingerprints(snapshot(*run, whole=True)), logged


def save_two(folder: Path) -> dict[str, str]:
    with saving(folder, keep=2) as (run, checkpoints, _):
        for step in (1, 2):
            checkpoints.save(*run, step=step)
        return fingerprints(snapshot(*run, whole=True))


def test_all_processes_load_the_older_checkpoint_if_one_reads_a_damaged_byte(tmp_path: Path) -> None:
    saved = run_processes(2, save_two, tmp_path)[0]
    shard = tmp_path / "step-00000002" / "shard-00001-of-00002.safetensors"
    spoil(shard)
    answers = run_processes(2, damaged, tmp_path)
    for found, _ in answers:
        assert found == saved
    logged = answers[0][1]
    assert "shard-00001-of-00002.safetensors is damaged: bytes" in logged[0] and "set aside" in logged[0]
    assert names(tmp_path) == ["damaged-step-00000002", "step-00000001"]


def one_cannot_write(folder: Path) -> tuple[int | None, int | None, list[str]]:
    """Save while the disk of one process is full."""
    import torch.distributed as dist

    with saving(folder, keep=2, asynchronous=True) as (run, checkpoints, logged):
        checkpoints.save(*run, step=1)
        checkpoints.finish()
        with files_of_at_most(1000) if dist.get_rank() == 1 else nullcontext():
            checkpoints.save(*run, step=2)
            failed = checkpoints.finish()
        checkpoints.save(*run, step=3)
        return failed, checkpoints.finish(), logged


def test_full_disk_of_one_process_fails_the_save_on_all(tmp_path: Path) -> None:
    for failed, last, logged in run_processes(2, one_cannot_write, tmp_path):
        assert (failed, last) == (1, 3)
        assert re.match(r"step      2  NOT SAVED: File too large \(.*\); older checkpoints are unchanged", logged[1])
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def no_common_folder(folder: Path) -> tuple[int | None, list[str], list[str]]:
    """Each process writes to a folder of its own at first, then to a shared one."""
    from recipes.checkpoint import folder as folders

    patience, folders.PATIENCE = folders.PATIENCE, 0.3
    own = folder / f"node-{os.environ['RANK']}"
    own.mkdir()
    with saving(own, keep=2) as (run, checkpoints, logged):
        for step in (1, 2):
            checkpoints.save(*run, step=step)
        failed, left = checkpoints.finish(), names(own)
        own.rmdir()
        (folder / "common").mkdir(exist_ok=True)
        own.symlink_to(folder / "common")
        folders.PATIENCE = patience
        checkpoints.save(*run, step=3)
        checkpoints.finish()
    return failed, left, logged


def test_without_a_shared_folder_saves_fail(tmp_path: Path) -> None:
    for failed, left, logged in run_processes(2, no_common_folder, tmp_path):
        assert (failed, left) == (None, [])
        for step, line in zip((1, 2), logged, strict=False):
            assert line.startswith(f"step      {step}  NOT SAVED: shard-00001-of-00002.safetensors did not arrive in")
            assert "a folder that all nodes share" in line
        assert "saved" in logged[2]
    verify(tmp_path / "common" / "step-00000003")


def one_has_no_memory(folder: Path) -> tuple[int | None, int | None, list[str]]:
    """The host of one process has no memory for the first copy."""
    import torch
    import torch.distributed as dist

    empty = torch.empty

    def refuse(*arguments: Any, **others: Any) -> Tensor:
        if "pin_memory" in others and dist.get_rank() == 1:
            raise RuntimeError("CUDA error: out of memory\nand more lines")
        return empty(*arguments, **others)

    with saving(folder, keep=2, asynchronous=True) as (run, checkpoints, logged):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", refuse)
            checkpoints.save(*run, step=1)
        failed = checkpoints.finish()
        checkpoints.save(*run, step=2)
        return failed, checkpoints.finish(), logged


def test_host_without_memory_for_the_copy_fails_the_save_on_all(tmp_path: Path) -> None:
    for failed, last, logged in run_processes(2, one_has_no_memory, tmp_path):
        assert (failed, last) == (None, 2)
        assert logged[0].startswith("step      1  NOT SAVED: RuntimeError: CUDA error: out of memory; older")
    assert names(tmp_path) == ["step-00000002"]


def cut_in_columns(folder: Path) -> None:
    """Save tensors cut by rows, columns, both, unevenly or not at all, and load them cut in every other way."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from recipes.checkpoint.files import complete, read_manifest, write_shard
    from recipes.checkpoint.manifest import shard_name
    from recipes.checkpoint.storage import assemble, raw, read_tensors

    start("cpu", seed=0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    wholes = {
        "matrix": torch.arange(77.0).reshape(7, 11),
        "cube": torch.arange(210).reshape(5, 6, 7),
        "short": torch.arange(3.0).bfloat16(),  # fewer than processes
        "one": torch.tensor(5.0),
    }
    ways = [[Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(1)], [Replicate(), Replicate()]]

    def spread(values: dict[str, Tensor], way: int) -> dict[str, Tensor]:
        found = {}
        for number, (name, value) in enumerate(values.items()):
            placements = ways[(number + way) % 4] if value.dim() > 1 else [Shard(0), Replicate()]
            found[name] = distribute_tensor(value, mesh, placements) if value.dim() else value.clone()
        return found

    for way in range(4):
        state = spread(wholes, way)
        plan = make_plan(state, [(None, spreads_of(state))], rank=dist.get_rank(), processes=4)
        place = folder / str(way)
        place.mkdir(exist_ok=True)
        name = shard_name(dist.get_rank(), 4)
        shards = [None] * 4
        written = plan.pieces and write_shard(place / name, plan.pieces, map(raw, plan.tensors(state)))
        dist.all_gather_object(shards, {name: written} if written else {})
        if dist.get_rank() == 0:
            files = {name: file for shard in shards for name, file in shard.items()}
            complete(place, assemble(None, {}, plan.stored, files), {})
            verify(place)
        dist.barrier()
        for other in range(4):
            for change in (lambda tensor: tensor, lambda tensor: tensor.double()):
                target = spread({name: change(torch.zeros_like(whole)) for name, whole in wholes.items()}, other)
                read_tensors(place, read_manifest(place), target)
                for name, value in target.items():
                    found = value.full_tensor() if isinstance(value, DTensor) else value
                    assert torch.equal(found, change(wholes[name])), (way, other, name)
    stop()


def test_tensors_cut_in_any_way_load_cut_in_any_other(tmp_path: Path) -> None:
    run_processes(4, cut_in_columns, tmp_path)
