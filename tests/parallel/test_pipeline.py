"""Stages of a pipeline train to the numbers of one process, and every trap of torch's schedules is noticed.

Traps are mistakes that train wrongly or end in errors that say nothing. Each is put back once here, so that it is known
which test of this file fails: those of TRAPS in the combinations, with the case named there, the others in a test each.
"""

import logging
import math
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from models.interface import blocks_of
from models.loss import SummedLoss
from parallel import context, pipeline
from parallel.dist import stop
from parallel.pipeline import Pipeline
from recipes.evaluation.losses import mean_loss
from recipes.lab.prove import twin
from tests.parallel.combinations import PIPELINES, ZERO_BUBBLE, processes_of
from tests.processes import run_processes
from tests.twins import (
    Compared,
    batch_of,
    built_for,
    compare_cases,
    each_case,
    require_proved,
    skip_refused,
    take_step,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    return Compared(PIPELINES, tmp_path_factory.mktemp("twins"))


@pytest.mark.parametrize("case", each_case(PIPELINES))
def test_a_pipeline_trains_to_the_numbers_of_one_process(case: str, compared: Compared) -> None:
    require_proved(compared[case])


@pytest.mark.parametrize("case", ZERO_BUBBLE)
def test_gradients_of_weights_that_are_computed_apart_add_up_in_float32(case: str, compared: Compared) -> None:
    assert compared[case].worst["gradient"].error == 0.0


# Traps that end a proof


def without_rules() -> AbstractContextManager[Any]:
    """What rules refuse is tried."""
    return mock.patch.object(twin, "violations", lambda *_, **__: [])


def hidden_states_as_logits(original: Any = context._whole_logits) -> AbstractContextManager[Any]:
    def whole(model: nn.Module, arguments: Any, options: Any, output: Tensor, **rest: Any) -> Any:
        of_all = {name: value for name, value in options.items() if name != "layers"}
        return original(model, arguments, of_all, output, **rest)

    return mock.patch.object(context, "_whole_logits", whole)


TRAPS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]], str]] = {
    "1: zero bubble with ZeRO-3": ("2.1.1.1.1:bf16,zbv", without_rules, "KeyError"),
    "8: hidden states taken for logits": ("2.1.1.2.1:", hidden_states_as_logits, "of 4 failed|did not answer"),
}
"""What is put back -> the case that notices it, how it is put back, and what is said then. 3 to 6, which train wrongly,
are among the silent faults of tests/mutants_mesh.py. Number 10, FSDP's sums over replicas after the schedule, needs
shard 1 with replicas: the cases of 2.2.1.1.1. 9, 11 and 15 to 17 are not of training: tests of metrics, plans and
checkpoints. 2 and 14 are refused: tests/recipes/recipe/test_rules_pipeline.py."""


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_that_is_put_back_is_noticed(trap: str, tmp_path: Path) -> None:
    case, fault, said = TRAPS[trap]
    skip_refused(case)
    with pytest.raises(AssertionError, match=said):
        run_processes(processes_of(case), compare_cases, [case], tmp_path, (), fault)


# Traps that need a look of their own


def planned_once(self: Any, original: Any = Pipeline._planned) -> Any:
    if not hasattr(self, "only"):
        self.only = original(self)
    return self.only


def norms_of_sizes(case: str, sizes: list[tuple[int, int]], is_planned_once: bool = False) -> list[float]:
    """Of steps of so many micro-batches of so many tokens, none of which changes a weight."""
    built, (inputs, targets) = built_for(case), batch_of(1)
    with mock.patch.object(Pipeline, "_planned", planned_once) if is_planned_once else nullcontext():
        norms = [take_step(built, 1, (inputs[:n, :m], targets[:n, :m]), rate=0.0) for n, m in sizes]
    stop()
    return norms


@pytest.mark.parametrize("options", ["", "zbv,zero2"])
def test_every_number_and_length_of_micro_batches_has_a_schedule_of_its_own(options: str) -> None:
    """Trap 13."""
    case, sizes = f"2.1.1.1.1:{options}", [(4, 48), (2, 24)]
    skip_refused(case)
    (found, _), (expected, _) = (run_processes(2, norms_of_sizes, case, some) for some in (sizes, sizes[::-1]))
    assert found == pytest.approx(expected[::-1], rel=1e-6) and found[0] != found[1]
    with pytest.raises(AssertionError, match=r"num_chunks|Expecting 4 arg_mbs"):
        run_processes(2, norms_of_sizes, case, sizes, True)


def stage_without_shapes(*arguments: Any, input_args: Any, output_args: Any, **options: Any) -> Any:
    return pipeline.PipelineStage(*arguments, **options)


def forwards(case: str, asks_for_shapes: bool) -> list[int]:
    """How often each block of this process ran in two steps, with a validation after each of them."""
    built = built_for(case)
    count = [0] * len(blocks_of(built.model))
    for index, block in enumerate(blocks_of(built.model)):
        block.register_forward_pre_hook(lambda *_, index=index: count.__setitem__(index, count[index] + 1))
    put_back = mock.patch.object(pipeline, "_PlannedStage", stage_without_shapes) if asks_for_shapes else nullcontext()
    with put_back:
        for step in (1, 2):
            take_step(built, step, batch_of(step))
            mean_loss(built.model, [(*batch_of(9), None)], mesh=built.mesh)
    stop()
    return count


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv,zero2"])
def test_a_block_runs_once_for_each_micro_batch_of_a_step_and_of_a_validation(schedule: str) -> None:
    """Trap 12: torch would run one more to find the shapes, in the first step."""
    case = f"2.1.1.1.1:{schedule}"
    skip_refused(case)
    assert run_processes(2, forwards, case, False) == [[2 * (4 + 1)] * 2] * 2
    if torch.__version__ >= "2.12":  # before, what is put back here is an error
        assert run_processes(2, forwards, case, True) != [[2 * (4 + 1)] * 2] * 2


def infinite_loss(case: str, unpoisoned: bool) -> tuple[float, bool, float]:
    """(norm of a step where a micro-batch has an infinite loss, whether it changed a parameter, norm of the next)."""
    built = built_for(case)
    original, calls = SummedLoss.forward, [0]

    def forward(self: SummedLoss, logits: Tensor, targets: Tensor | None) -> Tensor:
        calls[0] += 1  # only the last stage comes here
        return original(self, logits, targets) + (math.inf if calls[0] == 3 else 0.0)

    before = [parameter.to_local().clone() for parameter in built.parameters]
    put_back = mock.patch.object(pipeline, "one_or_nan", lambda _: 1.0)
    with mock.patch.object(SummedLoss, "forward", forward), put_back if unpoisoned else nullcontext():
        norm = take_step(built, 1, batch_of(1))
    after = [parameter.to_local() for parameter in built.parameters]
    changed = not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    answer = norm, changed, take_step(built, 2, batch_of(2))
    stop()
    return answer


@pytest.mark.parametrize("case", ["2.1.1.1.1:", "2.1.1.1.1:interleaved,z", "2.1.1.1.1:zbv,zero2"])
def test_an_infinite_loss_of_one_micro_batch_makes_all_stages_skip_the_step(case: str) -> None:
    """Trap 7: torch calls backward() itself, and gradients of such a loss are finite."""
    skip_refused(case)
    for norm, changed, after in run_processes(2, infinite_loss, case, False):
        assert math.isnan(norm) and not changed and math.isfinite(after)
    for norm, changed, _ in run_processes(2, infinite_loss, case, True):
        assert math.isfinite(norm) and changed


class Lines(logging.Handler):
    """Counts the lines that are logged."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += len(record.getMessage().splitlines())


def error_in_a_schedule(told: bool) -> tuple[str, int]:
    """(what is raised when the loss fails on the last stage, how many lines torch prints)."""
    built = built_for("2.1.1.1.1:interleaved")
    logger, lines = logging.getLogger("torch.distributed.pipelining.schedules"), Lines()
    logger.addHandler(lines)
    if told:
        logger.setLevel(logging.NOTSET)
    with mock.patch.object(SummedLoss, "forward", side_effect=ValueError("the loss fails")):
        try:
            take_step(built, 1, batch_of(1))
        except Exception as error:  # of the other process: that this one has gone
            return "".join(traceback.format_exception(error)), lines.count
    return "", lines.count


def test_an_error_inside_a_schedule_is_raised_without_a_print_of_the_schedule() -> None:
    """Trap 18: 170 lines from every process."""
    (_, first), (message, last) = run_processes(2, error_in_a_schedule, False)
    assert "the loss fails" in message and first == last == 0
    _, (message, last) = run_processes(2, error_in_a_schedule, True)
    assert "the loss fails" in message and last > 5
