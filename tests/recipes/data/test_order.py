"""The order of the sequences: arithmetic for any size and any position."""

from collections import Counter

import numpy as np
import pytest

from recipes.data.order import MIXTURE_PERIOD, Mixture, SequenceOrder, mixture_problem, permuted


def starts(order: SequenceOrder, first: int, count: int, *, total: int | None) -> list[int]:
    return order.starts(np.arange(first, first + count), total=total).tolist()


def seen(order: SequenceOrder, count: int, *, total: int) -> np.ndarray:
    """How often each token is an input of the first `count` sequences: (total,)."""
    times = np.zeros(total, dtype=np.int64)
    for start in starts(order, 0, count, total=total):
        np.add.at(times, np.arange(start, start + order.sequence_length) % total, 1)
    return times


# ------------------------------------------------------------------------------------------------------------- epochs


@pytest.mark.parametrize("window", [None, 1, 3, 1000])
@pytest.mark.parametrize("total", [7, 10, 11, 99, 100, 103, 1000])
def test_no_token_is_dropped_or_seen_twice(total: int, window: int | None) -> None:
    order = SequenceOrder(sequence_length=10, seed=5, window=window)
    # Ten times the source, and sequences that fill it exactly.
    assert (seen(order, total, total=total) == 10).all()
    for epochs in range(1, 10):
        times = seen(order, epochs * total // 10, total=total)
        assert times.max() <= epochs
        assert (epochs - times).sum() == epochs * total % 10  # less than a sequence is left for the next epoch


def test_every_epoch_is_shuffled_differently() -> None:
    order = SequenceOrder(sequence_length=10, seed=1, window=None)
    epochs = [starts(order, 70 * epoch, 70, total=700) for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(0, 700, 10))] * 3
    assert len({tuple(epoch) for epoch in [*epochs, range(0, 700, 10)]}) == 4
    assert order.epochs(np.array([0, 69, 70, 139, 140]), total=700).tolist() == [0, 0, 1, 1, 2]


def test_first_epoch_of_a_stream_is_shuffled_window_by_window() -> None:
    order = SequenceOrder(sequence_length=10, seed=1, window=20)
    first = starts(order, 0, 70, total=703)
    windows = [sorted(start // 10 for start in first[begin : begin + 20]) for begin in range(0, 70, 20)]
    assert windows == [list(range(0, 20)), list(range(20, 40)), list(range(40, 60)), list(range(60, 70))]
    assert first[:20] != sorted(first[:20])
    assert [start % 200 for start in first[:20]] != [start % 200 for start in first[20:40]]
    # The next epoch knows the whole source. It begins with the tail of the first: a sequence from there wraps around.
    second = starts(order, 70, 70, total=703)
    assert max(second[:20]) > 200
    assert 700 in second


def test_order_does_not_depend_on_how_much_is_tokenized() -> None:
    order = SequenceOrder(sequence_length=10, seed=1, window=20)
    assert starts(order, 0, 60, total=None) == starts(order, 0, 60, total=703) == starts(order, 0, 60, total=10**6)
    assert [order.needs(number) for number in (0, 19, 20, 59)] == [201, 201, 401, 601]
    assert SequenceOrder(sequence_length=10, seed=1, window=None).needs(0) is None


def test_any_position_in_a_trillion_tokens_is_computed_directly() -> None:
    order = SequenceOrder(sequence_length=8192, seed=3, window=None)
    total = 10**12
    numbers = np.unique(np.random.default_rng(0).integers(total // 8192, size=100_000))
    images = order.starts(numbers, total=total)
    assert len(np.unique(images)) == len(numbers)
    assert images.min() >= 0
    assert images.max() < total
    assert abs(images.mean() / total - 0.5) < 0.01
    assert order.epochs(np.array([10**9]), total=total).tolist() == [10**9 * 8192 // total]


def test_order_is_the_same_in_every_version() -> None:
    """A resumed run must get the order that it started with, whatever version runs it."""
    assert starts(SequenceOrder(10, 0, None), 0, 12, total=103) == ORDER
    assert starts(SequenceOrder(10, 0, 4), 0, 12, total=103) == WINDOWED_ORDER
    assert starts(SequenceOrder(8192, 7, None), 5, 2, total=10**12) == FAR_ORDER


ORDER = [0, 60, 70, 10, 50, 90, 30, 80, 20, 40, 87, 77]
WINDOWED_ORDER = [0, 10, 30, 20, 60, 40, 70, 50, 80, 90, 87, 77]
FAR_ORDER = [201959694336, 856059330560]


# -------------------------------------------------------------------------------------------------------- permutation


def order_of(size: int, key: int = 0) -> np.ndarray:
    return permuted(np.arange(size), sizes=np.full(size, size), keys=np.full(size, key, dtype=np.uint64))


@pytest.mark.parametrize("key", [0, 1, 2**63])
def test_every_key_gives_a_permutation(key: int) -> None:
    for size in range(1, 201):
        assert np.array_equal(np.sort(order_of(size, key)), np.arange(size))
    assert np.array_equal(np.sort(order_of(100_003, key)), np.arange(100_003))


def test_all_orders_of_a_few_sequences_are_about_equally_likely() -> None:
    order = SequenceOrder(sequence_length=1, seed=0, window=None)
    orders = np.array(starts(order, 0, 4 * 2400, total=4)).reshape(2400, 4)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert counts.min() > 60
    assert counts.max() < 140


# ------------------------------------------------------------------------------------------------------------ mixture


def test_every_source_has_its_share_in_any_period() -> None:
    mixture = Mixture([0.7, 0.2, 0.1])
    sources, numbers = mixture.place(np.arange(3 * MIXTURE_PERIOD))
    for first in (0, 17, MIXTURE_PERIOD - 5, 12_345):
        assert np.bincount(sources[first : first + MIXTURE_PERIOD]).tolist() == [7000, 2000, 1000]
        for length in (10, 128):
            counts = np.bincount(sources[first : first + length], minlength=3)
            assert np.abs(counts - length * np.array([0.7, 0.2, 0.1])).max() < 2
    for source in range(3):  # each is read in its own order, without a gap
        assert numbers[sources == source].tolist() == list(range((sources == source).sum()))


def test_shares_may_have_any_sum_and_number() -> None:
    for weights in ([1.0], [1 / 3, 1 / 3, 1 / 3], [5.0, 1.0, 1.0], [0.0001, 0.9999], list(range(1, 50))):
        mixture = Mixture(weights)
        assert mixture.quotas.sum() == MIXTURE_PERIOD
        assert np.abs(mixture.quotas / MIXTURE_PERIOD - np.array(weights) / sum(weights)).max() <= 1 / MIXTURE_PERIOD
        assert mixture.quotas.min() >= 1


def test_consumed_and_available_sequences_agree_with_their_places() -> None:
    mixture = Mixture([0.75, 0.25])
    for count in (0, 1, 7, MIXTURE_PERIOD, 3 * MIXTURE_PERIOD + 5):
        sources, _ = mixture.place(np.arange(count))
        assert mixture.consumed(count) == [(sources == 0).sum(), (sources == 1).sum()]
    for counts in ([0, 5], [1, 1], [30, 5], [100, 5], [7500, 2500], [7501, 2600], [100_000, 12]):
        available = mixture.available(counts)
        assert all(used >= count for used, count in zip(mixture.consumed(available), counts, strict=True))
        assert any(used < count for used, count in zip(mixture.consumed(available - 1), counts, strict=True))
    assert mixture.available([0, 0]) == 0


def test_the_last_sequence_of_each_source_in_a_batch_is_counted_without_placing_them() -> None:
    mixture = Mixture([0.6, 0.3, 0.07, 0.03])
    for first, count in ((0, 1), (7, 5), (MIXTURE_PERIOD - 3, 9), (10**9, 64), (123, 3 * MIXTURE_PERIOD)):
        sources, numbers = mixture.place(np.arange(first, first + count))
        before, after = mixture.consumed(first), mixture.consumed(first + count)
        placed = {source: numbers[sources == source].max() for source in set(sources.tolist())}
        assert placed == {source: after[source] - 1 for source in range(4) if after[source] > before[source]}


def test_mixture_is_the_same_in_every_version() -> None:
    sources, _ = Mixture([0.5, 0.3, 0.2]).place(np.arange(20))
    assert sources.tolist() == MIXED
    assert Counter(MIXED) == {0: 10, 1: 6, 2: 4}


MIXED = [0, 1, 2, 0, 0, 1, 0, 2, 1, 0, 0, 1, 2, 0, 0, 1, 0, 2, 1, 0]


def test_too_small_share_is_named() -> None:
    assert mixture_problem({"a": 1.0, "b": 0.00001}) is not None
    assert "'b'" in str(mixture_problem({"a": 1.0, "b": 0.00001}))
    assert mixture_problem({"a": 1.0, "b": 0.001}) is None
