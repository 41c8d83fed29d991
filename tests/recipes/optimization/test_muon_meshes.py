"""Muon on several processes: one curve on every mesh, elastic checkpoints, skipped steps, momenta in parts."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.sizes import SIZES
from parallel.dist import start, stop
from parallel.mesh import sharding_group
from parallel.owners import deal
from recipes.files.layout import CHECKPOINTS
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.muon import MOMENTUM
from recipes.optimization.optimizer import build_optimizer
from recipes.recipe.schema import Recipe
from tests.build import build_model, cpu_mesh
from tests.meshes import mesh_config, on_each_mesh
from tests.processes import run_processes
from tests.recipes.checkpoint.small import differences, snapshot
from tests.training import change, curve, largest_gap, run_all, train

pytestmark = pytest.mark.slow

UNEVEN = {"width": 36, "feed_forward_width": 54, "heads": 4, "key_value_heads": 2, "head_width": 10}
"""Rows that do not divide by 4 or 8: FSDP's shards are unequal."""
SAME_CURVE = 1e-5
"""Relative, in float32: gradients are summed in another order, and orthogonalization makes roundings larger."""
HALF, STEPS = 4, 8
WHOLE = {
    1: {"one": "1.1.1.1"},
    4: {"fsdp": "1.4.1.1", "hsdp": "2.2.1.1", "tensor": "1.2.1.2", "context": "1.2.2.1"},
}
"""Runs on so many processes -> name -> mesh."""


def muon_recipe(small: Recipe, name: str, mesh: str, *, steps: int = STEPS) -> Recipe:
    recipe = change(small, run={"name": name, "steps": steps, "check_replicas_every": 1}, model=UNEVEN)
    return replace(change(recipe, optimizer={"name": "muon", "lr": 5e-3, "matrix_lr": 1e-2}), mesh=mesh_config(mesh))


def run_and_continue(recipes: list[Recipe], copies: list[tuple[Path, Path]], then: list[Recipe]) -> list[int]:
    """Run some recipes, copy folders of theirs, and run others in the copies; exit codes."""
    world = start("cpu", seed=0)
    codes = [train(recipe, world) for recipe in recipes]
    if world.is_main:
        for source, target in copies:
            shutil.copytree(source, target)
    torch.distributed.barrier()
    codes += [train(recipe, world) for recipe in then]
    stop()
    return codes


@pytest.fixture(scope="module")
def runs(small: Recipe) -> dict[str, Recipe]:
    """Whole runs on every mesh, and halves of the one on 2 x 2 that went on there, on 2 processes and on 1."""
    found = {name: muon_recipe(small, name, mesh) for names in WHOLE.values() for name, mesh in names.items()}
    half = muon_recipe(small, "half", WHOLE[4]["hsdp"], steps=HALF)
    then = {name: muon_recipe(small, name, mesh) for name, mesh in (("again", "2.2.1.1"), ("two", "1.2.1.1"))}
    then["alone"] = muon_recipe(small, "alone", "1.1.1.1")
    copies = [(half.run.folder, recipe.run.folder) for recipe in then.values()]
    on_four = [*(found[name] for name in WHOLE[4]), half]
    assert run_processes(4, run_and_continue, on_four, copies, [then["again"]]) == [[0] * 6] * 4
    assert run_processes(2, run_all, [then["two"]]) == [[0]] * 2
    assert run_processes(1, run_all, [found["one"], then["alone"]]) == [[0, 0]]
    return found | then


@pytest.mark.parametrize("name", WHOLE[4])
def test_the_curve_is_the_same_on_every_mesh(runs: dict[str, Recipe], name: str) -> None:
    assert largest_gap(curve(runs[name]), curve(runs["one"])) < SAME_CURVE


def test_a_resumed_run_is_bit_equal_on_the_same_mesh(runs: dict[str, Recipe]) -> None:
    assert curve(runs["again"]) == curve(runs["hsdp"])
    for shard in range(4):
        file = Path(CHECKPOINTS) / f"step-{STEPS:08d}" / f"shard-{shard:05d}-of-00004.safetensors"
        assert (runs["again"].run.folder / file).read_bytes() == (runs["hsdp"].run.folder / file).read_bytes()


@pytest.mark.parametrize("name", ["two", "alone"])
def test_a_run_goes_on_on_other_numbers_of_processes(runs: dict[str, Recipe], name: str) -> None:
    assert largest_gap(curve(runs[name]), curve(runs["one"])) < SAME_CURVE


def skip_a_step(mesh: str) -> dict[str, Any]:
    """What a skipped step between two good ones changes, and the momenta of this process."""
    start("cpu", seed=0)
    model, _ = build_model(replace(SIZES["llama3_debug"], layers=2, **UNEVEN, vocabulary=64), mesh=mesh_config(mesh))
    processes = cpu_mesh(mesh_config(mesh))
    optimizer: Any = build_optimizer(model, OptimizerConfig(name="muon", lr=0.01), processes)
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))

    def step(*, bad: bool) -> None:
        (model(tokens[:, :-1], tokens[:, 1:]) * (torch.nan if bad else 1 / 32)).backward()
        optimizer.found_inf = torch.tensor(float(bad))
        optimizer.step()
        optimizer.zero_grad()

    step(bad=False)
    before = snapshot(model, optimizer)
    step(bad=True)
    found = {"changed": differences(before, snapshot(model, optimizer))}
    step(bad=False)
    found["still"] = [name for name, value in snapshot(model, optimizer).items() if torch.equal(value, before[name])]
    matrices = optimizer.param_groups[-1]["params"]
    found["kept"] = sum(optimizer.state[one][MOMENTUM].to_local().numel() for one in matrices)
    found["all"], found["group"] = sum(one.numel() for one in matrices), sharding_group(processes).size()
    found["more"] = {kind for one in matrices for kind in optimizer.state[one]} - {MOMENTUM}
    stop()
    return found


@pytest.fixture(scope="module")
def skipped() -> dict[str, list[Any]]:
    return on_each_mesh(["1.1.1.1", "2.1.1.2"], skip_a_step)


def test_a_skipped_step_changes_no_bit_of_parameters_and_momenta(skipped: dict[str, list[Any]]) -> None:
    for found in (one for ranks in skipped.values() for one in ranks):
        assert found["changed"] == []
        assert found["still"] == []


def test_momenta_are_all_that_matrices_keep_and_each_rank_keeps_its_share(skipped: dict[str, list[Any]]) -> None:
    for found in (one for ranks in skipped.values() for one in ranks):
        assert not found["more"]
        assert found["kept"] * found["group"] == found["all"]


def test_every_matrix_has_one_owner_and_no_batch_exceeds_the_limit() -> None:
    shapes = [(64, 64), (16, 64), (16, 64), (64, 64), (96, 64), (96, 64), (64, 96)] * 5
    rounds = deal(shapes, owners=4, batch=2 * 64 * 64)
    assert sorted(number for batches in rounds for batch in batches for number in batch) == [*range(35)]
    for batch in (batch for batches in rounds for batch in batches if batch):
        assert len({tuple(sorted(shapes[number])) for number in batch}) == 1
        assert len(batch) == 1 or sum(shapes[number][0] * shapes[number][1] for number in batch) <= 2 * 64 * 64
