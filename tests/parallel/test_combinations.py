"""Every combination of the mesh's axes trains to the numbers of one process.

Ten steps in float32: each loss within 1e-5 and each gradient norm within 1e-4 of those of one process, equal on all
processes, and the first step's gradient of every parameter, by name, within 1e-4. Losses alone once passed with a
gradient that was wrong.
"""

from typing import Any

import numpy as np
import pytest
import torch

from models.documents import Documents
from models.loss import IGNORED
from parallel.config import MeshDegrees
from parallel.dist import World, start, stop
from parallel.mesh import build_mesh
from parallel.reduce import sum_over_group
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard
from recipes.schema import Recipe
from recipes.training.build import build
from recipes.training.step import train_step
from tests.processes import run_processes
from tests.training import change

STEPS, ROWS, LENGTH, VOCABULARY, END = 10, 4, 48, 96, 3
MODEL = {"layers": 2, "width": 48, "feed_forward_width": 96, "heads": 4, "key_value_heads": 2, "head_width": 12}
NINE = {"heads": 9, "key_value_heads": 3, "head_width": 4}
# replicate.shard.context.tensor:options
CASES = {
    2: (
        *("1.1.1.2", "1.1.1.2:untied", "1.1.1.2:documents", "1.1.1.2:chunks", "1.1.1.2:accumulate,zero2"),
        *("1.1.1.2:full", "1.1.1.2:selective,untied", "1.1.1.2:offload", "1.1.1.2:masked", "1.1.1.2:last"),
        *("1.1.2.1", "1.1.2.1:untied", "1.1.2.1:documents", "1.1.2.1:chunks", "1.1.2.1:accumulate,zero2"),
        *("1.1.2.1:full", "1.1.2.1:selective,documents", "1.1.2.1:offload", "1.1.2.1:masked", "1.1.2.1:last"),
        *("1.1.2.1:gather", "1.1.2.1:gather,documents", "1.1.2.1:gather,untied,full"),
        *("1.1.1.2:compile,documents", "1.1.1.2:compile,full,untied", "1.1.2.1:compile,documents"),
    ),
    3: ("1.1.1.3:nine,documents", "1.1.3.1:nine,documents", "1.1.3.1:nine,gather"),
    4: (
        *(
            "1.2.1.2",
            "1.2.1.2:untied,zero2,accumulate",
            "1.2.1.2:documents,offload",
            "2.1.1.2",
            "2.1.1.2:documents,full",
        ),
        *(
            "1.2.2.1",
            "1.2.2.1:untied,documents,zero2",
            "1.2.2.1:gather,chunks",
            "2.1.2.1",
            "2.1.2.1:documents,selective",
        ),
        *("1.1.2.2", "1.1.2.2:untied,documents", "1.1.2.2:gather,documents,chunks", "1.1.2.2:masked", "1.1.2.2:last"),
        *("1.1.4.1", "1.1.4.1:documents", "1.1.4.1:gather,untied", "1.1.2.2:compile,documents"),
    ),
    8: ("1.2.2.2:documents", "2.1.2.2:untied,chunks", "2.2.2.1:documents,zero2", "2.2.1.2:accumulate,selective"),
}


def options_of(case: str) -> set[str]:
    return set(filter(None, case.partition(":")[2].split(",")))


def same_numbers(case: str) -> str:
    """The case of one process with the same numbers."""
    return "1.1.1.1:" + ",".join(sorted(options_of(case) & {"untied", "documents", "nine", "masked", "last"}))


def batch_of(step: int, options: set[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (ROWS, LENGTH) of a step. Documents end on parts' borders, and span all parts."""
    tokens = torch.randint(4, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    tokens[0, [LENGTH // 2 - 1, LENGTH // 2 + 5]] = END
    tokens[1, [7, 11, LENGTH // 4 - 1]] = END
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :5] = IGNORED
    if "masked" in options:  # the first half of every row counts for nothing
        targets[:, : LENGTH // 2] = IGNORED
    if "last" in options:  # all targets are in the last part of the vocabulary
        targets = torch.where(targets == IGNORED, targets, VOCABULARY - 1 - targets % 4)
    return inputs, targets


def recipe_of(recipe: Recipe, options: set[str]) -> Recipe:
    mode = next((mode for mode in ("full", "selective") if mode in options), "none")
    return change(
        recipe,
        model=MODEL
        | {"vocabulary": VOCABULARY, "tied_embeddings": "untied" not in options}
        | (NINE if "nine" in options else {}),
        batch={"loss_chunks": 3 if "chunks" in options else 1},
        activation_checkpointing={"mode": mode},
        compile={"enabled": "compile" in options},
        fsdp={"reshard_after_forward": "zero2" not in options, "cpu_offload": "offload" in options},
        mesh={"context_by": "gather" if "gather" in options else "heads"},
    )


def train_case(case: str, recipe: Recipe, world: World) -> dict[str, Any]:
    options = options_of(case)
    mesh = build_mesh(MeshDegrees(*map(int, case.partition(":")[0].split("."))), device_type="cpu")
    built = build(recipe_of(recipe, options), world, mesh=mesh)
    gradients: dict[str, Any] = {}

    def keep(*_: Any) -> None:
        if not gradients:
            whole = {name: parameter.grad.full_tensor() for name, parameter in built.model.named_parameters()}
            gradients.update({name.replace("_checkpoint_wrapped_module.", ""): g.numpy() for name, g in whole.items()})

    built.optimizer.register_step_pre_hook(keep)
    guard = StepGuard(mesh, device=world.device, max_skipped_steps=3, loss_spike_z=50.0)
    clock = RunClock(world.device)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        inputs, targets = (part[mesh.data_rank :: mesh.data_ranks] for part in batch_of(step, options))
        size = 1 if "accumulate" in options else len(inputs)
        micro_batches = [
            (i, t, Documents.of(i, end_of_document=END) if "documents" in options else None)
            for i, t in zip(inputs.split(size), targets.split(size), strict=True)
        ]
        loss, norm = train_step(built, micro_batches, step=step, learning_rate=3e-3, guard=guard, clock=clock)
        losses.append(sum_over_group(loss.clone(), mesh.loss_group).item())
        norms.append(norm.item())
    share = sum(parameter.to_local().numel() for parameter in built.parameters)
    return {"losses": losses, "norms": norms, "gradients": gradients if world.rank == 0 else {}, "share": share}


def train_cases(cases: list[str], recipe: Recipe) -> list[dict[str, Any]]:
    world, found = start("cpu", seed=0), []
    for case in cases:
        torch._dynamo.reset()
        found.append(train_case(case, recipe, world))
    stop()
    return found


@pytest.fixture(scope="module")
def trained(small: Recipe) -> dict[str, list[dict[str, Any]]]:
    """Case -> what each process found, with the cases of one process that have the same numbers."""
    alone = sorted({same_numbers(case) for cases in CASES.values() for case in cases})
    found = {}
    for processes, cases in {1: alone, **CASES}.items():
        answers = run_processes(processes, train_cases, list(cases), small, timeout=600)
        found |= dict(zip(cases, zip(*answers, strict=True), strict=True))
    return {case: list(of_processes) for case, of_processes in found.items()}


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_a_mesh_trains_to_the_numbers_of_one_process(case: str, trained: dict[str, list[dict[str, Any]]]) -> None:
    [expected], found = trained[same_numbers(case)], trained[case]
    np.testing.assert_allclose(found[0]["losses"], expected["losses"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found[0]["norms"], expected["norms"], rtol=1e-4)
    assert all((one["losses"], one["norms"]) == (found[0]["losses"], found[0]["norms"]) for one in found)
    assert found[0]["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        error = np.linalg.norm(found[0]["gradients"][name] - gradient) / np.linalg.norm(gradient)
        assert error < 1e-4, (name, error)
