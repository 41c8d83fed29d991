"""The tokens of sequence number n of a run, computed from the recipe and n alone. Nothing is stored.

The order does not depend on the number of processes or the batch size. So the whole state of the data is the number of
sequences consumed, of each length and mixture that the run has had (history.py), and any position is reached at once.

S sequence length. A source is a row of `total` tokens that repeats forever. Its sequence i covers tokens i*S .. i*S + S
of that row: the last one is only a target here, and the first input of sequence i + 1. A sequence may start at the end
of one repetition and end in the next, so no token is dropped, padded or seen twice per repetition. Where an earlier
length was read before, sequences are counted from an origin, the first token of the row that it left alone.
Imports no torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import xxhash

from parallel.errors import listed

# Weights of a mixture are rounded to multiples of 1 / this, and are exact over any so many sequences in a row.
MIXTURE_PERIOD = 10_000
# Four are enough for large sizes; with halves of a few bits, each round adds little.
FEISTEL_ROUNDS = 8


@dataclass(frozen=True)
class SequenceOrder:
    """The shuffled order of one source's sequences.

    Epoch e consists of sequences e*total // S to (e+1)*total // S - 1, each once. Each epoch is shuffled as a whole,
    except that the first epoch of a source that is tokenized during training is shuffled window by window, and so is
    every epoch of a source that a run reads at several lengths.
    """

    sequence_length: int
    seed: int
    window: int | None
    """Sequences shuffled together in the first epoch; None = all."""
    every_epoch: bool = False
    """Whether all epochs are shuffled by windows."""
    origin: int = 0
    """The start of sequence 0 in the endless row of repetitions."""

    def needs(self, number: int) -> int | None:
        """How many tokens must exist, unless the source is complete, to determine sequence `number`; None = all."""
        if self.window is None:
            return None
        return self.origin + (number // self.window + 1) * self.window * self.sequence_length + 1

    def units(self, numbers: np.ndarray, *, total: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The epoch of each of these sequences, and the first and the number of those that it is shuffled with: three
        of (n,) int64. total: as in starts()."""
        if total is None:
            assert self.window is not None
            return np.zeros_like(numbers), numbers // self.window * self.window, np.full_like(numbers, self.window)
        epochs = self.epochs(numbers, total=total)
        firsts = np.maximum(0, (epochs * total - self.origin) // self.sequence_length)
        sizes = ((epochs + 1) * total - self.origin) // self.sequence_length - firsts
        if self.window is not None:
            by_windows = (epochs == 0) | self.every_epoch
            before = (numbers - firsts) // self.window * self.window
            sizes = np.where(by_windows, np.minimum(self.window, sizes - before), sizes)
            firsts = np.where(by_windows, firsts + before, firsts)
        return epochs, firsts, sizes

    def starts(self, numbers: np.ndarray, *, total: int | None) -> np.ndarray:
        """The starts in the source of the sequences of these numbers: (n,) int64 -> (n,) int64, below `total`.

        total: tokens in the source; None = unknown, then needs() of every number must exist already.
        """
        starts = self.origin + self.shuffled(numbers, total=total) * self.sequence_length
        return starts if total is None else starts % total

    def shuffled(self, numbers: np.ndarray, *, total: int | None, inverse: bool = False) -> np.ndarray:
        """Which sequences of the endless row, counted from the origin, have these numbers; or, inverse, the numbers of
        these sequences: (n,) -> (n,) int64."""
        epochs, firsts, sizes = self.units(numbers, total=total)
        # A key per epoch and window; a collision of two 64-bit keys is possible but practically never happens.
        seed = np.uint64(xxhash.xxh3_64_intdigest(str(self.seed).encode()))  # any int -> 64 bits
        keys = _mixed(_mixed(_u64(epochs) + seed) + _u64(firsts + self.origin))
        return firsts + permuted(numbers - firsts, sizes=sizes, keys=keys, inverse=inverse)

    def epochs(self, numbers: np.ndarray, *, total: int) -> np.ndarray:
        """The epoch, from 0, in which each of these sequences ends: (n,) -> (n,) int64."""
        return (self.origin + (numbers + 1) * self.sequence_length + total - 1) // total - 1


NAMED = 5
"""Sources named in a message at most."""


def mixture_problem(weights: Mapping[str, float]) -> str | None:
    """What is wrong with the shares of these sources, or None."""
    small = [source for source, weight in weights.items() if weight * MIXTURE_PERIOD < sum(weights.values())]
    if not small:
        return None
    named = [*map(repr, small[:NAMED]), *([f"{len(small) - NAMED:,} more"] if len(small) > NAMED else [])]
    return f"gives {listed(named)} less than 1 / {MIXTURE_PERIOD} of the tokens; raise it or leave it out"


class Mixture:
    """Distributes the sequences of a run over several sources, evenly and by fixed shares.

    Each source has exactly its share of any MIXTURE_PERIOD sequences in a row, and nearly its share of a few hundred:
    less noise than random sampling. All sequences are equally long, so these are shares of the tokens.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """weights: positive, with any sum, none below 1 / MIXTURE_PERIOD of it."""
        shares = np.asarray(weights, dtype=np.float64) / sum(weights) * MIXTURE_PERIOD
        quotas = np.floor(shares + 1e-6).astype(np.int64)
        left = MIXTURE_PERIOD - int(quotas.sum())
        for source in np.argsort(quotas - shares, kind="stable")[:left]:  # largest remainders first
            quotas[source] += 1
        self.quotas = quotas
        places = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas])
        sources = np.repeat(np.arange(len(quotas)), quotas)
        order = np.lexsort((sources, places))
        self._source = sources[order]  # (MIXTURE_PERIOD,): the source of each sequence
        ranks = np.concatenate([np.arange(quota) for quota in quotas])
        self._rank = ranks[order]  # (MIXTURE_PERIOD,): how many of its sequences came before in the period

    def place(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sequence, and its number within that source: (n,) -> (n,), (n,) int64."""
        periods, slots = np.divmod(numbers, MIXTURE_PERIOD)
        sources = self._source[slots]
        return sources, periods * self.quotas[sources] + self._rank[slots]

    def consumed(self, count: int) -> list[int]:
        """How many of each source's sequences are among the first `count`."""
        periods, slots = divmod(count, MIXTURE_PERIOD)
        return (periods * self.quotas + np.bincount(self._source[:slots], minlength=len(self.quotas))).tolist()

    def available(self, counts: Sequence[int]) -> int:
        """Sequences needed to read each source completely. counts: sequences of each source."""
        return max(
            (count - 1) // quota * MIXTURE_PERIOD + int(np.flatnonzero(self._source == source)[(count - 1) % quota]) + 1
            if count
            else 0
            for source, (count, quota) in enumerate(zip(counts, self.quotas.tolist(), strict=True))
        )


def permuted(positions: np.ndarray, *, sizes: np.ndarray, keys: np.ndarray, inverse: bool = False) -> np.ndarray:
    """The position in 0 .. size-1 that the permutation of each key maps each position to: three of (n,) -> (n,) int64.
    inverse: the position that it maps to each.

    A Feistel network permutes the numbers of 2 * half bits whatever its round function is. There are at most 4 * size
    of them. A result outside 0 .. size-1 is permuted again until it is inside, which gives a permutation of 0 .. size-1
    (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    bits = np.frexp((sizes - 1).astype(np.float64))[1]  # exact below 2**53
    halves = _u64(np.maximum(1, (bits + 1) // 2))
    masks = (np.uint64(1) << halves) - np.uint64(1)
    values, limits = _u64(positions), _u64(sizes)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        half, mask, key = halves[outside], masks[outside], _mixed(keys[outside])
        rounds: Iterable[np.ndarray] = accumulate(range(FEISTEL_ROUNDS - 1), lambda key, _: _mixed(key), initial=key)
        left, right = values[outside] >> half, values[outside] & mask
        if inverse:  # the same network with its halves exchanged and its rounds in reverse
            left, right, rounds = right, left, [*rounds][::-1]
        for key in rounds:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        values[outside] = (right << half) | left if inverse else (left << half) | right
        outside &= values >= limits
    return values.astype(np.int64)


def _u64(values: np.ndarray) -> np.ndarray:
    return values.astype(np.uint64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """splitmix64's next(): every bit of the result depends on every bit of the value. Steele, Lea, Flood 2014."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
