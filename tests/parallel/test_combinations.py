"""Every combination of the mesh's axes trains to the numbers of one process.

Two steps: losses, gradient norms and the first step's gradient of every parameter, by name, are within the limits of
combinations.py, and losses and norms are equal on all processes to the bit. Losses alone once passed with a gradient
that was wrong. The second step's loss and norm show the first one's update.
"""

import runpy
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models.documents import Documents
from models.loss import IGNORED
from parallel.dist import World, start, stop
from parallel.errors import UserError
from parallel.mesh import build_mesh
from parallel.passes import sum_over_group
from recipes.evaluation.losses import mean_loss
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from recipes.training.build import build
from recipes.training.step import train_step
from tests.compiling import compiling_in_turn, graphs_only
from tests.meshes import mesh_degrees
from tests.parallel.combinations import (
    CASES,
    EXPERTS,
    FEATURES,
    FLOAT32,
    GENERATED,
    LENGTH,
    PIPELINE_ROWS,
    PIPELINES,
    REFUSED,
    ROWS,
    VOCABULARY,
    degrees_of,
    limits_of,
    options_of,
    parts_of_scales,
    processes_of,
    refusal_of,
    same_numbers,
    sections_of,
)
from tests.processes import ROOT, run_processes
from tests.training import DEBUG, change

STEPS, END = 2, 3


def batch_of(step: int, options: set[str], *, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (rows, LENGTH) of a step. Documents end on parts' borders, and span all parts."""
    tokens = torch.randint(4, VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    tokens[0, [LENGTH // 2 - 1, LENGTH // 2 + 5]] = END
    tokens[1, [7, 11, LENGTH // 4 - 1]] = END
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :5] = IGNORED
    if "masked" in options:  # the first half of every row counts for nothing
        targets[:, : LENGTH // 2] = IGNORED
    if "last" in options:  # all targets are in the last part of the vocabulary
        targets = torch.where(targets == IGNORED, targets, VOCABULARY - 1 - targets % 4)
    if rows > ROWS:
        targets[3], targets[6, 10:] = IGNORED, IGNORED  # micro-batches of no target and of few
    return inputs, targets


def scale_tokens_in_parts(model: nn.Module, parts: int, *, by: str) -> None:
    """Let every float8 linear scale each part of the tokens by itself, as context-parallel processes do."""
    order = torch.arange(LENGTH).view(2 * parts, -1)
    if by == "gather":  # a part is one chunk from either end
        order = order[[chunk for part in range(parts) for chunk in (part, 2 * parts - 1 - part)]]
    order = order.flatten()

    def in_parts(whole: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.cat([whole(part) for part in x[:, order].chunk(parts, dim=1)], dim=1)[:, order.argsort()]

    for module in model.modules():
        if type(module).__name__.endswith("Float8Linear"):
            module.forward = partial(in_parts, module.forward)


def train_case(case: str, recipe: Recipe, world: World) -> dict[str, Any]:
    options = options_of(case)
    mesh = build_mesh(mesh_degrees(degrees_of(case)), device_type="cpu")
    built = build(change(recipe, **sections_of(case)), world, mesh=mesh)
    rows_in, tokens_in = parts_of_scales(case)
    if tokens_in > 1:
        scale_tokens_in_parts(built.model, tokens_in, by="gather" if "gather" in options else "heads")
    gradients: dict[str, Any] = {}

    def keep(*_: Any) -> None:
        if not gradients:
            whole = {name: parameter.grad.full_tensor() for name, parameter in built.model.named_parameters()}
            gradients.update(
                {name.replace("_checkpoint_wrapped_module.", ""): g.numpy().copy() for name, g in whole.items()}
            )

    built.optimizer.register_step_pre_hook(keep)
    guard = StepGuard(mesh, device=world.device, max_skipped_steps=3, loss_spike_z=50.0)
    clock = RunClock(world.device)
    is_staged, losses, norms = len(degrees_of(case)) > 4, [], []
    staged: dict[str, Any] = {}
    for step in range(1, STEPS + 1):
        batch = batch_of(step, options, rows=PIPELINE_ROWS if is_staged else ROWS)
        inputs, targets = (part[mesh.data_rank :: mesh.data_ranks] for part in batch)
        count = len(inputs) if is_staged or "accumulate" in options else rows_in
        if "varied" in options and step == STEPS:
            inputs, targets, count = inputs[:, : LENGTH // 2], targets[:, : LENGTH // 2], count // 2
        micro_batches = [
            (inputs[n::count], targets[n::count], documents_of(inputs[n::count], options)) for n in range(count)
        ]
        loss, norm, _ = train_step(built, micro_batches, step=step, learning_rate=3e-3, guard=guard, clock=clock)
        losses.append(sum_over_group(loss.clone(), mesh.loss_group).item())
        norms.append(norm.item())
        if is_staged and step == 1:  # between steps, as in a run, and before AdamW enlarges what float8 rounds
            staged["validation"] = mean_loss(built.model, micro_batches, mesh=mesh)
            staged["logits"] = logits_of(built.model, options)
    coordinates = mesh.devices.get_coordinate() or ()
    is_first = not any(coordinates if mesh.pipeline is None else coordinates[1:])  # of its stages
    found = {"losses": losses, "norms": norms, "gradients": gradients if is_first else {}}
    if built.mesh.experts is not None:
        routers: Any = built.model.routers
        counted = sum_over_group(routers.found.clone(), built.mesh.experts.tokens)
        found["loads"] = {layer: counted[place, :-2].tolist() for layer, place in routers.places.items()}
        found["sums"] = {layer: counted[place, -2:].tolist() for layer, place in routers.places.items()}
        biases = {layer: routers.bias_of(layer) for layer in routers.places}
        found["biases"] = {layer: bias.tolist() for layer, bias in biases.items() if bias is not None}
    return found | staged


def documents_of(inputs: torch.Tensor, options: set[str]) -> Documents | None:
    return Documents.of(inputs, end_of_document=END) if "documents" in options else None


@torch.no_grad()
def logits_of(model: nn.Module, options: set[str]) -> Any:
    inputs, _ = batch_of(STEPS + 1, options)
    return model(inputs[:1], documents=documents_of(inputs[:1], options)).float().numpy()


def train_cases(cases: list[str], recipe: Recipe, generated: Collection[str] = GENERATED) -> list[dict[str, Any]]:
    """What each case finds. generated: those that run generated code; of others, that are compiled, the graphs run."""
    world, found = start("cpu", seed=0), []
    for case in cases:
        torch._dynamo.reset()
        with compiling_in_turn() if case in generated else graphs_only():
            found.append(train_case(case, recipe, world))
    stop()
    return found


class Trained(dict[str, list[dict[str, Any]]]):
    """Case -> what each process found. A test that asks for what this torch refuses is skipped."""

    def __missing__(self, case: str) -> Any:
        skip_refused(case)
        raise KeyError(case)


def skip_refused(case: str) -> None:
    if reason := refusal_of(case):
        pytest.skip(reason)


def trained_on(cases: dict[int, list[str]], recipe: Recipe) -> Trained:
    """What the cases find, and those of one process that have the same numbers. cases: by their number of processes."""
    cases = {processes: [case for case in some if not refusal_of(case)] for processes, some in cases.items()}
    alone = sorted({same_numbers(case) for some in cases.values() for case in some})
    found = Trained()
    for processes, some in {1: alone, **cases}.items():
        answers = run_processes(processes, train_cases, list(some), recipe)
        found |= dict(zip(some, map(list, zip(*answers, strict=True)), strict=True))
    return found


@pytest.fixture(scope="module")
def trained(small: Recipe) -> Trained:
    return trained_on(CASES, small)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_a_mesh_trains_to_the_numbers_of_one_process(case: str, trained: Trained) -> None:
    require_same_numbers(case, trained[case], trained[same_numbers(case)])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case",
    [c for some in (CASES, PIPELINES, EXPERTS) for cases in some.values() for c in cases if "compile" in options_of(c)],
)
def test_generated_code_of_a_mesh_trains_to_the_numbers_of_one_process(case: str, small: Recipe) -> None:
    alone = run_processes(1, train_cases, [same_numbers(case)], small)
    found = run_processes(processes_of(case), train_cases, [case], small, {case})
    require_same_numbers(case, [one for [one] in found], *alone)


def require_same_numbers(case: str, found: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    [expected], limits = alone, limits_of(case)
    np.testing.assert_allclose(found[0]["losses"], expected["losses"], rtol=0, atol=limits.loss)
    np.testing.assert_allclose(found[0]["norms"], expected["norms"], rtol=limits.norm)
    for one in found if "logits" in expected else ():  # of a pipeline, without gradients
        np.testing.assert_allclose(one["validation"], expected["validation"], rtol=0, atol=limits.loss)
        error = np.linalg.norm(one["logits"] - expected["logits"]) / np.linalg.norm(expected["logits"])
        assert error < limits.gradient, f"logits are {error} off"
    assert all((one["losses"], one["norms"]) == (found[0]["losses"], found[0]["norms"]) for one in found)
    for one in found if "loads" in expected else ():  # of the layers that a process has
        for layer, sums in one["sums"].items():
            np.testing.assert_allclose(sums, expected["sums"][layer], rtol=limits.norm)
        for key in ("loads", "biases") if limits == FLOAT32 else ():  # rounded, some tokens choose others
            assert one[key] == {layer: expected[key][layer] for layer in one[key]}
    gradients: dict[str, Any] = {}
    for one in found:
        for name, gradient in one["gradients"].items():  # a tied embedding is on two stages
            np.testing.assert_array_equal(gradient, gradients.setdefault(name, gradient), name)
    assert gradients.keys() == expected["gradients"].keys()
    errors = {
        name: np.linalg.norm(gradients[name] - gradient) / np.linalg.norm(gradient)
        for name, gradient in expected["gradients"].items()
    }
    assert max(errors.values()) < limits.gradient and np.median([*errors.values()]) < limits.half, errors


@pytest.mark.parametrize(("feature", "axis"), REFUSED)
def test_what_the_table_of_the_page_calls_refused_is_refused(feature: str, axis: str) -> None:
    options = ",".join(FEATURES[feature])
    float8 = sections_of(f"1.1.1.1:{options}")["float8"]
    arguments = [word for name, value in float8.items() for word in (f"--float8.{name}", str(value).lower())]
    with pytest.raises(UserError, match=rf"(?s){REFUSED[feature, axis]}.*mesh.{axis} > 1"):
        load(DEBUG, [f"--mesh.{axis}", "2", *arguments])


def test_the_table_of_the_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_docs.py"))
    text = script["PARALLELISM"].read_text(encoding="utf-8")
    assert text == script["with_combinations"](text), "run python scripts/write_docs.py"
