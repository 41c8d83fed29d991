"""Models of transformers train as they do without us: losses and gradients of plain transformers and torch's AdamW."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.transformers import TransformersModel, plain_model, stored_layout
from models.transformers_config import TransformersConfig
from parallel.config import MeshDegrees
from parallel.dist import World, start, stop
from parallel.materialize import plain_name
from parallel.mesh import build_mesh
from parallel.reduce import sum_over_group
from recipes.load import load
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard
from recipes.schema import Recipe
from recipes.training.build import build
from recipes.training.step import train_step
from tests.families import FAMILIES, batch_for, family_config, rows_of
from tests.parallel.combinations import degrees_of, options_of, sections_of
from tests.processes import run_processes
from tests.training import DEBUG, change

STEPS, SEED, RATE, CLIP = 10, 3, 1e-3, 1.0
CASES = {
    1: ("1.1.1.1", "1.1.1.1:accumulate"),
    2: ("1.2.1.1", "1.2.1.1:zero2,accumulate"),
}


def initial_state(config: TransformersConfig) -> dict[str, Tensor]:
    """transformers' names and layouts of what a run with SEED starts from."""
    with torch.device("meta"):
        model = TransformersModel(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    values = model.initial_values(shapes, seed=SEED, device=torch.device("cpu"))
    layout = stored_layout(config).tensors
    return {layout[name].name: value.t() if layout[name].transposed else value for name, value in values}


def train_plainly(config: TransformersConfig) -> dict[str, Any]:
    """Losses, norms and the first gradients (our names, our layouts), without any code of ours but the weights."""
    model = plain_model(config).train()
    with torch.no_grad():
        for name, value in initial_state(config).items():
            model.get_parameter(name).copy_(value)
    decayed = [p for p in model.parameters() if p.dim() >= 2 and p is not model.get_input_embeddings().weight]
    others = [p for p in model.parameters() if not any(p is one for one in decayed)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=RATE,
        betas=(0.9, 0.95),
        eps=1e-8,
        foreach=False,
    )
    losses, norms, gradients = [], [], {}
    for step in range(1, STEPS + 1):
        inputs, targets = batch_for(config, step)
        if config.is_encoder_decoder:
            given = {"input_ids": inputs.encoder_tokens, "attention_mask": inputs.encoder_mask.long()}
            given["decoder_input_ids"] = inputs.decoder_tokens
        else:
            given = {"input_ids": inputs}
        loss = cross_entropy(model(**given).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        if not gradients:
            layout = stored_layout(config).tensors
            found = {name: model.get_parameter(stored.name).grad for name, stored in layout.items()}
            gradients = {n: (g.t() if layout[n].transposed else g).numpy().copy() for n, g in found.items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "gradients": gradients}


def train_ours(
    name: str, case: str, recipe: Recipe, world: World, *, steps: int = STEPS, dropout: bool = False, first: int = 1
) -> dict[str, Any]:
    config, options = family_config(name, dropout=dropout), options_of(case)
    sections = {section: fields for section, fields in sections_of(case).items() if section != "model"}
    recipe = change(recipe, run={"seed": SEED}, optimizer={"weight_decay": 0.1, "grad_clip": CLIP}, **sections)
    mesh = build_mesh(MeshDegrees(*degrees_of(case)), device_type="cpu")
    built = build(replace(recipe, model=config), world, mesh=mesh)
    gradients: dict[str, Any] = {}

    def keep(*_: Any) -> None:
        if not gradients:
            found = {plain_name(name): one.grad.full_tensor() for name, one in built.model.named_parameters()}
            gradients.update({name: gradient.numpy().copy() for name, gradient in found.items()})

    built.optimizer.register_step_pre_hook(keep)
    guard = StepGuard(mesh, device=world.device, max_skipped_steps=3, loss_spike_z=50.0)
    clock = RunClock(world.device)
    losses, norms = [], []
    for step in range(first, first + steps):
        inputs, targets = batch_for(config, step)
        own = slice(mesh.data_rank, None, mesh.data_ranks)
        inputs, targets = rows_of(inputs, own), targets[own]
        count = len(targets) if "accumulate" in options else 1
        parts = [slice(n, None, count) for n in range(count)]
        micro_batches = [(rows_of(inputs, part), targets[part], None) for part in parts]
        loss, norm = train_step(built, micro_batches, step=step, learning_rate=RATE, guard=guard, clock=clock)
        losses.append(sum_over_group(loss.clone(), mesh.loss_group).item())
        norms.append(norm.item())
    return {"losses": losses, "norms": norms, "gradients": gradients if world.rank == 0 else {}, "report": built.report}


def train_all(cases: list[tuple[str, str]], recipe: Recipe) -> list[dict[str, Any]]:
    world, found = start("cpu", seed=0), []
    for name, case in cases:
        torch._dynamo.reset()
        found.append(train_ours(name, case, recipe, world))
    stop()
    return found


@pytest.fixture(scope="module")
def trained() -> dict[tuple[str, str], list[dict[str, Any]]]:
    found = {}
    for processes, cases in CASES.items():
        todo = [(name, case) for case in cases for name in FAMILIES]
        answers = run_processes(processes, train_all, todo, load(DEBUG), timeout=600)
        found |= dict(zip(todo, zip(*answers, strict=True), strict=True))
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Any]]:
    return {name: train_plainly(family_config(name)) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_a_family_trains_as_in_plain_transformers(name: str, case: str, trained: Any, plain: Any) -> None:
    expected, found = plain[name], trained[name, case]
    np.testing.assert_allclose(found[0]["losses"], expected["losses"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found[0]["norms"], expected["norms"], rtol=1e-4)
    assert found[0]["gradients"].keys() == expected["gradients"].keys()
    for parameter, gradient in expected["gradients"].items():
        error = np.linalg.norm(found[0]["gradients"][parameter] - gradient) / np.linalg.norm(gradient)
        assert error < 1e-4, (parameter, error)
