"""Experts that begin as the feed-forwards of a dense model."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.config import ModelConfig
from models.decoder import Decoder
from models.sizes import SIZES
from parallel.dist import start, stop
from parallel.errors import UserError
from parallel.mesh import build_mesh
from recipes.files.exit_codes import FINISHED
from recipes.recipe.fields import toml
from recipes.recipe.load import load_run
from recipes.recipe.rules import violations
from recipes.recipe.schema import Recipe
from recipes.training.build import build
from recipes.weights.convert import CARD, load_weights
from recipes.weights.locate import find_weights
from tests.meshes import degrees, mesh_degrees
from tests.processes import run_processes
from tests.recipes.weights.test_experts import write_folder
from tests.training import change, rows, run_all
from tests.whole import whole

DENSE = replace(
    SIZES["llama3_debug"], qk_norm="head", layers=3, width=32, head_width=8, feed_forward_width=48, vocabulary=512
)
EXPERTS: dict[str, Any] = {"experts": 4, "experts_per_token": 2, "expert_width": 48, "upcycle": True}
SPARSE = replace(DENSE, **EXPERTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders "hf" and "checkpoint" of a dense model."""
    return write_folder(tmp_path_factory.mktemp("dense") / "dense", DENSE).parent


def upcycled(config: ModelConfig, source: Path) -> Decoder:
    model = Decoder(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    values = dict(model.initial_values(shapes, seed=0, device=torch.device("cpu")))
    model.load_state_dict(values)
    load_weights(model, find_weights(source))
    for name, tensor in model.state_dict().items():
        assert not name.startswith("routers.") or torch.equal(tensor, values[name]), name
    return model


@pytest.mark.parametrize("source", ["hf", "checkpoint"])
@pytest.mark.parametrize("fields", [{}, {"dense_layers": 1}, {"router": "sigmoid", "router_bias": True}], ids=str)
def test_an_upcycled_model_computes_what_the_dense_one_does(fields: dict[str, Any], source: str, folder: Path) -> None:
    dense = Decoder(DENSE)
    load_weights(dense, find_weights(folder / source))
    tokens = torch.randint(DENSE.vocabulary, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = dense(tokens)
        found = upcycled(replace(SPARSE, **fields), folder / source)(tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def values_on(mesh: str, recipe: Recipe, folder: Path) -> dict[str, Any]:
    world = start("cpu", seed=0)
    found: dict[str, Tensor] = {}
    for source in ("hf", "checkpoint"):
        devices = build_mesh(mesh_degrees(mesh), device_type="cpu")
        model = build(replace(recipe, model=SPARSE), world, weights=find_weights(folder / source), mesh=devices).model
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            one = whole(value) if isinstance(value, DTensor) else value.detach()
            assert source == "hf" or torch.equal(found[name], one), name
            found[name] = one
    stop()
    return {name: one.numpy() for name, one in found.items() if name.startswith(("routers.", "blocks.1.", "norm"))}


@pytest.mark.slow
def test_upcycling_gives_the_same_values_on_any_mesh(small: Recipe, folder: Path) -> None:
    small = change(small, fsdp={"reshard_after_forward": False})
    [alone] = run_processes(1, values_on, "1.1.1.1.1.1", small, folder)
    for mesh in ("1.1.2.1.1.2", "1.1.1.1.2.2", "2.1.2.1.1.2", "1.1.4.1.1.2"):
        answers = run_processes(prod(degrees(mesh)[:5]), values_on, mesh, small, folder)
        together = {name: one for answer in answers for name, one in answer.items()}
        assert together.keys() == alone.keys(), mesh
        assert all((one == alone[name]).all() for name, one in together.items()), mesh


def problems_of(folder: Path, tmp_path: Path, **fields: Any) -> str:
    """What loading a recipe says that starts from the dense weights with these fields of the model."""
    values = {"name": "from_weights", "weights": str(folder / "hf"), **EXPERTS, **fields}
    lines = "\n".join(f"{key} = {toml(value)}" for key, value in values.items())
    file = tmp_path / "recipe.toml"
    run, data = f'name = "up"\noutput = "{tmp_path}"', 'tokenizer = "from_weights"'
    file.write_text(f"[run]\n{run}\n[model]\n{lines}\n[data]\n{data}\n")
    try:
        assert load_run(file).recipe.model.upcycle
    except UserError as error:
        return " ".join(str(error).replace(f"({file})", "").split())
    return ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, ""),
        (
            {"upcycle": False},
            'is 0 in the weights of FOLDER; write that, or omit it and write name = "from_weights", or upcycle = true,'
            " which starts each expert as the dense feed-forward",
        ),
        ({"expert_width": 24}, "model.expert_width = 24 must be 48, the whole feed-forward"),
        ({"shared_experts": 1}, "model.shared_experts = 1 would be added"),
        ({"normalize_scores": False}, "model.normalize_scores = false must be true"),
        ({"router_scale": 2.5}, "model.router_scale = 2.5 must be 1, so that the model begins as the dense one"),
        ({"experts": 0, "experts_per_token": 1, "expert_width": 1}, "model.upcycle = true is for a model with experts"),
        ({"width": 64}, "model.width = 64 is 32 in the weights"),
    ],
)
def test_what_cannot_be_upcycled_is_refused_with_a_remedy(
    fields: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    found = problems_of(folder, tmp_path, **fields)
    assert message in found.replace(str(folder / "hf"), "FOLDER") and found.count("model.") == bool(message), found


def test_upcycling_without_weights_is_refused_wherever_the_run_will_be() -> None:
    """It would start at random, without a word. Weights that another machine has are not looked for."""
    recipe, world = Recipe(model=SPARSE), {"processes": 1, "nodes": 1}
    problem = ("model.upcycle", "needs the weights of a dense model; write model.weights, or false")
    assert problem in [*violations(recipe, None, **world)]
    assert [*violations(recipe, None, elsewhere=True, **world)] == [problem]
    away = replace(recipe, model=replace(SPARSE, weights="elsewhere"))
    assert not [*violations(away, None, elsewhere=True, **world)]


@pytest.mark.slow
def test_an_upcycled_run_says_so_resumes_and_is_exported(small: Recipe, tmp_path: Path) -> None:
    run = {"name": "dense", "steps": 4, "output": str(tmp_path)}
    dense = change(small, run=run, model={"qk_norm": "head", "no_rope_every": 0})
    assert run_processes(1, run_all, [dense]) == [[FINISHED]]
    start_of = {"weights": str(dense.run.folder), "experts": 4, "experts_per_token": 2, "expert_width": 96}
    sparse = change(
        dense,
        run={"name": "sparse"},
        model={**start_of, "upcycle": True},
        checkpoint={"export_hf": True},
        data={"tokenizer": "from_weights"},
    )
    more = change(sparse, run={"steps": 6})
    again = change(
        dense, run={"name": "again"}, model={"weights": start_of["weights"]}, data={"tokenizer": "from_weights"}
    )
    assert run_processes(2, run_all, [change(sparse, mesh={"expert": 2}), more, again], False) == [[FINISHED] * 3] * 2
    assert rows(sparse)[0]["loss"] == pytest.approx(rows(again)[0]["loss"], rel=1e-5)
    assert "upcycling: each expert begins as the dense feed-forward" in (sparse.run.folder / "log.txt").read_text()
    assert (
        f"Upcycled: each expert began as the feed-forward of the dense model in `{dense.run.folder}`"
        in (sparse.run.folder / "hf" / CARD).read_text()
    )
