"""The stages of a pipeline save one checkpoint, which is that of one process, and load what any mesh saved."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.dist import World, start, stop
from parallel.mesh import build_mesh
from recipes.checkpoint import folder as folders
from recipes.checkpoint.files import verify
from recipes.checkpoint.manifest import DTYPE_BYTES
from recipes.optimization.optimizer import matrices_of
from recipes.recipe.schema import Recipe
from recipes.training.build import Built, build
from tests.meshes import degrees, mesh_degrees
from tests.processes import run_processes
from tests.recipes.checkpoint.small import all_contents, checkpoints_in, contents
from tests.training import change

pytestmark = pytest.mark.slow

STEP = 2
ONE = "1.1.1.1.1"
FLOAT8 = {"recipe": "tensorwise", "all_gather": True, "emulate": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"model": {"tied_embeddings": False}, "fsdp": {"cpu_offload": True}},
    "muon": {"model": {"tied_embeddings": False}, "optimizer": {"name": "muon"}},
    "float8": {"float8": FLOAT8, "fsdp": {"param_dtype": "bfloat16"}, "optimizer": {"state_dtype": "bfloat16"}},
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
)
Case = tuple[str, str, str]


def built_for(recipe: Recipe, case: Case, world: World, *, seed: int) -> Built:
    options, degrees_of_mesh, schedule = case
    sizes = {"layers": 4, "width": 32, "head_width": 8, "feed_forward_width": 48, "vocabulary": 67}
    pipeline = {"schedule": schedule, "stages_per_rank": 1 if schedule in ("1f1b", "gpipe") else 2}
    recipe = change(recipe, run={"seed": seed}, model=sizes, pipeline=pipeline, fsdp={"reshard_after_forward": False})
    mesh = build_mesh(mesh_degrees(degrees_of_mesh), device_type="cpu")
    return build(change(recipe, **OPTIONS[options]), world, mesh=mesh)


def named(case: Case) -> str:
    return " ".join(case)


def save(folder: Path, built: Built, **options: Any) -> None:
    pipeline = built.mesh.degrees.pipeline
    checkpoints = checkpoints_in(folder, keep=1, pipeline=pipeline, log=lambda line: None, **options)
    checkpoints.prepare(built.model, built.optimizer)
    checkpoints.save(built.model, built.optimizer, step=STEP)
    assert checkpoints.finish() == STEP


def load(folder: Path, built: Built) -> None:
    checkpoints_in(folder, keep=1, log=lambda line: None).load(built.model, built.optimizer, step=STEP)


def train_and_save(recipe: Recipe, folder: Path) -> None:
    """Two steps with all options on one process."""
    world = start("cpu", seed=0)
    for name in OPTIONS:
        built = built_for(recipe, (name, ONE, "1f1b"), world, seed=0)
        for seed in range(STEP):
            tokens = torch.randint(67, (2, 17), generator=torch.Generator().manual_seed(seed))
            (built.model(tokens[:, :-1], tokens[:, 1:]) / 32).backward()
            built.optimizer.step()
            built.optimizer.zero_grad()
        save(folder / name, built)
    stop()


def pass_on(recipe: Recipe, cases: Sequence[Case], folder: Path) -> list[int]:
    """Load what one process saved, and save it again, on a thread. Returns the sizes that were announced before."""
    world, sizes = start("cpu", seed=0), list[int]()

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
        save(folder / named(case), built, asynchronous=True)
    stop()
    return sizes


def write_again(recipe: Recipe, folder: Path) -> None:
    """Load what every case saved on one process, and save it again."""
    world = start("cpu", seed=0)
    for case in CASES:
        built = built_for(recipe, (case[0], ONE, "1f1b"), world, seed=6)
        load(folder / named(case), built)
        save(folder / f"again {named(case)}", built)
    stop()


@pytest.fixture(scope="module")
def passed_on(small: Recipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Case, int]]:
    """The folder, and the size that each case announced."""
    folder, sizes = tmp_path_factory.mktemp("pipelines"), dict[Case, int]()
    run_processes(1, train_and_save, small, folder)
    for processes in (2, 4, 8):
        cases = [case for case in CASES if prod(degrees(case[1])) == processes]
        sizes |= zip(cases, run_processes(processes, pass_on, small, cases, folder)[0], strict=True)
    run_processes(1, write_again, small, folder)
    return folder, sizes


def test_every_pipeline_loads_what_one_process_saved_and_saves_it_again_bit_for_bit(passed_on: Any) -> None:
    folder = passed_on[0]
    for case in CASES:
        expected = contents(folder / case[0] / f"step-{STEP:08d}")
        assert len(expected) == 2
        assert contents(folder / f"again {named(case)}" / f"step-{STEP:08d}") == expected, case


def test_the_stages_write_every_tensor_once_and_share_the_writing(passed_on: Any) -> None:
    folder = passed_on[0]
    for case in CASES:
        ours, theirs = (verify(folder / name / f"step-{STEP:08d}") for name in (named(case), case[0]))
        assert {name: (tensor.dtype, tensor.shape) for name, tensor in ours.tensors.items()} == {
            name: (tensor.dtype, tensor.shape) for name, tensor in theirs.tensors.items()
        }, case
        written = [sum(chunk.bytes for _, chunk in found.chunks) for _, found in all_contents(ours)]
        assert len(written) == prod(degrees(case[1])) and max(written) < 2 * min(written), (case, written)


def test_the_optimizers_groups_hold_the_names_of_all_stages(passed_on: Any) -> None:
    """Resuming refuses a parameter that is in no group."""
    folder = passed_on[0]
    for case in CASES:
        ours, theirs = (
            {
                parameter: {key: value for key, value in group.items() if key != "params"}
                for group in verify(folder / name / f"step-{STEP:08d}").state["optimizer"]
                for parameter in group["params"]
            }
            for name in (named(case), case[0])
        )
        assert ours == theirs and ours, case


def test_the_announced_size_is_that_of_the_tensors_of_all_stages(passed_on: Any) -> None:
    folder, sizes = passed_on
    for case in CASES:
        tensors = verify(folder / case[0] / f"step-{STEP:08d}").tensors.values()
        assert sizes[case] == sum(prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in tensors), case
