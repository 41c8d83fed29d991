"""Hugging Face folders into and out of models that tensor and context parallelism have cut."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.config import ModelConfig
from models.hf import parameter_shapes
from parallel.config import FSDPConfig
from parallel.dist import start, stop
from parallel.errors import UserError
from parallel.fsdp import plain_name
from parallel.mesh import build_mesh
from recipes.recipe.schema import Recipe
from recipes.training.build import build
from recipes.weights import convert
from recipes.weights.convert import export_checkpoint, import_folder, load_weights
from recipes.weights.description import Description
from recipes.weights.locate import find_weights
from tests.build import build_model
from tests.meshes import mesh_config, mesh_degrees, on_each_mesh
from tests.recipes.weights.test_hf_folder import (
    FACTS,
    SMALL,
    TOKENIZER,
    contents,
    edit_config,
    random_tensor,
    write_random,
)
from tests.training import change
from tests.whole import export_model, whole

pytestmark = pytest.mark.slow

# FSDP's parts of these sizes are unequal.
EVEN_HEADS = replace(SMALL, heads=4, key_value_heads=2, feed_forward_width=50, vocabulary=70)
FOUR_LAYERS = replace(EVEN_HEADS, layers=4, tied_embeddings=True)
MESHES = ("1.1.1.2", "1.2.1.2", "2.1.1.2")
TIED = {"tied": True, "untied": False}


def through(mesh: str, folder: Path) -> dict[str, int]:
    """Load each folder, and the checkpoint made of it; export. Returns how many elements were read, and are held."""
    world = start("cpu", seed=0)
    read = [0]
    original = convert._read

    def counting(*arguments: Any) -> Tensor:
        values = original(*arguments)
        read[0] += values.numel()
        return values

    convert._read = counting
    found = {}
    for name, tied in TIED.items():
        config = replace(EVEN_HEADS, tied_embeddings=tied)
        for source, dtype in ((name, "float32"), (name + "-checkpoint", "bfloat16")):
            read[0] = 0
            model, _ = build_model(config, mesh=mesh_config(mesh), seed=1, fsdp=FSDPConfig(param_dtype=dtype))
            load_weights(model, find_weights(folder / source))
            found[f"{source} read"] = read[0]
            found[f"{source} held"] = sum(value.to_local().numel() for value in model.parameters())
            for parameter_name, value in model.named_parameters():
                assert isinstance(value, DTensor)
                parameter_name = plain_name(parameter_name)
                assert torch.equal(whole(value), random_tensor(parameter_name, tuple(value.shape))), parameter_name
        with torch.no_grad():  # as in validation; it leaves some weights gathered, in bfloat16
            model(torch.zeros(1, 8, dtype=torch.int64))
        description = Description(config, FACTS, TOKENIZER)
        export_model(model, folder / f"{mesh}-{name}", description, world=world, max_bytes=10_000)
    with pytest.raises(UserError, match=r"its lm_head\.weight differs from its model\.embed_tokens\.weight"):
        load_weights(build_model(EVEN_HEADS, mesh=mesh_config(mesh))[0], find_weights(folder / "wrong"))
    stop()
    return found


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, int]]]]:
    folder = tmp_path_factory.mktemp("folders")
    for name, tied in TIED.items():
        write_random(folder / name, replace(EVEN_HEADS, tied_embeddings=tied))
        import_folder(folder / name, folder / f"{name}-checkpoint")
    wrong = write_random(folder / "wrong", replace(EVEN_HEADS, tied_embeddings=False))
    config = (wrong / "config.json").read_text()
    (wrong / "config.json").write_text(config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    return folder, on_each_mesh(MESHES, through, folder)


def test_a_tensor_rank_reads_only_its_own_part_of_a_folder(loaded: Any) -> None:
    for mesh, processes in loaded[1].items():
        for found in processes:
            for name in TIED:
                assert found[f"{name} read"] == found[f"{name} held"] > 0, mesh
        shares = sum(found["untied held"] for found in processes)
        assert shares < EVEN_HEADS.num_params() * (2.4 if mesh == "2.1.1.2" else 1.2), mesh


def test_an_export_from_every_mesh_is_that_of_one_process(loaded: Any, tmp_path: Path) -> None:
    folder = loaded[0]
    for name in TIED:
        export_checkpoint(folder / f"{name}-checkpoint", tmp_path / name, max_bytes=10_000)
        expected = contents(tmp_path / name)
        assert expected == contents(folder / name) and "model.safetensors.index.json" in expected
        for mesh in MESHES:
            assert contents(folder / f"{mesh}-{name}") == expected, (mesh, name)


STAGES = {"2.1.1.1.1": "zbv", "2.1.2.1.1": "interleaved", "4.1.1.1.1": "1f1b"}
"""Meshes with a pipeline -> its schedule."""


def into_stages(mesh: str, recipe: Recipe, folder: Path) -> list[str]:
    """Start from each folder and from its checkpoint. Returns the names of the parameters, and last an error."""
    world, degrees = start("cpu", seed=0), mesh_degrees(mesh)
    names: list[str] = []
    pipeline = {"schedule": STAGES[mesh], "stages_per_rank": 1 if STAGES[mesh] == "1f1b" else 2}
    recipe = change(recipe, pipeline=pipeline, fsdp={"reshard_after_forward": False})

    def started_from(source: str, config: ModelConfig) -> nn.Module:
        weights, devices = find_weights(folder / source), build_mesh(degrees, device_type="cpu")
        return build(replace(recipe, model=config), world, weights=weights, mesh=devices).model

    for name, tied in TIED.items():
        for source in (name, name + "-checkpoint"):
            found = dict(started_from(source, replace(FOUR_LAYERS, tied_embeddings=tied)).named_parameters())
            names += [f"{source} {parameter}" for parameter in found]
            for parameter, value in found.items():
                assert isinstance(value, DTensor)
                assert torch.equal(whole(value), random_tensor(parameter, tuple(value.shape))), (source, parameter)
    with pytest.raises(UserError, match=r"its lm_head\.weight differs from its model\.embed_tokens\.weight") as error:
        started_from("wrong", FOUR_LAYERS)
    stop()
    return [*names, str(error.value)]


def test_each_stage_of_a_pipeline_starts_from_its_own_part_of_a_folder_or_a_checkpoint(
    small: Recipe, tmp_path: Path
) -> None:
    for name, tied in TIED.items():
        write_random(tmp_path / name, replace(FOUR_LAYERS, tied_embeddings=tied))
        import_folder(tmp_path / name, tmp_path / f"{name}-checkpoint")
    wrong = write_random(tmp_path / "wrong", replace(FOUR_LAYERS, tied_embeddings=False))
    edit_config(wrong, tie_word_embeddings=True)
    expected = {
        f"{name}{source} {parameter}"
        for name, tied in TIED.items()
        for source in ("", "-checkpoint")
        for parameter, _ in parameter_shapes(replace(FOUR_LAYERS, tied_embeddings=tied))
    }
    for mesh, answers in on_each_mesh([*STAGES], into_stages, small, tmp_path).items():
        assert {name for *names, _ in answers for name in names} == expected, mesh
        assert len({error for *_, error in answers}) == 1
