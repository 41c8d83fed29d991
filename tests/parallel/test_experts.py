"""Models with experts train to the numbers of one process, and every trap of experts is noticed.

Traps are mistakes that train wrongly or end in errors that say nothing. Each is put back once here, so that it is known
which test fails. Number 24 is in tests/models/test_experts.py, 28 in tests/recipes/recipe/test_rules_experts.py, 29 in
tests/models/test_experts_hf.py.
"""

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import grouped_mm

from models import experts as of_models
from models.experts import Experts, Routers, SparseFeedForward
from models.interface import blocks_of
from models.loss import IGNORED, SummedLoss
from parallel import experts as of_parallel
from parallel import fsdp
from parallel.dist import stop
from parallel.experts import AllToAll
from tests.parallel.combinations import EXPERTS, processes_of
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
    return Compared(EXPERTS, tmp_path_factory.mktemp("twins"))


@pytest.mark.parametrize("case", each_case(EXPERTS))
def test_experts_train_to_the_numbers_of_one_process(case: str, compared: Compared) -> None:
    require_proved(compared[case])


# Traps that end a proof


def experts_inside(model: nn.Module, mesh: Any) -> None:
    """shards_of_experts() that makes them units of their own, inside blocks."""
    for block in blocks_of(model):
        fully_shard(block.get_submodule("feed_forward.experts"), mesh=mesh.experts.fsdp)


def units_inside_blocks() -> AbstractContextManager[Any]:
    return mock.patch.object(of_parallel, "shards_of_experts", experts_inside)


def products_of_torch() -> AbstractContextManager[Any]:
    return mock.patch.object(of_models, "by_experts", lambda rows, m, ends, _: grouped_mm(rows, m.mT, offs=ends))


TRAPS = {"26: experts as a unit inside of a block that recomputes": ("1.1.2.1.1.2:selective", units_inside_blocks)}
if torch.__version__ < "2.15":  # since then, torch's grouped product is compiled in any dtype
    TRAPS["27: torch's grouped product in a compiled block"] = ("1.1.2.1.1.2:compile,rope", products_of_torch)
"""What is put back -> the case that notices it, and how it is put back. 21 and a part of 22, which train wrongly, are
among the silent faults of tests/mutants_training.py."""


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_that_is_put_back_is_noticed(trap: str, tmp_path: Path) -> None:
    case, fault = TRAPS[trap]
    skip_refused(case)
    with pytest.raises(AssertionError, match="of 2 failed"):
        run_processes(processes_of(case), compare_cases, [case], tmp_path, (), fault)


# Traps that need a look of their own


class PaddedAllToAll(AllToAll):
    """Gives experts rows behind the last one, as buffers of a fixed size have them."""

    def forward(self, rows: Tensor, counts: Tensor, compute: Any) -> Tensor:
        """As of AllToAll."""
        padding = rows.new_zeros(8, rows.shape[1])
        return super().forward(rows, counts, lambda some, of: compute(torch.cat([some, padding]), of)[: len(some)])


def rows_without_an_expert(case: str, padded: bool) -> int:
    """How many rows the products of a step had that belong to no expert."""
    found, original = [0], Experts.forward

    def forward(self: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        found[0] += len(rows) - int(counts.sum())
        return original(self, rows, counts)

    put_back = mock.patch.object(of_parallel, "AllToAll", PaddedAllToAll) if padded else nullcontext()
    with put_back, mock.patch.object(Experts, "forward", forward):
        take_step(built_for(case), 1, batch_of(1))
    stop()
    return found[0]


@pytest.mark.parametrize("case", ["1.1.2.1.1.2:", "1.1.1.1.2.2:sigmoid,full"])
def test_every_row_that_is_multiplied_belongs_to_an_expert(case: str) -> None:
    """Trap 20: what products make of other rows is never written, and is whatever was in that memory."""
    skip_refused(case)
    assert run_processes(2, rows_without_an_expert, case, False) == [0, 0]
    assert all(run_processes(2, rows_without_an_expert, case, True))


def of_all_tokens(self: Routers, layer: int, x: Tensor, routed: Any, original: Any = Routers.noted) -> Tensor:
    """The balance loss of transformers: of all tokens of a micro-batch together."""
    hits, probabilities, squares = routed
    return original(self, layer, x, (hits.sum(0, keepdim=True), probabilities.sum(0, keepdim=True), squares))


def losses_of_balance(rows: int, together: bool) -> tuple[float, list[float]]:
    """(gradient norm, balance loss of each layer) of a step."""
    built = built_for("1.1.1.1.1.1:balance")
    with mock.patch.object(Routers, "noted", of_all_tokens) if together else nullcontext():
        norm = take_step(built, 1, batch_of(1), rows=rows)
    routers: Any = built.model.routers
    stop()
    return norm, routers.found[:, -2].tolist()


def test_the_balance_loss_is_the_same_with_any_number_of_micro_batches() -> None:
    """Trap 22."""
    (one, few), (other, many) = (run_processes(1, losses_of_balance, rows, False)[0] for rows in (4, 1))
    np.testing.assert_allclose(few, many, rtol=1e-6)
    assert one == pytest.approx(other, rel=1e-6)
    (one, few), (other, many) = (run_processes(1, losses_of_balance, rows, True)[0] for rows in (4, 1))
    assert np.abs(np.array(few) / np.array(many) - 1).min() > 1e-3


def loads_and_calls(mode: str) -> tuple[list[list[float]], int, float]:
    """(loads that a step counted, how often feed-forwards ran in it, loads that a validation added)."""
    calls, original = [0], SparseFeedForward.forward

    def forward(self: SparseFeedForward, *arguments: Any) -> Any:
        calls[0] += 1
        return original(self, *arguments)

    built = built_for(f"1.1.1.1.1.1:{mode}")
    routers: Any = built.model.routers
    with mock.patch.object(SparseFeedForward, "forward", forward):
        take_step(built, 1, batch_of(1))
    loads = routers.found[:, :-2].clone()
    with torch.no_grad():
        built.model(*batch_of(2))
    stop()
    return loads.tolist(), calls[0], float((routers.found[:, :-2] - loads).sum())


def test_blocks_that_compute_again_and_validations_count_no_token_twice() -> None:
    """Trap 23: what a block counted itself would be counted as often as it runs."""
    (plain, once, added), (full, twice, added_too) = (
        run_processes(1, loads_and_calls, mode)[0] for mode in ("untied", "untied,full")
    )
    assert twice == 2 * once and full == plain and added == added_too == 0
    assert all(sum(loads) == 4 * 48 * 2 for loads in plain)


def weights_of_routers(rounded: bool) -> bool:
    """Whether the routers of a bfloat16 model have the values of their parameters."""
    seen: dict[str, Tensor] = {}
    original = Routers.forward

    def forward(self: Routers) -> Any:
        found = original(self)
        seen.update(
            {f"routers.{layer}.weight": weight.detach().float().clone() for layer, (weight, _) in found.items()}
        )
        return found

    def as_it_is(policy: Any, **changes: Any) -> Any:
        return policy if "param_dtype" in changes else dataclasses.replace(policy, **changes)

    with mock.patch.object(fsdp, "replace", as_it_is) if rounded else nullcontext():
        built = built_for("1.1.2.1.1.2:bf16")
    before = {
        name: whole.full_tensor().clone() for name, whole in built.model.named_parameters() if name[:7] == "routers"
    }
    with mock.patch.object(Routers, "forward", forward):
        take_step(built, 1, batch_of(1))
    stop()
    return all(torch.equal(seen[name], whole) for name, whole in before.items())


def test_routers_of_a_bfloat16_model_are_not_rounded() -> None:
    """Trap 25: of a rounded one, 0.3% of the tokens go to other experts."""
    skip_refused("1.1.2.1.1.2:bf16")
    assert run_processes(2, weights_of_routers, False) == [True, True]
    with pytest.raises(AssertionError, match="same dtype"):
        run_processes(2, weights_of_routers, True)


def graphs_of_steps(case: str) -> list[int]:
    """Number of graphs that were compiled after each of ten steps with other loads, and different loads."""
    built, found, loads = built_for(case), [], set()
    routers: Any = built.model.routers
    for step in range(1, 11):
        take_step(built, step, batch_of(step))
        found.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        loads.add(tuple(routers.found[0, :-2].tolist()))
    stop()
    assert len(loads) == 10
    return found


@pytest.mark.parametrize("case", ["1.1.2.1.1.2:compile,rope"])
def test_other_loads_compile_nothing_anew(case: str) -> None:
    """Trap 27: sizes follow from routing. A block is one graph (fullgraph=True), and stays it."""
    skip_refused(case)
    for found in run_processes(processes_of(case), graphs_of_steps, case):
        assert found[0] > 0 and len(set(found)) == 1, found


def gradients_of_routers(masked: bool) -> list[list[float]]:
    """Of the balance loss and the z-loss alone, in a step of which most tokens may have no target."""
    built = built_for("1.1.1.1.1.1:balance")
    inputs, targets = batch_of(1)
    if masked:
        targets[:, 3:] = IGNORED
    built.passes._begin([(inputs, targets, None)], device=inputs.device)
    with mock.patch.object(SummedLoss, "forward", lambda self, logits, targets: logits.sum() * 0):
        built.model(inputs, targets).backward()
    found = [parameter.grad.to_local().flatten().tolist() for parameter in built.model.routers.parameters()]
    stop()
    return found


def test_losses_of_routers_are_means_over_all_tokens_however_many_have_targets() -> None:
    """Prompts are routed, too: divided by the answers' tokens, the losses would weigh many times as much."""
    [few], [all_of_them] = (run_processes(1, gradients_of_routers, masked) for masked in (True, False))
    assert any(any(gradient) for gradient in few)
    np.testing.assert_allclose(few, all_of_them, rtol=1e-6)
