"""A checkpoint of stages of a pipeline, or of divided experts, is that of one process, and any mesh resumes it."""

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
from recipes.optimization.optimizer import matrices_of
from recipes.optimization.skip_steps import StepGuard
from recipes.recipe.schema import Recipe
from recipes.training.build import Built, build
from recipes.training.step import train_step
from tests.meshes import degrees, mesh_degrees
from tests.processes import run_processes
from tests.recipes.checkpoint.small import all_contents, checkpoints_in, contents
from tests.training import change

pytestmark = pytest.mark.slow

STEP, LAST = 2, 4
ROWS, LENGTH, VOCABULARY = 8, 16, 68
LEARNING_RATE = 1e-2
ONE = "1.1.1.1.1.1"
SIZES = {"layers": 4, "width": 32, "head_width": 8, "feed_forward_width": 48, "vocabulary": VOCABULARY}
FLOAT8 = {"recipe": "tensorwise", "all_gather": True, "emulate": True}
EXPERTS = {"experts": 6, "experts_per_token": 2, "expert_width": 16, "router": "sigmoid", "router_bias": True}
MIXED = {"shared_experts": 1, "dense_layers": 2, "tied_embeddings": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"model": {"tied_embeddings": False}, "fsdp": {"cpu_offload": True}},
    "muon": {"model": {"tied_embeddings": False}, "optimizer": {"name": "muon"}},
    "float8": {"float8": FLOAT8, "fsdp": {"param_dtype": "bfloat16"}, "optimizer": {"state_dtype": "bfloat16"}},
    "experts": {"model": EXPERTS},
    "mixed": {"model": EXPERTS | MIXED, "fsdp": {"cpu_offload": True}},
}
CASES = (
    ("tied", "2.1.1.1.1", "1f1b"),
    ("tied", "2.1.1.1.1", "zbv"),
    ("tied", "2.2.1.1.1", "interleaved"),
    ("tied", "2.1.1.1.2", "1f1b"),
    ("tied", "2.2.2.1.1", "interleaved"),
    ("untied", "2.1.1.1.1", "interleaved"),
    ("untied", "4.1.1.1.1", "gpipe"),
    ("muon", "2.1.1.1.1", "interleaved"),
    ("muon", "2.1.2.1.1", "1f1b"),
    ("muon", "2.1.2.1.2", "zbv"),
    ("float8", "2.1.1.1.1", "1f1b"),
    ("tied", "1.1.2.1.2", "1f1b"),
    ("untied", "1.2.1.2.1", "1f1b"),
    ("experts", "1.1.2.1.1.1", "1f1b"),
    ("experts", "1.2.1.1.1.1", "1f1b"),
    ("experts", "1.1.2.1.1.2", "1f1b"),
    ("experts", "1.1.1.2.1.2", "1f1b"),
    ("experts", "1.1.1.1.2.1", "1f1b"),
    ("mixed", "1.1.1.1.2.2", "1f1b"),
    ("mixed", "2.1.1.1.1.1", "1f1b"),
    ("experts", "1.1.4.1.1.1", "1f1b"),  # 6 experts over 4 processes: FSDP leaves one of them none
    ("experts", "1.1.4.1.1.2", "1f1b"),  # 3 experts over 2: FSDP cuts each of them
    ("mixed", "1.2.2.1.1.2", "1f1b"),
    ("experts", "2.1.2.1.1.2", "1f1b"),
    ("mixed", "1.1.2.1.2.2", "1f1b"),
    ("experts", "1.2.2.1.2.2", "1f1b"),
    ("mixed", "2.1.2.1.2.2", "1f1b"),
)
"""Options, pipeline.replicate.shard.context.tensor.expert, and the schedule of the pipeline."""
Case = tuple[str, str, str]
Losses = dict[str, list[float]]


def has_experts(case: Case) -> bool:
    return case[0] in ("experts", "mixed")


def built_for(recipe: Recipe, case: Case, world: World, *, seed: int) -> Built:
    name, degrees_of_mesh, schedule = case
    pipeline = {"schedule": schedule, "stages_per_rank": 1 if schedule in ("1f1b", "gpipe") else 2}
    recipe = change(recipe, run={"seed": seed}, model=SIZES, pipeline=pipeline, fsdp={"reshard_after_forward": False})
    recipe = change(recipe, optimizer={"lr": LEARNING_RATE})
    mesh = build_mesh(mesh_degrees(degrees_of_mesh), device_type="cpu")
    return build(change(recipe, **OPTIONS[name]), world, mesh=mesh)


def train(built: Built, world: World, *, first: int, last: int) -> list[float]:
    """Take these steps, which also move the biases of routers. Returns their losses."""
    mesh, losses = built.mesh, []
    guard = StepGuard(mesh, device=world.device, max_skipped_steps=3, loss_spike_z=50.0)
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)[mesh.data_rank :: mesh.data_ranks]
        batches = [(row[None, :-1], row[None, 1:], None) for row in rows]
        clock = RunClock(world.device)
        taken = train_step(
            built, batches, step=step, learning_rate=LEARNING_RATE, guard=guard, clock=clock, is_logged=False
        )
        losses.append(sum_over_group(taken.loss.clone(), mesh.loss_group).item())
        for name, bias in built.model.named_buffers():
            if name.endswith(".bias"):
                bias += 0.1 * step * torch.arange(len(bias)).roll(int(name.split(".")[1]))
    return losses


def save(folder: Path, built: Built, **options: Any) -> None:
    pipeline = built.mesh.degrees.pipeline
    checkpoints = checkpoints_in(folder, keep=1, pipeline=pipeline, log=lambda line: None, **options)
    checkpoints.prepare(built.model, built.optimizer)
    checkpoints.save(built.model, built.optimizer, step=STEP)
    assert checkpoints.finish() == STEP


def load(folder: Path, built: Built) -> None:
    checkpoints_in(folder, keep=1, log=lambda line: None).load(built.model, built.optimizer, step=STEP)


def train_and_save(recipe: Recipe, folder: Path) -> Losses:
    """Steps with all options on one process. Returns the losses of those after the save."""
    world, losses = start("cpu", seed=0), {}
    for name in OPTIONS:
        built = built_for(recipe, (name, ONE, "1f1b"), world, seed=0)
        train(built, world, first=1, last=STEP)
        save(folder / name, built)
        losses[name] = train(built, world, first=STEP + 1, last=LAST)
    stop()
    return losses


def pass_on(recipe: Recipe, cases: Sequence[Case], folder: Path) -> dict[Case, tuple[int, list[float]]]:
    """Load what one process saved, and save it again, on a thread; experts go on. Returns the size that each announced
    before, and its losses."""
    world, sizes, losses = start("cpu", seed=0), list[int](), []

    def note(place: Path, *, checkpoint_bytes: int, keep: int) -> str:
        sizes.append(checkpoint_bytes)
        return ""

    folders.disk_space = note
    for case in cases:
        built = built_for(recipe, case, world, seed=5)
        optimizer, matrices = change(recipe, **OPTIONS[case[0]]).optimizer, matrices_of(built.optimizer)
        pipeline = built.mesh.degrees.pipeline
        space = checkpoints_in(folder / "none", keep=1, pipeline=pipeline, log=lambda line: None)
        space.require_space(built.passes.counted(built.parameters), optimizer, matrices=matrices)
        load(folder / case[0], built)
        save(folder / " ".join(case), built, asynchronous=True)
        losses.append(train(built, world, first=STEP + 1, last=LAST) if has_experts(case) else [])
    stop()
    return dict(zip(cases, zip(sizes or [0] * len(cases), losses, strict=True), strict=True))


def resume_on_one(recipe: Recipe, folder: Path) -> dict[Case, list[float]]:
    """Load what every case saved on one process, save it again, and go on. Returns the losses of experts."""
    world, losses = start("cpu", seed=0), {}
    for case in CASES:
        built = built_for(recipe, (case[0], ONE, "1f1b"), world, seed=6)
        load(folder / " ".join(case), built)
        save(folder / f"again {' '.join(case)}", built)
        losses[case] = train(built, world, first=STEP + 1, last=LAST) if has_experts(case) else []
    stop()
    return losses


Passed = tuple[Path, Losses, dict[Case, tuple[int, list[float]]], dict[Case, list[float]]]


@pytest.fixture(scope="module")
def passed_on(small: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Passed:
    """The folder; the losses without a break; the size and the losses of each mesh; the losses on one process."""
    folder = tmp_path_factory.mktemp("divided")
    unbroken = run_processes(1, train_and_save, small, folder)[0]
    on_meshes: dict[Case, tuple[int, list[float]]] = {}
    for processes in (2, 4, 8):
        cases = [case for case in CASES if prod(degrees(case[1])[:5]) == processes]
        on_meshes |= run_processes(processes, pass_on, small, cases, folder)[0]
    return folder, unbroken, on_meshes, run_processes(1, resume_on_one, small, folder)[0]


def saved(folder: Path, name: str) -> Path:
    return folder / name / f"step-{STEP:08d}"


def test_every_mesh_loads_what_one_process_saved_and_saves_it_again_bit_for_bit(passed_on: Passed) -> None:
    for case in CASES:
        ours, theirs = (contents(saved(passed_on[0], name)) for name in (f"again {' '.join(case)}", case[0]))
        assert len(theirs) == 2 and ours == theirs, case


def test_a_run_that_changes_its_mesh_has_the_losses_of_one_that_does_not(passed_on: Passed) -> None:
    _, unbroken, on_meshes, on_one = passed_on
    for case in filter(has_experts, CASES):
        assert on_one[case] == unbroken[case[0]], case
        assert on_meshes[case][1] == pytest.approx(unbroken[case[0]], rel=1e-5), case


def test_all_processes_write_every_tensor_once_and_share_the_writing(passed_on: Passed) -> None:
    for case in CASES:
        ours, theirs = (verify(saved(passed_on[0], name)) for name in (" ".join(case), case[0]))
        assert {name: (tensor.dtype, tensor.shape) for name, tensor in ours.tensors.items()} == {
            name: (tensor.dtype, tensor.shape) for name, tensor in theirs.tensors.items()
        }, case
        written = [sum(chunk.bytes for _, chunk in shard.chunks) for _, shard in all_contents(ours)]
        assert len(written) == prod(degrees(case[1])[:5]), case
        assert has_experts(case) or max(written) < 2 * min(written), (case, written)
        biases = [name for name in ours.tensors if name.endswith(".bias")]
        assert len(biases) == {"experts": 4, "mixed": 2}.get(case[0], 0)


def test_the_optimizers_groups_hold_the_names_of_all_stages(passed_on: Passed) -> None:
    """Resuming refuses a parameter that is in no group."""
    for case in CASES:
        ours, theirs = (
            {
                parameter: {key: value for key, value in group.items() if key != "params"}
                for group in verify(saved(passed_on[0], name)).state["optimizer"]
                for parameter in group["params"]
            }
            for name in (" ".join(case), case[0])
        )
        assert ours == theirs and ours, case


def test_the_announced_size_is_that_of_the_tensors_of_all_processes(passed_on: Passed) -> None:
    for case in CASES:
        tensors = verify(saved(passed_on[0], case[0])).tensors.values()
        written = sum(prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in tensors)
        assert passed_on[2][case][0] == pytest.approx(written, rel=1e-3 if has_experts(case) else 0), case
