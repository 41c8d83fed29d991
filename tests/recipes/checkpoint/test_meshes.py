"""A state goes from any mesh to any other, bit for bit, in parts that are read and written once.

The sizes of the model do not divide by the number of FSDP's parts, so that shards are unequal.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from models.hf import parameter_shapes
from models.sizes import SIZES
from parallel.dist import start, stop
from recipes.checkpoint import files, storage
from recipes.checkpoint.manifest import DTYPE_BYTES
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.optimizer import build_optimizer
from tests.build import build_model
from tests.meshes import mesh_config, on_each_mesh
from tests.recipes.checkpoint.golden import fingerprints
from tests.recipes.checkpoint.small import checkpoints_in, snapshot

pytestmark = pytest.mark.slow

UNEVEN = replace(SIZES["llama3_debug"], layers=1, width=18, heads=4, key_value_heads=2, head_width=6)
UNEVEN = replace(UNEVEN, feed_forward_width=26, vocabulary=22)
ONE = "1.1.1.1"
MESHES = (ONE, "1.2.1.1", "1.2.1.2", "2.1.1.2")
TIED = {"tied": True, "untied": False}
STEP = 2
BLOCK = 16
"""Bytes, instead of megabytes: the least that is read."""


def built(mesh: str, tied: bool, *, seed: int) -> tuple[nn.Module, Optimizer]:
    model, _ = build_model(replace(UNEVEN, tied_embeddings=tied), mesh=mesh_config(mesh), seed=seed)
    return model, build_optimizer(model, OptimizerConfig(lr=0.01))


def whole_state(run: tuple[nn.Module, Optimizer]) -> dict[str, str]:
    return fingerprints(snapshot(*run, whole=True))


@contextmanager
def counting() -> Iterator[list[int]]:
    """Appends how many bytes of tensors each read takes from a shard."""
    found: list[int] = []
    fill, read = files._fill, files.OpenShard.read

    def counted(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
        found.append(len(target))
        fill(descriptor, target, offset, path)

    def read_counted(*arguments: Any) -> None:  # not the header, nor the checksums of blocks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "_fill", counted)
            read(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.OpenShard, "read", read_counted)
        yield found


def train_and_save(mesh: str, folder: Path) -> dict[str, dict[str, str]]:
    """Two steps, tied and untied; in blocks so small that what is read is what is needed."""
    start("cpu", seed=0)
    files.BLOCK_BYTES = storage.BLOCK_BYTES = BLOCK
    found = {}
    for name, tied in TIED.items():
        model, optimizer = run = built(mesh, tied, seed=0)
        for seed in range(STEP):
            tokens = torch.randint(UNEVEN.vocabulary, (2, 9), generator=torch.Generator().manual_seed(seed))
            (model(tokens[:, :-1], tokens[:, 1:]) / 16).backward()
            optimizer.step()
            optimizer.zero_grad()
        checkpoints_in(folder / name, keep=1).save(*run, step=STEP)
        found[name] = whole_state(run)
    stop()
    return found


def pass_on(mesh: str, folder: Path) -> dict[str, Any]:
    """Load what one process saved, and save it again, on a thread."""
    start("cpu", seed=0)
    found: dict[str, Any] = {}
    for name, tied in TIED.items():
        run = built(mesh, tied, seed=5)
        with counting() as read:
            checkpoints_in(folder / name, keep=1).load(*run, step=STEP)
        checkpoints = checkpoints_in(folder / mesh / name, keep=1, asynchronous=True, log=lambda line: None)
        checkpoints.save(*run, step=STEP)
        assert checkpoints.finish() == STEP
        found[name] = whole_state(run)
        found[name + " read"], found[name + " needed"] = sum(read), needed_bytes(run[0])
    stop()
    return found


def needed_bytes(model: nn.Module) -> int:
    """Of parameters, two moments and counters, where one process saved: whole rows, also of what is cut by columns."""
    return sum(
        12 * parameter.to_local().shape[0] * parameter.shape[1:].numel() + DTYPE_BYTES["F32"]
        for parameter in model.parameters()
    )


def load_all(mesh: str, folder: Path) -> list[Any]:
    """Load what every mesh has saved. Returns the states, and how much was read of this mesh's own."""
    start("cpu", seed=0)
    found: list[Any] = []
    for source in MESHES:
        run = built(mesh, True, seed=7)
        with counting() as read:
            checkpoints_in(folder / source / "tied", keep=1).load(*run, step=STEP)
        found.append(whole_state(run))
        if source == mesh:
            found.append((sum(read), sum(12 * part.to_local().numel() + 4 for part in run[0].parameters())))
    stop()
    return found


@pytest.fixture(scope="module")
def passed_on(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, str]], dict[str, list[Any]]]:
    """The folder, the states that one process saved, and what pass_on() found on every mesh."""
    folder = tmp_path_factory.mktemp("meshes")
    [saved] = on_each_mesh([ONE], train_and_save, folder)[ONE]
    return folder, saved, on_each_mesh(MESHES, pass_on, folder)


def test_every_mesh_loads_what_one_process_saved_bit_for_bit(passed_on: Any) -> None:
    _, saved, found = passed_on
    for mesh in MESHES:
        for of_process in found[mesh]:
            assert {name: of_process[name] for name in TIED} == saved, mesh


def test_a_process_reads_only_its_rows_of_what_another_mesh_saved(passed_on: Any) -> None:
    for mesh, processes in passed_on[2].items():
        for of_process in processes:
            for name in TIED:
                read, needed = of_process[name + " read"], of_process[name + " needed"]
                ends = 2 * BLOCK * 3 * len(list(parameter_shapes(UNEVEN)))
                assert needed <= read <= needed + ends, (mesh, read, needed)


def test_every_mesh_loads_what_every_other_saved_and_of_its_own_only_its_shards(passed_on: Any) -> None:
    folder, saved, _ = passed_on
    for mesh, processes in on_each_mesh(MESHES, load_all, folder).items():
        for found in processes:
            read, held = next(one for one in found if isinstance(one, tuple))
            assert read == held, mesh
            assert [state for state in found if isinstance(state, dict)] == [saved["tied"]] * len(MESHES), mesh
