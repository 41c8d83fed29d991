"""The comparison with other loops runs, and refuses to compare models that differ."""

import pytest

from parallel.errors import UserError
from recipes.lab.bench import peers

TINY = [
    "--model.layers",
    "1",
    "--model.width",
    "64",
    "--model.feed_forward_width",
    "96",
    "--batch.sequence_length",
    "8",
]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "others"), [(1, ["plain loop"]), (2, ["ours, sharded", "DDP"])])
def test_every_loop_is_measured_in_every_window(processes: int, others: list[str]) -> None:
    found = peers.peers(["bf16"], TINY, processes=processes, windows=2, steps=1)
    loops = {name: row for name, row in found["bf16"].items() if name != "transformers' Trainer"}
    assert list(loops) == ["ours", *others]
    assert all(len(row["windows"]) == 2 for row in loops.values())
    assert loops["ours"]["ratio"] == 1
    table = peers.table(found, processes=processes)
    assert "bf16, ours" in table
    assert table.count("too few windows") == len(found["bf16"])


@pytest.mark.parametrize(("number", "rank"), [(6, 1), (8, 1), (9, 2), (14, 3), (20, 6), (40, 14)])
def test_interval_of_the_median_has_the_ranks_of_the_sign_test(number: int, rank: int) -> None:
    """The ranks are those of published tables of the sign test, two-sided, at 5%."""
    values = list(range(number, 0, -1))
    assert peers.median_interval(values) == (rank, number + 1 - rank)


def test_few_values_have_no_interval_of_the_median() -> None:
    assert peers.median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None


def test_table_shows_the_interval_of_a_ratio() -> None:
    windows = {"seconds": 1.0, "ratio": 0.98, "ratio_interval": (0.951, 1.004), "windows": [1.0] * 14}
    assert "0.980   0.951 to 1.004" in peers.table({"float32": {"ours": windows, "DDP": windows}}, processes=2)


def test_loops_with_different_losses_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"plain loop starts with the loss 8\.5, but ours with 8\.0"):
        peers._require_same_losses({"ours": 8.0, "plain loop": 8.5})


@pytest.mark.slow
def test_wrong_override_is_refused_before_any_process_starts() -> None:
    with pytest.raises(UserError, match=r"model\.layers"):
        peers.peers(["float32"], ["--model.layers", "none"], processes=2, windows=1, steps=1)
