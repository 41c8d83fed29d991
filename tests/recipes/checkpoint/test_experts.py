"""A checkpoint of a model with experts is that of one process, whatever divides them, and any mesh resumes it."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.dist import World, start, stop
from parallel.mesh import build_mesh
from parallel.passes import sum_over_group
from recipes.checkpoint import folder as folders
from recipes.checkpoint.files import verify
from recipes.checkpoint.manifest import DTYPE_BYTES
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard
from recipes.recipe.schema import Recipe
from recipes.training.build import Built, build
from recipes.training.step import train_step
from tests.meshes import degrees, mesh_degrees
from tests.processes import run_processes
from tests.recipes.checkpoint.small import checkpoints_in, contents
from tests.training import change

pytestmark = pytest.mark.slow

STEP, LAST = 2, 4
ROWS, LENGTH, VOCABULARY = 8, 16, 68
ONE = "1.1.1.1.1.1"
SIZES = {"layers": 4, "width": 32, "head_width": 8, "feed_forward_width": 48, "vocabulary": VOCABULARY}
EXPERTS = {"experts": 6, "experts_per_token": 2, "expert_width": 16, "router": "sigmoid", "router_bias": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed": {
        "model": {"shared_experts": 1, "dense_layers": 2, "tied_embeddings": False},
        "fsdp": {"cpu_offload": True},
    },
}
CASES = (
    ("plain", "1.1.2.1.1.1"),
    ("plain", "1.2.1.1.1.1"),
    ("plain", "1.1.2.1.1.2"),
    ("plain", "1.1.1.2.1.2"),
    ("plain", "1.1.1.1.2.1"),
    ("mixed", "1.1.1.1.2.2"),
    ("mixed", "2.1.1.1.1.1"),
    ("plain", "1.1.4.1.1.1"),  # 6 experts over 4 processes: FSDP leaves one of them none
    ("plain", "1.1.4.1.1.2"),  # 3 experts over 2: FSDP cuts each of them
    ("mixed", "1.2.2.1.1.2"),
    ("plain", "2.1.2.1.1.2"),
    ("mixed", "1.1.2.1.2.2"),
    ("plain", "1.2.2.1.2.2"),
    ("mixed", "2.1.2.1.2.2"),
)
"""Options, and pipeline.replicate.shard.context.tensor.expert."""
Case = tuple[str, str]


def named(case: Case) -> str:
    return " ".join(case)


def built_for(recipe: Recipe, case: Case, world: World, *, seed: int) -> Built:
    name, degrees_of_mesh = case
    recipe = change(recipe, run={"seed": seed}, model=SIZES | EXPERTS, fsdp={"reshard_after_forward": False})
    mesh = build_mesh(mesh_degrees(degrees_of_mesh), device_type="cpu")
    return build(change(recipe, **OPTIONS[name]), world, mesh=mesh)


def train(built: Built, world: World, *, first: int, last: int) -> list[float]:
    """Take these steps, which also move the biases of routers. Returns their losses."""
    guard, mesh, losses = (
        StepGuard(built.mesh, device=world.device, max_skipped_steps=3, loss_spike_z=50.0),
        built.mesh,
        [],
    )
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)[mesh.data_rank :: mesh.data_ranks]
        batches = [(row[None, :-1], row[None, 1:], None) for row in rows]
        clock = RunClock(world.device)
        found = train_step(built, batches, step=step, learning_rate=1e-2, guard=guard, clock=clock, is_logged=False)
        losses.append(sum_over_group(found.loss.clone(), mesh.loss_group).item())
        for name, bias in built.model.named_buffers():
            bias += 0.1 * step * torch.arange(len(bias)).roll(int(name.split(".")[1]))
    return losses


def save(folder: Path, built: Built) -> None:
    pipeline = built.mesh.degrees.pipeline
    checkpoints = checkpoints_in(folder, keep=1, pipeline=pipeline, log=lambda line: None)
    checkpoints.save(built.model, built.optimizer, step=STEP)
    assert checkpoints.finish() == STEP


def load(folder: Path, built: Built) -> None:
    checkpoints_in(folder, keep=1, log=lambda line: None).load(built.model, built.optimizer, step=STEP)


def train_and_save(recipe: Recipe, folder: Path) -> dict[str, list[float]]:
    """Steps with all options on one process. Returns the losses of those after the save."""
    world, losses = start("cpu", seed=0), {}
    for name in OPTIONS:
        built = built_for(recipe, (name, ONE), world, seed=0)
        train(built, world, first=1, last=STEP)
        save(folder / name, built)
        losses[name] = train(built, world, first=STEP + 1, last=LAST)
    stop()
    return losses


def pass_on(recipe: Recipe, cases: Sequence[Case], folder: Path) -> dict[Case, tuple[int, list[float]]]:
    """Load what one process saved, save it again, and go on. Returns the announced size and the losses of each."""
    world, sizes, losses = start("cpu", seed=0), list[int](), []

    def note(place: Path, *, checkpoint_bytes: int, keep: int) -> str:
        sizes.append(checkpoint_bytes)
        return ""

    folders.disk_space = note
    for case in cases:
        built = built_for(recipe, case, world, seed=5)
        space = checkpoints_in(folder / "none", keep=1, pipeline=built.mesh.degrees.pipeline, log=lambda line: None)
        space.require_space(built.passes.counted(built.parameters), recipe.optimizer)
        load(folder / case[0], built)
        save(folder / named(case), built)
        losses.append(train(built, world, first=STEP + 1, last=LAST))
    stop()
    return dict(zip(cases, zip(sizes or [0] * len(cases), losses, strict=True), strict=True))


def resume_on_one(recipe: Recipe, folder: Path) -> dict[Case, list[float]]:
    """Load what every case saved on one process, save it again, and go on. Returns the losses."""
    world, losses = start("cpu", seed=0), {}
    for case in CASES:
        built = built_for(recipe, (case[0], ONE), world, seed=6)
        load(folder / named(case), built)
        save(folder / f"again {named(case)}", built)
        losses[case] = train(built, world, first=STEP + 1, last=LAST)
    stop()
    return losses


Passed = tuple[Path, dict[str, list[float]], dict[Case, tuple[int, list[float]]], dict[Case, list[float]]]


@pytest.fixture(scope="module")
def passed_on(small: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Passed:
    """The folder; the losses without a break; those of each mesh, and the size it announced; those on one process."""
    folder = tmp_path_factory.mktemp("experts")
    unbroken = run_processes(1, train_and_save, small, folder)[0]
    found: dict[Case, tuple[int, list[float]]] = {}
    for processes in (2, 4, 8):
        cases = [case for case in CASES if prod(degrees(case[1])[:5]) == processes]
        found |= run_processes(processes, pass_on, small, cases, folder)[0]
    return folder, unbroken, found, run_processes(1, resume_on_one, small, folder)[0]


def test_every_mesh_loads_the_experts_that_one_process_saved_and_saves_them_again_bit_for_bit(
    passed_on: Passed,
) -> None:
    for case in CASES:
        ours, theirs = (
            contents(passed_on[0] / name / f"step-{STEP:08d}") for name in (f"again {named(case)}", case[0])
        )
        assert len(theirs) == 2 and ours.keys() == theirs.keys(), case
        assert all(ours[name] == theirs[name] for name in theirs if name.startswith("shard-")), case


def test_a_run_that_changes_its_mesh_has_the_losses_of_one_that_does_not(passed_on: Passed) -> None:
    _, unbroken, on_mesh, on_one = passed_on
    for case in CASES:
        assert on_one[case] == unbroken[case[0]], case
        assert on_mesh[case][1] == pytest.approx(unbroken[case[0]], rel=1e-5), case


def test_each_element_of_an_expert_is_written_once_by_all_processes_together(passed_on: Passed) -> None:
    for case in CASES:
        manifest = verify(passed_on[0] / named(case) / f"step-{STEP:08d}")
        biases = [name for name in manifest.tensors if name.endswith(".bias")]
        assert len(biases) == SIZES["layers"] - OPTIONS[case[0]].get("model", {}).get("dense_layers", 0)
        for name, tensor in manifest.tensors.items():
            elements = sum(row.count * prod(row.shape) for row in tensor.boxes)
            assert elements == prod(tensor.shape), (case, name)
        assert len(manifest.shards) == prod(degrees(case[1])[:5]), case


def test_the_announced_size_of_a_checkpoint_with_experts_is_what_it_takes(passed_on: Passed) -> None:
    for case in CASES:
        manifest = verify(passed_on[0] / named(case) / f"step-{STEP:08d}")
        written = sum(DTYPE_BYTES[tensor.dtype] * prod(tensor.shape) for tensor in manifest.tensors.values())
        assert passed_on[2][case][0] == pytest.approx(written, rel=1e-3), case
