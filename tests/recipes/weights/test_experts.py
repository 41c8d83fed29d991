"""Folders of models with experts into and out of models whose experts are divided."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from models.config import ModelConfig
from models.hf import parameter_shapes
from models.sizes import SIZES
from parallel.dist import start, stop
from parallel.mesh import build_mesh
from recipes.checkpoint.parameters import write_parameters
from recipes.recipe.schema import Recipe
from recipes.training.build import build
from recipes.weights.convert import export_checkpoint
from recipes.weights.description import Description, checkpoint_files
from recipes.weights.locate import find_weights
from tests.meshes import degrees, mesh_degrees
from tests.processes import run_processes
from tests.recipes.weights.test_hf_folder import FACTS, TOKENIZER, contents, random_tensor
from tests.training import change
from tests.whole import export_model, whole

pytestmark = pytest.mark.slow

QWEN = replace(SIZES["moe_debug"], layers=2, width=32, head_width=8, vocabulary=72, experts=4, expert_width=20)
DOTS = replace(QWEN, layers=3, router="sigmoid", router_bias=True, shared_experts=1, dense_layers=1, expert_width=16)
MODELS = {"qwen": QWEN, "dots": DOTS}
MESHES = ("1.1.2.1.1.2", "1.1.1.1.2.1", "1.2.1.1.2.2", "1.1.4.1.1.4", "2.1.2.1.1.2", "1.1.2.2.1.1", "1.1.6.1.1.2")
"""pipeline.replicate.shard.context.tensor.expert. In the last one, FSDP leaves a process of three no expert."""


def write_folder(folder: Path, config: ModelConfig) -> Path:
    """A Hugging Face folder with random weights."""
    shapes = {name: (shape, torch.float32) for name, shape in parameter_shapes(config)}
    files = checkpoint_files(Description(config, FACTS, TOKENIZER))
    (folder / "checkpoint").mkdir(parents=True)
    write_parameters(folder / "checkpoint", shapes, lambda name: random_tensor(name, shapes[name][0]), files=files)
    export_checkpoint(folder / "checkpoint", folder / "hf", max_bytes=10_000)
    return folder / "hf"


def through(mesh: str, recipe: Recipe, folder: Path) -> None:
    """Start from each folder, and from a checkpoint of it; export."""
    world = start("cpu", seed=0)
    for name, config in MODELS.items():
        for source in ("hf", "checkpoint"):
            devices = build_mesh(mesh_degrees(mesh), device_type="cpu")
            sparse = change(replace(recipe, model=config), fsdp={"reshard_after_forward": False})
            model = build(sparse, world, weights=find_weights(folder / name / source), mesh=devices).model
            for parameter, value in [*model.named_parameters(), *model.named_buffers()]:
                found = whole(value) if isinstance(value, DTensor) else value
                assert torch.equal(found, random_tensor(parameter, tuple(value.shape))), (name, source, parameter)
        if devices.pipeline is None:
            description = Description(config, FACTS, TOKENIZER)
            export_model(model, folder / f"{mesh}-{name}", description, world=world, max_bytes=10_000)
    stop()


@pytest.fixture(scope="module")
def passed(small: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for name, config in MODELS.items():
        write_folder(folder / name, config)
    for mesh in MESHES:
        run_processes(prod(degrees(mesh)[:5]), through, mesh, small, folder)
    return folder


def test_an_export_of_divided_experts_is_that_of_one_process(passed: Path) -> None:
    for name in MODELS:
        expected = contents(passed / name / "hf")
        assert "model.safetensors.index.json" in expected
        for mesh in MESHES:
            assert mesh.startswith("2.") or contents(passed / f"{mesh}-{name}") == expected, (mesh, name)
