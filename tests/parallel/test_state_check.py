"""Checksums and finiteness of the state in memory, on real tensors and real process groups."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.dist import start, stop
from parallel.errors import CorruptState
from parallel.nodes import FEW
from parallel.state_check import PIECE, Lines, _first_lines, _inspect, not_finite, require_sound
from tests.processes import run_processes

LENGTHS = (1, 0, 7, PIECE["cpu"], 2 * PIECE["cpu"] + 1)
DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def checksums(tensors: list[Tensor]) -> list[int]:
    return _inspect(tensors, checksums=True)[1].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_changes_the_checksum_of_its_tensor_only(dtype: torch.dtype) -> None:
    tensors = [torch.randn(length).to(dtype) for length in LENGTHS]
    before = checksums(tensors)
    for number, tensor in enumerate(tensors):
        words = tensor.view(DTYPES[dtype])
        for place in {0, len(tensor) // 2, len(tensor) - 1} if len(tensor) else ():
            for bit in range(8 * tensor.element_size()):
                mask = torch.tensor(1 << bit).to(words.dtype)  # the sign bit wraps
                words[place] ^= mask
                changed = [one != other for one, other in zip(before, checksums(tensors), strict=True)]
                words[place] ^= mask
                assert changed == [other == number for other in range(len(tensors))], (place, bit)


def test_two_flips_of_the_same_bit_never_cancel() -> None:
    """Their sum would be the same: one word gains what the other loses."""
    for first, second in ((0, 1), (0, PIECE["cpu"]), (3, 2 * PIECE["cpu"] + 3), (5, 6)):
        for bit in range(31):
            words = torch.zeros(3 * PIECE["cpu"], dtype=torch.int32)
            words[first] = 1 << bit
            before = checksums([words.view(torch.float32)])
            words[first], words[second] = 0, 1 << bit
            assert checksums([words.view(torch.float32)]) != before, (first, second, bit)


def test_bits_are_compared_and_not_values() -> None:
    zero, negative = torch.zeros(3), -torch.zeros(3)
    one, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert torch.equal(zero, negative) and checksums([zero]) != checksums([negative])
    assert one.isnan() and other.isnan() and checksums([one]) != checksums([other])


def test_tensors_that_are_not_contiguous_count_as_copies_of_them() -> None:
    tensor = torch.randn(300, 500)
    assert checksums([tensor.t(), tensor[:, ::2]]) == checksums([tensor.t().contiguous(), tensor[:, ::2].contiguous()])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    largest = torch.finfo(dtype).max
    for length in LENGTHS:
        tensors = {"good": torch.tensor([largest, -largest], dtype=dtype), "empty": torch.empty(0), "bad": None}
        for place in {0, length // 2, length - 1} if length else ():
            tensors["bad"] = torch.ones(length, dtype=dtype)
            tensors["bad"][place] = value
            assert not_finite(tensors) == ["bad"]


def test_a_process_without_any_elements_has_a_sound_state() -> None:
    assert not_finite({"empty": torch.empty(0), "also": torch.empty(0, 4)}) == []


def test_of_very_many_lines_few_travel_and_the_rest_is_counted() -> None:
    """Once NaN has spread, each of thousands of processes has a line for each tensor."""
    found: Lines = [], 0
    for rank in reversed(range(100)):
        lines = [(0, rank, n, f"tensor {n} on rank {rank}") for n in range(50)]
        found = _first_lines(found, ([*lines, (1, rank, 0, "a line that all tell")], 51))
    assert found == ([(0, 0, n, f"tensor {n} on rank 0") for n in range(FEW)], 100 * 51)
    two = _first_lines(([(1, 3, 0, "differs")], 1), ([(0, 5, 0, "has NaN"), (1, 4, 0, "differs")], 2))
    assert two == ([(0, 5, 0, "has NaN"), (1, 3, 0, "differs")], 2)


def problems_of(cases: list[dict[int, tuple[str, float]]]) -> list[str]:
    """What four processes say where ranks change one tensor; "all" must be equal on all, "odd" on 1 and 3 only."""
    world, found = start("cpu", seed=0), []
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    for case in cases:
        tensors = {"all": torch.ones(3), "odd": torch.full((2,), float(world.rank % 2)), "own": torch.rand(2)}
        if world.rank in case:
            name, value = case[world.rank]
            tensors[name][1] = value
        copies = [(dist.group.WORLD, ["all"]), (groups[world.rank % 2], ["odd", "all"])]
        try:
            require_sound(tensors, world, copies=copies)
            found.append("")
        except CorruptState as error:
            found.append(str(error).replace(f" on {world.nodes[0].name}", ""))
    stop()
    return found


@pytest.mark.slow
def test_tensors_are_compared_in_the_groups_that_must_share_them_and_the_odd_one_is_named(tmp_path: Path) -> None:
    cases: dict[str, dict[int, tuple[str, float]]] = {
        "": {},
        "all differs from the other copies on rank 2; all differs between rank 0 and rank 2": {2: ("all", 5.0)},
        "odd differs between rank 1 and rank 3": {3: ("odd", 5.0)},
        "own has NaN or infinite values on rank 0": {0: ("own", math.inf)},
        "odd has NaN or infinite values on rank 1; odd differs between rank 1 and rank 3": {1: ("odd", math.nan)},
    }
    answers = run_processes(4, problems_of, list(cases.values()))
    assert answers == [list(cases)] * 4
