"""What each axis of the mesh is for, over real processes."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.loss import IGNORED
from parallel.axes import DATA_AXES
from parallel.config import MeshConfig, MeshDegrees
from parallel.dist import start, stop
from parallel.experts import with_experts
from parallel.mesh import (
    Mesh,
    build_mesh,
    mesh_over,
    sharding_group,
    without_noise_of_splits,
)
from parallel.messages import host_group
from parallel.passes import gather_loss_and_numbers, sum_over_group
from parallel.pipeline import group_of_copies
from parallel.stages import Stages
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard
from recipes.plan.tracked import fake_processes
from recipes.recipe.schema import Recipe
from recipes.training.build import build
from recipes.training.step import train_step
from tests.meshes import mesh_degrees
from tests.processes import run_processes
from tests.training import small_recipe

pytestmark = pytest.mark.slow

IDLE = 2
"""Size of an axis that nothing in the code knows."""


def mesh_with_an_idle_axis(replicate: int, shard: int) -> Mesh:
    """Neighbouring ranks are copies of each other: they read, sum and shard as one."""
    return mesh_over(init_device_mesh("cpu", (replicate, shard, IDLE), mesh_dim_names=(*DATA_AXES, "idle")))


def first_step(recipe: Recipe, mesh: Mesh, world: Any) -> dict[str, Any]:
    """Loss, norm and gradients by name of one step on tokens that depend on the data rank alone."""
    built = build(recipe, world, mesh=mesh)
    gradients: dict[str, list[float]] = {}

    def keep(optimizer: Any, *_: Any) -> None:
        for name, parameter in built.model.named_parameters():
            gradients[name] = parameter.grad.full_tensor().flatten().tolist()

    built.optimizer.register_step_pre_hook(keep)
    tokens = torch.randint(0, recipe.model.vocabulary, (4, 33), generator=torch.Generator().manual_seed(1))
    tokens[0, 5:9] = 0
    inputs, targets = tokens[:, :-1], tokens[:, 1:].where(tokens[:, 1:] != 0, IGNORED)
    micro_batches = [
        (inputs[row : row + 1], targets[row : row + 1], None) for row in range(mesh.data_rank, 4, mesh.data_ranks)
    ]
    guard = StepGuard(mesh, device=world.device, max_skipped_steps=3, loss_spike_z=3.0)
    clock = RunClock(world.device)
    loss, norm, *_ = train_step(built, micro_batches, step=1, learning_rate=1e-3, guard=guard, clock=clock)
    mean_loss, times = gather_loss_and_numbers(loss, [float(world.rank)], loss_group=mesh.loss_group)
    return {
        "data": (mesh.data_rank, mesh.data_ranks),
        "loss": mean_loss.item(),
        "norm": norm.item(),
        "times": times.flatten().tolist(),
        "sum": sum_over_group(torch.tensor(float(mesh.data_rank)), mesh.loss_group).item(),
        "shard": [parameter.to_local().numel() for parameter in built.parameters],
        "gradients": gradients,
        "window": guard.state()["loss_window"],
    }


def steps_with_an_idle_axis(recipe: Recipe) -> list[dict[str, Any]]:
    world = start("cpu", seed=0)
    found = [first_step(recipe, mesh_with_an_idle_axis(*degrees), world) for degrees in ((1, 2), (2, 1))]
    stop()
    return found


def steps_without(recipe: Recipe) -> list[dict[str, Any]]:
    world = start("cpu", seed=0)
    meshes = [build_mesh(MeshConfig(*degrees).fit(world.size), device_type="cpu") for degrees in ((1, 2), (2, 1))]
    found = [first_step(recipe, mesh, world) for mesh in meshes]
    stop()
    return found


def test_data_sums_and_sharding_ignore_an_axis_that_they_do_not_name(corpus: Path, tmp_path: Path) -> None:
    recipe = small_recipe(corpus, tmp_path)
    recipe = replace(recipe, batch=replace(recipe.batch, global_batch_size=4))
    plain, idle = run_processes(2, steps_without, recipe), run_processes(2 * IDLE, steps_with_an_idle_axis, recipe)
    for rank, answers in enumerate(idle):
        for with_idle, without in zip(answers, plain[rank // IDLE], strict=True):
            assert with_idle["times"] == [0.0, 1.0, 2.0, 3.0]  # every process of the world has its times
            for name in ("data", "loss", "norm", "sum", "shard", "window"):
                assert with_idle[name] == without[name], (rank, name)
            for name, gradient in without["gradients"].items():
                assert with_idle["gradients"][name] == gradient, (rank, name)


def neighbours(ranks: list[int], degrees: MeshDegrees) -> dict[int, dict[str, Any]]:
    """Who is with each of these ranks of sixteen."""
    found = {}
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)
        mesh = build_mesh(degrees, device_type="cpu")
        along = {"pipeline": mesh.pipeline, "context": mesh.context, "tensor": mesh.tensor}
        groups = {name: axis.get_group() for name, axis in along.items() if axis is not None}
        groups |= {"replicate": mesh.replicate_group, "data": mesh.data_group, "loss": mesh.loss_group}
        groups |= {"copy": sharding_group(mesh)} if mesh.pipeline is not None else {}
        found[rank] = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
        found[rank] |= {"fsdp": mesh.fsdp.mesh.tolist(), "reads": (mesh.data_rank, mesh.data_ranks)}
        dist.destroy_process_group()
    return found


def test_sixteen_processes_are_laid_out_as_the_page_draws_them() -> None:
    degrees = MeshDegrees(replicate=2, shard=2, context=2, tensor=2)
    [found] = run_processes(1, neighbours, [0, 7, 13], degrees)
    even, odd = [[0, 2, 4, 6], [8, 10, 12, 14]], [[1, 3, 5, 7], [9, 11, 13, 15]]
    assert found == {
        0: {
            "tensor": [0, 1],
            "context": [0, 2],
            "replicate": [0, 8],
            "data": [0, 4, 8, 12],
            "loss": [*even[0], *even[1]],
            "fsdp": even,
            "reads": (0, 4),
        },
        7: {
            "tensor": [6, 7],
            "context": [5, 7],
            "replicate": [7, 15],
            "data": [3, 7, 11, 15],
            "loss": [*odd[0], *odd[1]],
            "fsdp": odd,
            "reads": (1, 4),
        },
        13: {
            "tensor": [12, 13],
            "context": [13, 15],
            "replicate": [5, 13],
            "data": [1, 5, 9, 13],
            "loss": [*odd[0], *odd[1]],
            "fsdp": odd,
            "reads": (3, 4),
        },
    }


def test_processes_of_a_pipeline_are_far_apart_read_the_same_and_shard_their_stage_alone() -> None:
    degrees = MeshDegrees(pipeline=2, replicate=2, shard=2, tensor=2)
    [found] = run_processes(1, neighbours, [2, 13], degrees)
    assert found == {
        2: {
            "pipeline": [2, 10],
            "tensor": [2, 3],
            "replicate": [2, 6],
            "data": [0, 2, 4, 6],
            "loss": [0, 2, 4, 6, 8, 10, 12, 14],
            "copy": [0, 1, 2, 3],  # what Muon shares its work among: of a stage
            "fsdp": [[0, 2], [4, 6]],
            "reads": (1, 4),
        },
        13: {
            "pipeline": [5, 13],
            "tensor": [12, 13],
            "replicate": [9, 13],
            "data": [9, 11, 13, 15],
            "loss": [1, 3, 5, 7, 9, 11, 13, 15],
            "copy": [12, 13, 14, 15],
            "fsdp": [[9, 11], [13, 15]],
            "reads": (2, 4),
        },
    }


GROUPS = [(1, 8, 1, 1), (2, 4, 1, 1), (1, 2, 2, 2), (2, 2, 2, 2), (2, 1, 2, 2), (1, 1, 1, 8), (1, 1, 1, 1)]
GROUPS_OF_STAGES = [
    (2, 1, 1, 1, 1),
    (2, 1, 4, 1, 1),
    (2, 2, 1, 1, 1),
    (2, 2, 2, 1, 2),
    (4, 1, 2, 2, 1),
    (2, 1, 1, 2, 2),
]


GROUPS_OF_EXPERTS = [
    (1, 1, 64, 1, 1, 8),  # as many parts of experts as processes that FSDP shards them over
    (1, 2, 4, 1, 1, 2),
    (1, 1, 2, 1, 2, 1),
    (2, 2, 2, 1, 2, 4),
    (4, 1, 2, 2, 1, 4),
    (1, 1, 8, 1, 1, 8),
    (1, 2, 2, 2, 1, 1),
]


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize(
    "degrees", [mesh_degrees(degrees) for degrees in GROUPS + GROUPS_OF_STAGES + GROUPS_OF_EXPERTS], ids=str
)
def test_the_table_of_axes_knows_every_group_that_a_process_makes(degrees: MeshDegrees, muon: bool) -> None:
    options = {"muon": muon, "experts": degrees.expert > 1 or muon, "split_ends": not muon and degrees.pipeline > 1}
    with fake_processes(degrees.processes):
        mesh = build_mesh(degrees, device_type="cpu")
        if options["experts"]:
            with_experts(mesh)
        if options["muon"]:
            sharding_group(mesh)
        if options["split_ends"]:
            group_of_copies(mesh, Stages((), tuple(range(degrees.pipeline))))
        made = [group.size() for group in dist.distributed_c10d._world.pg_map]
    assert sorted(made) == sorted(degrees.group_sizes(**options))


def timeouts_of_groups(timeout: timedelta) -> dict[str, set[timedelta]]:
    """What every group of this process was given, by its description, after a mesh of each kind."""
    start("cpu", seed=0, timeout=timeout)
    for degrees in ((8, 1, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2), (2, 1, 2, 1, 2)):
        build_mesh(mesh_degrees(degrees), device_type="cpu")
    found: dict[str, set[timedelta]] = {}
    for group in dist.distributed_c10d._world.pg_map:
        for device in group._device_types:
            name = "hosts" if group == host_group() else group.group_desc
            found.setdefault(name, set()).add(group._get_backend(device).options._timeout)
    stop()
    return found


def test_every_group_of_a_mesh_has_the_timeout_of_the_run() -> None:
    timeout = timedelta(hours=1, minutes=20)
    for found in run_processes(8, timeouts_of_groups, timeout):
        assert set(found) >= {
            "default_pg",
            "hosts",
            "mesh_replicate",
            "mesh_shard",
            "mesh_context",
            "mesh_tensor",
            "mesh_pipeline",
        }
        assert "mesh_shard_context" in found  # flattened
        assert set.union(*found.values()) == {timeout}, found


def split_with_options_of_another_backend() -> ProcessGroup:
    """As torch splits a default group of gloo and NCCL."""
    group = dist.distributed_c10d._get_default_group()
    return group.split_group([0], opts=Backend.Options("nccl", timedelta(minutes=10)), group_name="part")


@contextmanager
def into(path: Path) -> Iterator[None]:
    """What the process writes to standard error goes to this file, also what C++ writes."""
    before = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
        yield
    os.dup2(before, 2)


def noise_of_splits(folder: Path) -> tuple[str, str, list[str]]:
    """What a split writes to standard error, what a quiet one writes, and the warnings of that."""
    start("cpu", seed=0)
    torch.set_warn_always(True)  # torch gives this warning once in a process

    def split_and_warn() -> Any:
        warnings.warn("something else", stacklevel=1)
        return split_with_options_of_another_backend()

    with into(folder / "loud"):
        split_with_options_of_another_backend()
    with into(folder / "quiet"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert isinstance(without_noise_of_splits(split_and_warn), ProcessGroup)
    stop()
    return *((folder / name).read_text() for name in ("loud", "quiet")), [str(warning.message) for warning in caught]


def test_splitting_groups_warns_of_nothing_but_what_is_new(tmp_path: Path) -> None:
    """In a process of its own: torch 2.13 crashes at such a split after another default group has been destroyed."""
    [(loud, quiet, warned)] = run_processes(1, noise_of_splits, tmp_path)
    assert "Tried to pass options to ProcessGroupGloo::split" in loud  # else the filter is obsolete
    assert (quiet, warned) == ("", ["something else"])
