"""Stages of a pipeline train to the numbers of one process, and every trap of torch's schedules is noticed.

Traps are mistakes that train wrongly or end in errors that say nothing. Each is put back once here, so that it is known
which test of this file fails: those of TRAPS in the combinations, with the case named there, the others in a test each.
"""

import logging
import math
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.interface import blocks_of
from models.loss import SummedLoss
from parallel import context, pipeline
from parallel.dist import start, stop
from parallel.mesh import build_mesh
from parallel.passes import gradient_norm
from parallel.pipeline import Pipeline
from recipes.evaluation.losses import mean_loss
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard
from recipes.recipe.schema import Recipe
from recipes.training.build import Built, build
from recipes.training.step import train_step
from tests.meshes import mesh_degrees
from tests.parallel.combinations import PIPELINES, degrees_of, same_numbers, sections_of
from tests.parallel.test_combinations import (
    Trained,
    batch_of,
    require_same_numbers,
    skip_refused,
    train_cases,
    trained_on,
)
from tests.processes import run_processes
from tests.training import change

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(small: Recipe) -> Trained:
    return trained_on(PIPELINES, small)


@pytest.mark.parametrize("case", [case for cases in PIPELINES.values() for case in cases])
def test_a_pipeline_trains_to_the_numbers_of_one_process(case: str, trained: Trained) -> None:
    require_same_numbers(case, trained[case], trained[same_numbers(case)])


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble"])
def test_gradients_of_weights_that_are_computed_apart_add_up_in_float32(schedule: str, trained: Trained) -> None:
    case = f"2.1.1.1.1:bf16,untied,{schedule},zero2"
    found, [alone] = trained[case], trained[same_numbers(case)]
    for one in found:
        for name, gradient in one["gradients"].items():
            np.testing.assert_array_equal(gradient, alone["gradients"][name], name)


# Traps that a combination notices


def one_class(**changes: Any) -> Callable[[str], type]:
    """get_schedule_class() of schedules that are made with other arguments."""
    original = pipeline.get_schedule_class

    def changed(kind: str) -> type:
        made: type = original(kind)

        def initialize(self: Any, *arguments: Any, **options: Any) -> None:
            made.__init__(self, *arguments, **options | changes)  # type: ignore[misc]

        return type(made.__name__, (made,), {"__init__": initialize})

    return changed


def norm_with_both_copies(self: Pipeline, parameters: Any, original: Any = Pipeline.norm) -> Tensor:
    with mock.patch.object(self, "_tied", None):
        return original(self, parameters)


def run_with_documents_of_the_first(
    self: Pipeline, micro_batches: Any, *arguments: Any, original: Any = Pipeline.run, **options: Any
) -> Tensor:
    first = micro_batches[0][2]
    return original(self, [(inputs, targets, first) for inputs, targets, _ in micro_batches], *arguments, **options)


def planned_once(self: Any, original: Any = Pipeline._planned) -> Any:
    if not hasattr(self, "only"):
        self.only = original(self)
    return self.only


def whole_hidden_states(
    model: nn.Module, arguments: Any, options: Any, output: Tensor, original: Any = context._whole_logits, **rest: Any
) -> Any:
    return original(
        model, arguments, {name: value for name, value in options.items() if name != "layers"}, output, **rest
    )


NUMBERS = "Not equal to tolerance|^assert"
TRAPS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]], str]] = {
    "1: zero bubble with ZeRO-3": ("2.1.1.1.1:bf16,zbv", nullcontext, "KeyError"),
    "3: gradients divided by the number of micro-batches": (
        "2.1.1.1.1:",
        lambda: mock.patch.object(pipeline, "get_schedule_class", one_class(scale_grads=True)),
        NUMBERS,
    ),
    "4: documents that are not those of the micro-batch": (
        "2.1.1.1.1:documents",
        lambda: mock.patch.object(Pipeline, "run", run_with_documents_of_the_first),
        NUMBERS,
    ),
    "5: the norm of a stage": (
        "2.1.1.1.1:",
        lambda: mock.patch.object(Pipeline, "norm", lambda _, parameters: gradient_norm(parameters)),
        NUMBERS,
    ),
    "5: a norm with both copies of a tied embedding": (
        "2.1.1.1.1:",
        lambda: mock.patch.object(Pipeline, "norm", norm_with_both_copies),
        NUMBERS,
    ),
    "6: gradients of a tied embedding that are not added": (
        "2.1.1.1.1:",
        lambda: mock.patch.object(pipeline, "sum_over_group", lambda *_: None),
        "Not equal",
    ),
    "8: hidden states taken for logits": (
        "2.1.1.2.1:",
        lambda: mock.patch.object(context, "_whole_logits", whole_hidden_states),
        "of 4 failed|did not answer",
    ),
    "13: one schedule for every number and length of micro-batches": (
        "2.1.1.1.1:varied",
        lambda: mock.patch.object(Pipeline, "_planned", planned_once),
        "num_chunks|Expecting 8 arg_mbs",
    ),
}
"""What is put back -> the case that notices it, how it is put back, and what is said then. Number 10, FSDP's sums over
replicas after the schedule, needs shard 1 with replicas: the cases of 2.2.1.1.1. 9, 11 and 15 to 17 are not of
training: tests of metrics, plans and checkpoints. 2 and 14 are refused:
tests/recipes/recipe/test_rules_pipeline.py."""


def train_in_a_trap(trap: str, recipe: Recipe) -> list[dict[str, Any]]:
    case, put_back, _ = TRAPS[trap]
    with put_back():
        return train_cases([case], recipe)


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_that_is_put_back_is_noticed(trap: str, small: Recipe) -> None:
    case, _, said = TRAPS[trap]
    skip_refused(case)
    [alone] = run_processes(1, train_cases, [same_numbers(case)], small)
    with pytest.raises(AssertionError, match=said):
        found = run_processes(math.prod(degrees_of(case)), train_in_a_trap, trap, small)
        require_same_numbers(case, [one for [one] in found], alone)


# Traps that need a look of their own


def built_for(case: str, recipe: Recipe) -> tuple[Any, Built]:
    world = start("cpu", seed=0)
    mesh = build_mesh(mesh_degrees(degrees_of(case)), device_type="cpu")
    return world, build(change(recipe, **sections_of(case)), world, mesh=mesh)


def step_of(built: Built, guard: StepGuard, step: int) -> float:
    """The gradient norm of a step of four micro-batches."""
    inputs, targets = batch_of(step, set())
    micro_batches = [(inputs[row : row + 1], targets[row : row + 1], None) for row in range(len(inputs))]
    clock = RunClock(torch.device("cpu"))
    return train_step(built, micro_batches, step=step, learning_rate=1e-3, guard=guard, clock=clock).norm.item()


def guard_of(built: Built) -> StepGuard:
    return StepGuard(built.mesh, device=torch.device("cpu"), max_skipped_steps=3)


def stage_without_shapes(*arguments: Any, input_args: Any, output_args: Any, **options: Any) -> Any:
    return pipeline.PipelineStage(*arguments, **options)


def forwards(case: str, recipe: Recipe, asks_for_shapes: bool) -> list[int]:
    """How often each block of this process ran in two steps, with a validation after each of them."""
    _, built = built_for(case, recipe)
    count = [0] * len(blocks_of(built.model))
    for index, block in enumerate(blocks_of(built.model)):
        block.register_forward_pre_hook(lambda *_, index=index: count.__setitem__(index, count[index] + 1))
    put_back = mock.patch.object(pipeline, "_PlannedStage", stage_without_shapes) if asks_for_shapes else nullcontext()
    guard, (inputs, targets) = guard_of(built), batch_of(9, set())
    with put_back:
        for step in (1, 2):
            step_of(built, guard, step)
            mean_loss(built.model, [(inputs, targets, None)], mesh=built.mesh)
    stop()
    return count


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv,zero2"])
def test_a_block_runs_once_for_each_micro_batch_of_a_step_and_of_a_validation(schedule: str, small: Recipe) -> None:
    """Trap 12: torch would run one more to find the shapes, in the first step."""
    case = f"2.1.1.1.1:{schedule}"
    skip_refused(case)
    assert run_processes(2, forwards, case, small, False) == [[2 * (4 + 1)] * 2] * 2
    if torch.__version__ >= "2.12":  # before, what is put back here is an error
        assert run_processes(2, forwards, case, small, True) != [[2 * (4 + 1)] * 2] * 2


def infinite_loss(case: str, recipe: Recipe, unpoisoned: bool) -> tuple[float, bool, float]:
    """(norm of a step where a micro-batch has an infinite loss, whether it changed a parameter, norm of the next)."""
    _, built = built_for(case, recipe)
    original, calls = SummedLoss.forward, [0]

    def forward(self: SummedLoss, logits: Tensor, targets: Tensor | None) -> Tensor:
        calls[0] += 1  # only the last stage comes here
        return original(self, logits, targets) + (math.inf if calls[0] == 3 else 0.0)

    before = [parameter.to_local().clone() for parameter in built.parameters]
    guard, put_back = guard_of(built), mock.patch.object(pipeline, "one_or_nan", lambda _: 1.0)
    with mock.patch.object(SummedLoss, "forward", forward), put_back if unpoisoned else nullcontext():
        norm = step_of(built, guard, 1)
    after = [parameter.to_local() for parameter in built.parameters]
    changed = not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    answer = norm, changed, step_of(built, guard, 2)
    stop()
    return answer


@pytest.mark.parametrize("case", ["2.1.1.1.1:", "2.1.1.1.1:interleaved,z", "2.1.1.1.1:zbv,zero2"])
def test_an_infinite_loss_of_one_micro_batch_makes_all_stages_skip_the_step(case: str, small: Recipe) -> None:
    """Trap 7: torch calls backward() itself, and gradients of such a loss are finite."""
    skip_refused(case)
    for norm, changed, after in run_processes(2, infinite_loss, case, small, False):
        assert math.isnan(norm) and not changed and math.isfinite(after)
    for norm, changed, _ in run_processes(2, infinite_loss, case, small, True):
        assert math.isfinite(norm) and changed


class Lines(logging.Handler):
    """Counts the lines that are logged."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += len(record.getMessage().splitlines())


def error_in_a_schedule(recipe: Recipe, told: bool) -> tuple[str, int]:
    """(what is raised when the loss fails on the last stage, how many lines torch prints)."""
    _, built = built_for("2.1.1.1.1:interleaved", recipe)
    logger, lines = logging.getLogger("torch.distributed.pipelining.schedules"), Lines()
    logger.addHandler(lines)
    if told:
        logger.setLevel(logging.NOTSET)
    with mock.patch.object(SummedLoss, "forward", side_effect=ValueError("the loss fails")):
        try:
            step_of(built, guard_of(built), 1)
        except Exception as error:  # of the other process: that this one has gone
            return "".join(traceback.format_exception(error)), lines.count
    return "", lines.count


def test_an_error_inside_a_schedule_is_raised_without_a_print_of_the_schedule(small: Recipe) -> None:
    """Trap 18: 170 lines from every process."""
    (_, first), (message, last) = run_processes(2, error_in_a_schedule, small, False)
    assert "the loss fails" in message and first == last == 0
    _, (message, last) = run_processes(2, error_in_a_schedule, small, True)
    assert "the loss fails" in message and last > 5
