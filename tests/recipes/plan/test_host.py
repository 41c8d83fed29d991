"""A CPU's record becomes a device and its rates."""

from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.plan.hardware import GPUS, Gpu
from recipes.plan.host import calibrated, nonnegative, recipe_of
from recipes.plan.rates import Rates
from recipes.plan.time import time_of
from recipes.plan.work import work_of
from tests.host_record import CPU, SMALL, TRUE, WIDE, record, seconds_of

FILE = Path("cpu.json")


@pytest.fixture(scope="module")
def fitted() -> tuple[Gpu, Rates]:
    return calibrated(record(), FILE, None, processes=2)


@pytest.mark.slow
def test_rates_of_operators_are_those_that_they_were_measured_with(fitted: tuple[Gpu, Rates]) -> None:
    cpu, rates = fitted
    for field in ("bandwidth", "float32_peak", "link", "memory", "per_node"):
        assert getattr(cpu, field) == pytest.approx(getattr(CPU, field), rel=0.01), field
    for field in ("depth", "score", "attention_backward", "collective", "loss", "loss_chunked", "loss_compiled"):
        assert getattr(rates, field) == pytest.approx(getattr(TRUE, field), rel=0.01), field
    assert (rates.eager, rates.fused) == pytest.approx((TRUE.eager, TRUE.fused), rel=0.05)
    assert rates.calibrated == "by cpu.json (2 processes on 2 cores)"


def test_steps_of_other_shapes_are_predicted_by_what_the_record_leaves_for_the_host(fitted: tuple[Gpu, Rates]) -> None:
    cpu, rates = fitted
    for changes in (
        WIDE | {"model.layers": 3, "micro_batches": 4},
        WIDE | {"model.layers": 5, "micro_batches": 1, "activation_checkpointing.mode": "full"},
        SMALL | {"model.layers": 8, "micro_batches": 2, "compile.enabled": True, "fsdp.reshard_after_forward": False},
    ):
        assert seconds_of(changes, cpu, rates) == pytest.approx(seconds_of(changes, CPU, TRUE), rel=0.03)


def test_nothing_hides_on_a_cpu(fitted: tuple[Gpu, Rates]) -> None:
    cpu, rates = fitted
    recipe = recipe_of(WIDE | {"model.layers": 4, "micro_batches": 2}, 2)
    found = time_of(work_of(recipe, recipe.mesh.fit(2), per_node=2), gpu=cpu, rates=rates)
    assert not found.hidden and found.seconds["host"] > 0 and found.seconds["gaps"] == 0


@pytest.mark.slow
def test_number_of_processes_that_was_not_measured_is_refused() -> None:
    with pytest.raises(UserError, match=r"measured with 2 processes, not with 4.*--processes 4"):
        calibrated(record(), FILE, None, processes=4)


@pytest.mark.slow
def test_record_of_a_cpu_is_refused_for_a_gpu() -> None:
    with pytest.raises(UserError, match="measured on a CPU, not on H100"):
        calibrated(record(), FILE, GPUS["H100"], processes=2)


def test_least_squares_gives_nothing_below_zero() -> None:
    assert nonnegative([(1.0, 1.0), (2.0, 1.0), (4.0, 1.0)], [3.0, 5.0, 9.0]) == pytest.approx([2.0, 1.0], rel=1e-3)
    assert nonnegative([(1.0, 1.0), (2.0, 1.0)], [1.0, 3.0])[1] == 0.0
