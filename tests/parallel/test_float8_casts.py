"""Shares of values that overflow and underflow in casts to float8, compared with plain loops and across processes."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from models.interface import ModelInterface
from models.sizes import SIZES
from parallel.config import Float8Config, FSDPConfig, MeshConfig
from parallel.dist import start, stop
from parallel.float8 import Cast, casts_of_linears, convert_linears, precompute_scales
from recipes.metrics.float8_samples import CastCounts, cast_counts
from tests.build import build_model, cpu_mesh
from tests.processes import run_processes

Shares = list[dict[str, str | float]]

SMALL = replace(SIZES["smollm3_debug"], layers=2)
FP8 = Float8Config(emulate=True)
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# From torchao's documentation of each recipe: cast -> (type, axis with one scale for each row or column).
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASTS = {
    "tensorwise": {"input": (E4M3, None), "weight": (E4M3, None), "grad_output": (E5M2, None)},
    "rowwise": {
        "input": (E4M3, 1),
        "weight": (E4M3, 1),
        "grad_output": (E4M3, 1),
        "weight_for_grad_input": (E4M3, 0),
        "input_for_grad_weight": (E4M3, 0),
        "grad_output_for_grad_weight": (E4M3, 0),
    },
    "rowwise_with_gw_hp": {
        "input": (E4M3, 1),
        "weight": (E4M3, 1),
        "grad_output": (E4M3, 1),
        "weight_for_grad_input": (E4M3, None),
    },
}
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def shares_by_loops(values: torch.Tensor, dtype: torch.dtype, axis: int | None, *, power_of_two: bool):
    """(overflow, underflow), value by value: half of the smallest float8 number and less becomes zero."""
    rows = [values.flatten()] if axis is None else list(values.unbind(1 - axis))
    overflowed = vanished = nonzero = 0
    for row in rows:
        numbers = row.tolist()
        finite = all(math.isfinite(number) for number in numbers)
        scale = LARGEST[dtype] / max(1e-12, *map(abs, numbers)) if finite else None
        if scale and power_of_two:
            scale = 2.0 ** math.floor(math.log2(scale))
        for number in numbers:
            nonzero += number != 0
            if scale is None:  # the scale is 0 (from inf) or NaN (from NaN), which destroys the whole row
                vanished += math.isfinite(number) and number != 0 and not any(map(math.isnan, numbers))
                overflowed += not math.isfinite(number) or any(map(math.isnan, numbers))
            else:
                vanished += number != 0 and abs(number) * scale <= SMALLEST[dtype] / 2
    return overflowed / values.numel(), vanished / nonzero


class Toy(nn.Module):
    """A linear whose output always gets the gradient `gradient`."""

    interface = ModelInterface((), "", None, None, None, "", None)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 16, bias=False)

    def forward(self, x, gradient):
        return (self.linear(x) * gradient).sum()


def wide(*shape: int) -> torch.Tensor:
    """Values over so many orders of magnitude that some underflow with any scale, and a few zeros."""
    numbers = torch.randn(*shape) * 10.0 ** torch.empty(*shape).uniform_(-9, 1)
    numbers[..., 3] = 0
    return numbers


@pytest.mark.parametrize("broken", [None, math.inf, math.nan])
@pytest.mark.parametrize("recipe", RECIPES)
def test_shares_equal_those_counted_by_plain_loops(recipe: str, broken: float | None, alone) -> None:
    model = Toy()
    model.linear.weight.data = wide(16, 32)
    convert_linears(model, replace(FP8, recipe=recipe), device_type="cpu")
    counts = CastCounts(model, mesh=cpu_mesh(), device=torch.device("cpu"))
    batches = [(wide(2, 5, 32), wide(2, 5, 16)) for _ in range(2)]
    if broken is not None:
        batches[0][0][0, 0, 0] = broken
    with counts.counting():
        for x, gradient in batches:
            model(x, gradient).backward()
    found = {row["tensor"]: (row["overflow"], row["underflow"]) for row in counts.shares()}
    assert list(found) == list(CASTS[recipe])
    operands = {
        "input": [x.flatten(0, 1) for x, _ in batches],
        "weight": [model.linear.weight.detach()],
        "grad_output": [gradient.flatten(0, 1) for _, gradient in batches],
    }
    for tensor, (dtype, axis) in CASTS[recipe].items():
        seen = operands[tensor.partition("_for_")[0]]
        shares = [shares_by_loops(values, dtype, axis, power_of_two=recipe != "tensorwise") for values in seen]
        overflow = sum(share for share, _ in shares) / len(shares)
        weights = [(values != 0).sum().item() for values in seen]
        underflow = sum(share * weight for (_, share), weight in zip(shares, weights, strict=True)) / sum(weights)
        assert found[tensor] == pytest.approx((overflow, underflow), abs=1e-12)
        assert underflow > 0.01
        assert (overflow > 0) == (broken is not None and tensor.startswith("input"))


@pytest.mark.parametrize(("dtype", "last", "beyond"), [(E4M3, 463.9, 464.0), (E5M2, 61439.0, 61440.0)])
def test_values_that_round_to_the_largest_number_do_not_overflow(dtype, last: float, beyond: float) -> None:
    values = torch.tensor([last, -last, beyond, -beyond, math.inf, math.nan, 0.0])
    counts = cast_counts(values, Cast("input", dtype, None, power_of_two=False), torch.tensor(1.0))
    assert counts.tolist() == [4, 7, 0, 6]


def batch(seed: int = 3) -> torch.Tensor:
    return torch.randint(0, SMALL.vocabulary, (4, 33), generator=torch.Generator().manual_seed(seed))


def sampled_step(
    config: Float8Config, *, mode: str = "none", mesh: MeshConfig | None = None, sample: bool = True, steps: int = 1
) -> tuple[list[bytes], Shares]:
    """The last step's losses and gradients as bytes, and its shares. A micro-batch is one sequence."""
    model, _ = build_model(SMALL, float8=config, mode=mode, mesh=mesh or MeshConfig(), fsdp=FSDPConfig())
    counts = CastCounts(model, mesh=cpu_mesh(), device=torch.device("cpu"))
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = batch()[rank::world]  # four micro-batches on one process, two on each of two
    bits: list[bytes] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for row in rows:
            loss = model(row[None, :-1], row[None, 1:]) / (4 * 32)
            loss.backward()
            bits.append(loss.detach().numpy().tobytes())
        bits.extend(parameter.grad.to_local().numpy().tobytes() for parameter in model.parameters())

    for _ in range(steps - 1):
        step()
        optimizer.step()
        optimizer.zero_grad()
        if config.all_gather:
            precompute_scales(model)
    if not sample:
        step()
        return bits, []
    with counts.counting():
        step()
    return bits, counts.shares()


@pytest.fixture(scope="module", params=RECIPES)
def sampled(request: pytest.FixtureRequest) -> tuple[Float8Config, list[bytes], Shares]:
    """A recipe of float8, and the bits and shares of a sampled step with it."""
    config = replace(FP8, recipe=request.param)
    start("cpu", seed=0)
    bits, shares = sampled_step(config)
    stop()
    return config, bits, shares


def test_a_sampled_step_equals_an_unsampled_step_bit_for_bit(sampled, alone) -> None:
    config, bits, _ = sampled
    assert sampled_step(config, sample=False)[0] == bits


def test_a_sampled_step_has_a_row_for_every_cast_of_every_linear(sampled) -> None:
    config, _, shares = sampled
    assert len(shares) == 2 * 7 * len(CASTS[config.recipe])
    assert shares[0]["linear"] == "blocks.0.attention.q_proj"
    assert any(row["underflow"] > 0 for row in shares) and all(row["overflow"] == 0 for row in shares)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_of_activation_checkpointing_is_not_counted(sampled, mode: str, alone) -> None:
    config, bits, shares = sampled
    assert sampled_step(config, mode=mode) == (bits, shares)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_each_value_is_counted_once(mode: str, alone) -> None:
    model, _ = build_model(SMALL, float8=replace(FP8, recipe="rowwise"), mode=mode, fsdp=FSDPConfig())
    counts = CastCounts(model, mesh=cpu_mesh(), device=torch.device("cpu"))
    x = batch()
    for _ in range(2):  # counts restart in the second step
        with counts.counting():
            for row in x:
                model(row[None, :-1], row[None, 1:]).backward()
    model(x[:, :-1], x[:, 1:]).backward()  # outside counting(), so not counted
    elements = dict(zip(counts._rows, counts._counts[:, 1].tolist(), strict=True))
    for name, (linear, casts) in casts_of_linears(model).items():
        tokens = 4 * 32
        sizes = {
            "input": tokens * linear.in_features,
            "weight": linear.in_features * linear.out_features,
            "grad_output": tokens * linear.out_features,
        }
        assert [elements[name, cast.tensor] for cast in casts] == [sizes[cast.operand] for cast in casts]


GATHER = replace(FP8, recipe="tensorwise", all_gather=True)


def test_weights_that_validation_has_gathered_as_float8_are_counted(alone) -> None:
    model, _ = build_model(SMALL, float8=GATHER, fsdp=FSDPConfig(reshard_after_forward=False))
    precompute_scales(model)
    counts, shares = CastCounts(model, mesh=cpu_mesh(), device=torch.device("cpu")), []
    row = batch()[:1]
    for validated in (False, True):
        if validated:
            with torch.no_grad():
                model(row[:, :-1], row[:, 1:])
        with counts.counting():
            model(row[:, :-1], row[:, 1:]).backward()
        shares.append(counts.shares())
    assert shares[0] == shares[1]


VARIANTS = {f"{recipe}, first step": (replace(FP8, recipe=recipe), 1) for recipe in RECIPES} | {
    "float8 all-gather, first step": (GATHER, 1),
    "float8 all-gather, second step": (GATHER, 2),
}
MESHES = {"sharded": MeshConfig(), "replicated": MeshConfig(replicate=2, shard=1)}


def shares_of_variants(meshes: list[MeshConfig]) -> list[dict[str, Shares]]:
    """The shares of every variant on each mesh."""
    start("cpu", seed=0)
    found = [
        {name: sampled_step(config, mesh=mesh, steps=steps)[1] for name, (config, steps) in VARIANTS.items()}
        for mesh in meshes
    ]
    stop()
    return found


@pytest.fixture(scope="module")
def on_one_process() -> dict[str, Shares]:
    [[shares]] = run_processes(1, shares_of_variants, [MeshConfig()])
    return shares


@pytest.fixture(scope="module")
def on_two_processes() -> list[dict[str, dict[str, Shares]]]:
    """By rank: mesh -> variant -> shares."""
    ranks = run_processes(2, shares_of_variants, list(MESHES.values()))
    return [dict(zip(MESHES, found, strict=True)) for found in ranks]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mesh", MESHES)
def test_two_processes_find_the_shares_of_one(mesh: str, variant: str, on_one_process, on_two_processes) -> None:
    """The same micro-batches are elsewhere: another order of sums changes the second step's weights, and few casts."""
    expected, (found, on_the_other) = on_one_process[variant], [rank[mesh][variant] for rank in on_two_processes]
    assert found == on_the_other
    assert [(row["linear"], row["tensor"]) for row in found] == [(row["linear"], row["tensor"]) for row in expected]
    tolerance = 1e-3 if VARIANTS[variant][1] > 1 else 0
    for name in ("overflow", "underflow"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], abs=tolerance)


@pytest.mark.slow
def test_float8_all_gather_underflows_as_often_as_a_cast_after_the_gather(on_one_process) -> None:
    """With float8 all-gather, float32 master weights are cast; otherwise their bfloat16 copies are."""
    gathered, plain = on_one_process["float8 all-gather, first step"], on_one_process["tensorwise, first step"]
    assert [row["underflow"] for row in gathered] == pytest.approx([row["underflow"] for row in plain], abs=1e-3)
