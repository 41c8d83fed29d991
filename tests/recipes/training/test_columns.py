"""The z-loss and the gradient norms by role that a logged step measures, on one process and on meshes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.decoder import Decoder
from models.loss import IGNORED
from models.roles import parameters_by_role
from models.sizes import SIZES
from parallel.dist import World, start, stop
from parallel.mesh import build_mesh
from parallel.passes import sum_over_group
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard
from recipes.recipe.load import to_toml
from recipes.recipe.schema import Recipe
from recipes.training.build import build
from recipes.training.step import train_step
from tests.build import build_model
from tests.families import family_config
from tests.meshes import mesh_degrees
from tests.processes import run_processes
from tests.training import SMALL_MODEL, change, train

pytestmark = pytest.mark.slow

MESHES = {1: ("1.1.1.1",), 2: ("1.2.1.1", "2.1.1.1", "1.1.2.1", "1.1.1.2", "2.1.1.1.1")}
"""Processes -> degrees of replicate, shard, context and tensor, or of pipeline and these."""
LIMIT = 0.5
"""Of logits, after the first of two steps."""
ROLES = ["embedding", "norms", "attention", "mlp", "head"]


def two_steps(recipe: Recipe, world: World, degrees: str, *, is_logged: bool = True) -> dict[str, Any]:
    """What the second step of two found, as numbers, and the weights after it."""
    mesh = build_mesh(mesh_degrees(degrees), device_type="cpu")
    built = build(recipe, world, mesh=mesh)
    guard, clock = StepGuard(mesh, device=world.device, max_skipped_steps=2), RunClock(world.device)
    for step in (1, 2):
        tokens = torch.randint(0, 512, (4, 33), generator=torch.Generator().manual_seed(step))
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        targets[0, :5] = IGNORED
        own = slice(mesh.data_rank, None, mesh.data_ranks)
        parts = zip(*(of.chunk(mesh.degrees.pipeline) for of in (inputs[own], targets[own])), strict=True)
        batch = [(*part, None) for part in parts]
        found = train_step(
            built, batch, step=step, learning_rate=1e-3, guard=guard, clock=clock, is_logged=is_logged and step == 2
        )
    numbers = {name: column.item() for name, column in found.columns.items()}
    numbers["loss"] = sum_over_group(found.loss.clone(), mesh.loss_group).item()
    return numbers | {
        "grad_norm": found.norm.item(),
        "weights": [p.full_tensor().detach().numpy() for p in built.parameters],
    }


def measured(recipe: Recipe, meshes: list[str]) -> dict[str, dict[str, Any]]:
    world = start("cpu", seed=0)
    asking = change(
        recipe,
        model=SMALL_MODEL | {"vocabulary": 512, "tied_embeddings": False, "logit_softcap": 5.0, "init_std": 0.3},
        optimizer={"z_loss": 0.01, "qk_clip": LIMIT},
        metrics={"grad_norms": True, "attention_logits": True},
        batch={"loss_chunks": 3},
    )
    found = {mesh: two_steps(asking, world, mesh) for mesh in meshes}
    if world.size == 1:
        found["not logged"] = two_steps(asking, world, meshes[0], is_logged=False)
    stop()
    return found


@pytest.fixture(scope="module")
def found(small: Recipe) -> dict[str, list[dict[str, Any]]]:
    """Mesh -> what each of its processes found."""
    every: dict[str, list[dict[str, Any]]] = {}
    for processes, meshes in MESHES.items():
        answers = run_processes(processes, measured, small, list(meshes))
        every |= {mesh: [answer[mesh] for answer in answers] for mesh in answers[0]}
    return every


def test_the_columns_are_those_of_one_process_on_every_mesh(found: dict[str, list[dict[str, Any]]]) -> None:
    [alone] = found["1.1.1.1"]
    assert list(alone)[: len(ROLES) + 1] == [*(f"grad_norm/{role}" for role in ROLES), "z_loss"]
    assert min(alone["attention_logit/0"], alone["attention_logit/1"]) > LIMIT  # so a layer's queries were scaled
    for mesh in MESHES[2]:
        for answer in found[mesh]:
            for name, number in alone.items():
                if name != "weights":
                    assert answer[name] == pytest.approx(number, rel=2e-5), (mesh, name)


def test_the_norms_by_role_add_up_to_the_gradient_norm(found: dict[str, list[dict[str, Any]]]) -> None:
    for answers in found.values():
        for answer in answers:
            parts = [value for name, value in answer.items() if name.startswith("grad_norm/")]
            assert not parts or math.hypot(*parts) == pytest.approx(answer["grad_norm"], rel=1e-5)


def test_measuring_changes_no_bit_and_other_steps_measure_nothing(found: dict[str, list[dict[str, Any]]]) -> None:
    [logged], [other] = found["1.1.1.1"], found["not logged"]
    assert set(other) == {"loss", "grad_norm", "weights"}
    assert all(map(np.array_equal, logged["weights"], other["weights"]))
    assert (logged["loss"], logged["grad_norm"]) == (other["loss"], other["grad_norm"])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("family", ["gpt2", "t5", "gemma2"])
def test_each_parameter_of_a_model_of_transformers_has_one_role(family: str) -> None:
    model, _ = build_model(family_config(family))
    roles = parameters_by_role(model)
    assert set(roles) == {"embedding", "norms", "attention", "mlp"}
    assert sum(map(len, roles.values())) == len(list(model.parameters()))
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert all("mlp" in names[one] or "DenseReluDense" in names[one] for one in roles["mlp"])
    assert all("norm" in names[one] or "ln_" in names[one] for one in roles["norms"])


def test_the_page_names_every_role_of_our_decoder() -> None:
    with torch.device("meta"):
        roles = parameters_by_role(Decoder(SIZES["moe_debug"]))
    page = (Path(__file__).parents[3] / "docs/metrics.md").read_text().partition("logs the norm by role:")[2]
    assert "routers" in roles and [role for role in roles if role not in page.partition("Their squares")[0]] == []


def test_a_run_that_asks_writes_the_columns_and_validates_without_the_z_loss(small: Recipe, tmp_path: Path) -> None:
    recipe = change(
        small,
        run={"output": str(tmp_path), "steps": 3},
        checkpoint={"every": 0},
        validation={"every": 3},
        metrics={"grad_norms": True, "every": 2},
        optimizer={"z_loss": 1.0, "name": "muon", "matrix_lr": 0.02, "lr": 0.005},
    )
    assert "z_loss = 1.0" in to_toml(recipe)
    world = start("cpu", seed=0)
    try:
        assert train(recipe, world) == 0
    finally:
        stop()
    rows = [json.loads(line) for line in (recipe.run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert {f"grad_norm/{role}" for role in ROLES if role != "head"} | {"z_loss"} <= set(row)
        assert row["matrix_lr"] == pytest.approx(4 * row["lr"])
        assert row["z_loss"] > 5 * row["loss"] > 0  # log(512)^2 is 39
    [validation] = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert validation == pytest.approx(steps[-1]["loss"], rel=0.1)
