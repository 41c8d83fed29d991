"""Shares of numbers that overflow and underflow in the casts to float8, against plain loops and across processes."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from models.sizes import SIZES
from parallel.config import Float8Config, FSDPConfig, MeshConfig
from parallel.dist import start, stop
from parallel.float8 import Cast, casts_of_linears, convert_linears, precompute_scales
from parallel.float8_casts import CastCounts, cast_counts
from tests.build import build_model
from tests.processes import run_processes

SMALL = replace(SIZES["smollm3_debug"], layers=2)
FP8 = Float8Config(emulate=True)
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# What torchao's documentation of each recipe says: cast -> (type, axis with one scale for each row or column).
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
    """(overflow, underflow), number by number: half of the smallest float8 number and less becomes zero."""
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
            if scale is None:  # the scale of inf is 0 and that of nan is nan: nothing is left of the row
                vanished += math.isfinite(number) and number != 0 and not any(map(math.isnan, numbers))
                overflowed += not math.isfinite(number) or any(map(math.isnan, numbers))
            else:
                vanished += number != 0 and abs(number) * scale <= SMALLEST[dtype] / 2
    return overflowed / values.numel(), vanished / nonzero


class Toy(nn.Module):
    """Its output's gradient is `gradient`, whatever goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 16, bias=False)

    def forward(self, x, gradient):
        return (self.linear(x) * gradient).sum()


def wide(*shape: int) -> torch.Tensor:
    """Numbers over so many orders of magnitude that some vanish whatever the scale, and a few zeros."""
    numbers = torch.randn(*shape) * 10.0 ** torch.empty(*shape).uniform_(-9, 1)
    numbers[..., 3] = 0
    return numbers


@pytest.mark.parametrize("broken", [None, math.inf, math.nan])
@pytest.mark.parametrize("recipe", RECIPES)
def test_shares_are_those_of_plain_loops(recipe: str, broken: float | None, alone) -> None:
    model = Toy()
    model.linear.weight.data = wide(16, 32)
    convert_linears(model, replace(FP8, recipe=recipe), device_type="cpu")
    counts = CastCounts(model, device=torch.device("cpu"))
    batches = [(wide(2, 5, 32), wide(2, 5, 16)) for _ in range(2)]
    if broken is not None:
        batches[0][0][0, 0, 0] = broken
    with counts.counting():
        for x, gradient in batches:
            model(x, gradient).backward()
    found = {row["tensor"]: (row["overflow"], row["underflow"]) for row in counts.shares()}
    assert list(found) == list(CASTS[recipe])
    for tensor, (dtype, axis) in CASTS[recipe].items():
        seen = {
            "input": [x.flatten(0, 1) for x, _ in batches],
            "weight": [model.linear.weight.detach()],
            "grad_output": [gradient.flatten(0, 1) for _, gradient in batches],
        }[tensor.partition("_for_")[0]]
        shares = [shares_by_loops(values, dtype, axis, power_of_two=recipe != "tensorwise") for values in seen]
        overflow = sum(share for share, _ in shares) / len(shares)
        weights = [(values != 0).sum().item() for values in seen]
        underflow = sum(share * weight for (_, share), weight in zip(shares, weights, strict=True)) / sum(weights)
        assert found[tensor] == pytest.approx((overflow, underflow), abs=1e-12)
        assert underflow > 0.01
        assert (overflow > 0) == (broken is not None and tensor.startswith("input"))


def test_rounding_at_the_end_of_the_range_is_no_overflow() -> None:
    scale = torch.tensor(1.0)
    for dtype, last, beyond in ((E4M3, 463.9, 464.0), (E5M2, 61439.0, 61440.0)):
        values = torch.tensor([last, -last, beyond, -beyond, math.inf, math.nan, 0.0])
        counts = cast_counts(values, Cast("input", dtype, None, power_of_two=False), scale)
        assert counts.tolist() == [4, 7, 0, 6]


def batch(seed: int = 3) -> torch.Tensor:
    return torch.randint(0, SMALL.vocabulary, (4, 33), generator=torch.Generator().manual_seed(seed))


def sampled_step(
    config: Float8Config, *, mode: str = "none", mesh: MeshConfig | None = None, sample: bool = True, steps: int = 1
) -> tuple[list[bytes], list]:
    """A step's losses and gradients, bit by bit, and its shares; two micro-batches of one sequence a pass."""
    import torch.distributed as dist

    model, _ = build_model(SMALL, float8=config, mode=mode, mesh=mesh or MeshConfig(), fsdp=FSDPConfig())
    counts = CastCounts(model, device=torch.device("cpu"))
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = batch()[rank::world]  # with one process four micro-batches, with two two each
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_sampling_changes_no_bit_and_recomputation_does_not_count(recipe: str, alone) -> None:
    config = replace(FP8, recipe=recipe)
    plain, _ = sampled_step(config, sample=False)
    bits, shares = sampled_step(config)
    assert bits == plain
    assert len(shares) == 2 * 7 * len(CASTS[recipe])
    assert shares[0]["linear"] == "blocks.0.attention.q_proj"
    assert any(row["underflow"] > 0 for row in shares) and all(row["overflow"] == 0 for row in shares)
    for mode in ("selective", "full"):
        assert sampled_step(config, mode=mode) == (bits, shares)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_each_number_is_counted_once(mode: str, alone) -> None:
    model, _ = build_model(SMALL, float8=replace(FP8, recipe="rowwise"), mode=mode, fsdp=FSDPConfig())
    counts = CastCounts(model, device=torch.device("cpu"))
    x = batch()
    for _ in range(2):  # a second step starts anew
        with counts.counting():
            for row in x:
                model(row[None, :-1], row[None, 1:]).backward()
    model(x[:, :-1], x[:, 1:]).backward()  # outside
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
VARIANTS = [(replace(FP8, recipe=recipe), 1) for recipe in RECIPES] + [(GATHER, 1), (GATHER, 2)]


def all_variants(mesh: MeshConfig) -> list[list]:
    start("cpu", seed=0)
    found = [sampled_step(config, mesh=mesh, steps=steps)[1] for config, steps in VARIANTS]
    stop()
    return found


def test_two_processes_find_the_shares_of_one() -> None:
    """The same micro-batches, elsewhere: sums in another order change the second step's weights, and few roundings."""
    [one] = run_processes(1, all_variants, MeshConfig())
    for mesh in (MeshConfig(), MeshConfig(replicate=2, shard=1)):
        first, second = run_processes(2, all_variants, mesh)
        assert first == second
        for (config, steps), expected, found in zip(VARIANTS, one, first, strict=True):
            assert [(row["linear"], row["tensor"]) for row in found] == [
                (row["linear"], row["tensor"]) for row in expected
            ]
            for name in ("overflow", "underflow"):
                tolerance = 0 if steps == 1 else 1e-3
                assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], abs=tolerance), (
                    config.recipe,
                    steps,
                )
    gathered, plain = one[len(RECIPES)], one[0]
    # Cast from float32 masters there, from bfloat16 copies here.
    assert [row["underflow"] for row in gathered] == pytest.approx([row["underflow"] for row in plain], abs=1e-3)
