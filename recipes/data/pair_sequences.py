"""Pairs of prompt and answer in the order of a run, computed from the recipe alone, as the order of text is.

A sequence is a row of whole pairs (packed), or one pair (for an encoder-decoder model). Every epoch has each sequence
of a source once, in an order of its own. An encoder-decoder model pads pairs, so those of a step are made similarly
long: in windows of the shuffled epoch, pairs are sorted by length, cut into runs, and the runs shuffled. Imports no
torch.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import xxhash

from parallel.errors import UserError
from recipes.data.config import DataConfig
from recipes.data.history import History
from recipes.data.order import permuted
from recipes.data.sequences import Mixed, Piece, Source
from recipes.data.text.pair_format import FIRST, ID, LEARNED, PairFormat, shortened
from recipes.data.tokens.shards import TRAIN, VALIDATION, read_index

PACKED_TOGETHER = 2**16
"""Pairs that are packed at a time: their last few rows are not full."""
RUNS_IN_WINDOW = 64
PADDED_TO = 64
"""Prompts and answers are padded to multiples of this, so that compiled blocks see few different shapes."""


@dataclass(frozen=True)
class Pairing:
    """How rows become pairs, and pairs batches."""

    format: PairFormat
    decoder_start: int = 0
    """The token that begins what the decoder of an encoder-decoder model reads."""
    padding: int | None = None
    """The token that fills up; None = the one that ends documents."""


@dataclass(frozen=True)
class Limits:
    """How long a pair may be, in tokens, and what happens to longer ones."""

    prompt: int
    """Most tokens of a prompt that an encoder reads; otherwise of the inputs of a whole pair."""
    answer: int | None
    """Most tokens of an answer; None where the limit above holds for the whole pair."""
    long: str
    """data.long_pairs."""


@dataclass(frozen=True)
class Pairs:
    """Places and lengths of pairs of a source: (n,) int64 each."""

    starts: np.ndarray
    """The first token of each in the source."""
    lengths: np.ndarray
    """Tokens of each."""
    prompts: np.ndarray
    """Tokens before the first answer."""
    cut: np.ndarray
    """Tokens of the prompt that are left out."""

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, which: np.ndarray) -> "Pairs":
        """Some of the pairs."""
        return Pairs(self.starts[which], self.lengths[which], self.prompts[which], self.cut[which])


def find_pairs(shards: Any) -> Pairs:
    """All pairs in these shards."""
    starts, lengths, prompts, before = [], [], [], 0
    for tokens in shards.arrays():
        first = np.flatnonzero(tokens & np.uint32(FIRST))
        learned = np.flatnonzero(tokens & np.uint32(LEARNED))
        starts.append(first + before)
        lengths.append(np.diff(first, append=len(tokens)))
        prompts.append(learned[np.searchsorted(learned, first)] - first if first.size else first)
        before += len(tokens)
    none = np.zeros(0, dtype=np.int64)
    begin, length, prompt = (np.concatenate([none, *parts]) for parts in (starts, lengths, prompts))
    return Pairs(begin, length, prompt, np.zeros_like(begin))


def fitting(pairs: Pairs, limits: Limits) -> tuple[Pairs, np.ndarray]:
    """The pairs within the limits, cut if they may be, and which of all are left out: (n,) bool."""
    if limits.answer is None:
        cut = np.maximum(pairs.lengths - 1 - limits.prompt, 0)  # the last token is only a target
        left_out = (cut > 0) & (cut >= pairs.prompts)  # a token stays, from which the first answer is predicted
    else:
        cut = np.maximum(pairs.prompts - limits.prompt, 0)
        left_out = pairs.lengths - pairs.prompts > limits.answer
    if limits.long == "leave_out":
        left_out |= cut > 0
    return replace(pairs, cut=cut).take(~left_out), left_out


def pack(sizes: np.ndarray, *, capacity: int, key: int) -> list[np.ndarray]:
    """The pairs of each row: each once, none larger than capacity, best fit first. sizes: (n,) int64."""
    shuffled = _shuffled(len(sizes), key)
    rows: list[list[int]] = []
    for begin in range(0, len(sizes), PACKED_TOGETHER):
        together = shuffled[begin : begin + PACKED_TOGETHER]
        spaces: list[tuple[int, int]] = []  # (free tokens, row), sorted
        for pair in together[np.argsort(-sizes[together], kind="stable")].tolist():
            size = int(sizes[pair])
            place = bisect_left(spaces, (size, -1))
            if place == len(spaces):
                rows.append([])
                space, row = capacity, len(rows) - 1
            else:
                space, row = spaces.pop(place)
            rows[row].append(pair)
            if space > size:
                insort(spaces, (space - size, row))
    return [np.array(row, dtype=np.int64) for row in rows]


def runs_of_similar(order: np.ndarray, lengths: Sequence[np.ndarray], *, run: int, key: int) -> np.ndarray:
    """A shuffled epoch with pairs of similar lengths in each `run` of a row. order: (n,) pairs. lengths: what to sort
    them by, the most important first."""
    found, window = [], run * RUNS_IN_WINDOW
    for begin in range(0, len(order), window):
        part = order[begin : begin + window]
        whole = len(part) // run * run
        part, rest = part[:whole], part[whole:]
        runs = part[np.lexsort([one[part] for one in reversed(lengths)])].reshape(-1, run)
        found += [runs[_shuffled(len(runs), key + begin)].ravel(), rest]
    return np.concatenate(found)


def _shuffled(count: int, key: int) -> np.ndarray:
    """A permutation of 0 .. count - 1."""
    keys = np.full(count, xxhash.xxh3_64_intdigest(str(key).encode()), dtype=np.uint64)
    return permuted(np.arange(count), sizes=np.full(count, count, dtype=np.int64), keys=keys)


class PairSource:
    """The sequences of one source whose pairs are all there."""

    def __init__(self, source: Source, limits: Limits, *, run: int, budget: float) -> None:
        """run: pairs of a step. budget: data.bad_row_budget. Raises UserError if too few pairs are short enough."""
        self.source, self._seed, self._run, self._limits = source, source.order.seed, run, limits
        every = find_pairs(source.shards)
        self.pairs, left_out = fitting(every, limits)
        self.left_out = int(left_out.sum())
        self._require_enough(every, limits, budget)
        if source.shards.kind == TRAIN:  # nothing says which rows the others are
            source.left_out = self._left_out(every.take(left_out))
        self._rows: list[np.ndarray] | None = None
        if limits.answer is None:
            self._rows = pack(self.pairs.lengths - 1 - self.pairs.cut, capacity=limits.prompt, key=self._seed)
        self._order = lru_cache(maxsize=2)(self._order_of)  # two threads may look at two epochs

    @property
    def sequences(self) -> int:
        """Sequences of an epoch."""
        return len(self.pairs) if self._rows is None else len(self._rows)

    @cached_property
    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Input tokens of each sequence that an encoder reads and that a decoder reads: (sequences,) int64 each."""
        if self._rows is None:
            return self.pairs.prompts - self.pairs.cut, self.pairs.lengths - self.pairs.prompts
        sizes = self.pairs.lengths - 1 - self.pairs.cut
        inputs = np.array([sizes[row].sum() for row in self._rows], dtype=np.int64)
        return np.zeros_like(inputs), inputs

    def pairs_of(self, number: int) -> np.ndarray:
        """The pairs of sequence `number`, by index."""
        epoch, place = divmod(number, self.sequences)
        sequence = int(self._order(epoch)[place])
        return np.array([sequence]) if self._rows is None else self._rows[sequence]

    def tokens_of(self, consumed: int) -> tuple[int, int]:
        """Input tokens of the first `consumed` sequences, as in `tokens`."""
        epochs, rest = divmod(consumed, self.sequences)
        part = self._order(epochs)[:rest]
        encoder, decoder = (epochs * int(one.sum()) + int(one[part].sum()) for one in self.tokens)
        return encoder, decoder

    def read(self, pair: int) -> np.ndarray:
        """The stored tokens of a pair, whole: (n,) uint32."""
        tokens = np.empty(int(self.pairs.lengths[pair]), dtype=np.uint32)
        self.source.shards.read(int(self.pairs.starts[pair]), tokens)
        return tokens

    def shortened(self, pair: int) -> np.ndarray:
        """The stored tokens of a pair, without what is cut of a prompt that is too long: (n,) uint32."""
        over, limits = int(self.pairs.cut[pair]), self._limits
        return shortened(self.read(pair), over, long=limits.long, keeps_end=limits.answer is not None)

    def prompt_and_answer(self, pair: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a shortened pair's prompt, and of what follows it: (n,) int64 each."""
        tokens = (self.shortened(pair) & ID).astype(np.int64)
        prompt, answer = np.split(tokens, [int(self.pairs.prompts[pair] - self.pairs.cut[pair])])
        return prompt, answer

    def _order_of(self, epoch: int) -> np.ndarray:
        """The sequences of an epoch: (sequences,) int64."""
        key = xxhash.xxh3_64_intdigest(f"{self._seed} {epoch}".encode())
        order = _shuffled(self.sequences, key)
        if self._rows is not None:
            return order
        encoder, decoder = (-(-one // PADDED_TO) for one in self.tokens)
        return runs_of_similar(order, (encoder, decoder), run=self._run, key=key)

    def _require_enough(self, every: Pairs, limits: Limits, budget: float) -> None:
        bad, rows = (sum(getattr(shard, name) for shard in self.source.shards.shards) for name in ("bad", "rows"))
        if len(self.pairs) and (self.left_out == 0 or self.left_out + bad <= budget * rows):
            return
        inputs = every.lengths - 1 if limits.answer is None else every.prompts
        most = f"batch.sequence_length = {limits.prompt}"
        longest = f"{int(inputs.max())} tokens"
        if limits.answer is not None:
            most += f" for prompts or data.answer_length = {limits.answer} for answers"
            longest = f"{longest} of a prompt and {int((every.lengths - every.prompts).max())} of an answer"
        raise UserError(
            f"data.long_pairs: {self.left_out} of the {len(every)} pairs of {self.source.name!r} are longer than"
            f" {most}; with {bad} bad rows, that is more than data.bad_row_budget = {budget} allows to leave out. The"
            f" longest have {longest}: raise"
            ' the limit, or write long_pairs = "cut_prompt_start" or "cut_prompt_end", which shorten prompts alone'
        )

    def _left_out(self, pairs: Pairs) -> Iterator[dict[str, Any]]:
        """File, row and reason of these pairs, of training."""
        index = read_index(self.source.shards.folder)
        for start, length in zip(pairs.starts.tolist(), pairs.lengths.tolist(), strict=True):
            file, row, _, _ = next(self.source.shards.documents(start, length))
            name = index.files[file] if index else str(file)
            yield {"file": name, "row": row, "reason": f"too long: a pair of {length} tokens (data.long_pairs)"}


class PairSequences(Mixed):
    """The sequences of all sources in the order of the run, as Sequences has them for text."""

    def __init__(self, sources: Sequence[PairSource], weights: Sequence[float], limits: Limits) -> None:
        """weights: shares of the sequences, as for Mixture."""
        super().__init__([one.source for one in sources], weights, limits.prompt, windows={})
        self._own, self.limits = list(sources), limits

    def continue_after(self, history: History) -> int:
        """Go on after these segments, as Sequences does. Raises UserError if the sources, their shares or the length
        were others: where pairs of another order go on is not defined."""
        if not history:
            return 0
        if len(history) > 1 or not self._segment.continues(history[0]):
            raise UserError(
                "data: pairs cannot go on after other sources, shares or another batch.sequence_length, because these"
                " decide which pairs share a row; keep them, or start another run from the weights (model.weights)"
            )
        return history[0].sequences

    @property
    def available(self) -> int:
        """Sequences until every pair was read once; smaller sources repeat until then."""
        return self.mixture.available([one.sequences for one in self._own])

    def pairs(self, number: int) -> tuple[PairSource, np.ndarray]:
        """The source of sequence `number`, and which of its pairs it consists of."""
        (index,), (number_there,) = self._places(np.array([number]))
        return self._own[index], self._own[index].pairs_of(int(number_there))

    def beginning(self, count: int) -> list[int]:
        """The last `count` tokens of the first prompt, which is cut where it is too long."""
        source, (pair, *_) = self.pairs(0)
        return source.prompt_and_answer(int(pair))[0].tolist()[-count:]

    def pieces(self, number: int) -> Iterator[Piece]:
        """The pairs that training sequence `number` consists of, whole."""
        found, pairs = self.pairs(number)
        for pair in pairs.tolist():
            start, length = int(found.pairs.starts[pair]), int(found.pairs.lengths[pair])
            for piece in found.source.shards.documents(start, length):
                yield Piece(found.source.name, *piece)

    def tokens(self, consumed: int) -> tuple[int, int]:
        """Input tokens without padding in the first `consumed` sequences: of an encoder, and of a decoder."""
        each = [pairs.tokens_of(count) for pairs, count in zip(self._own, self._counts(consumed), strict=True)]
        return sum(encoder for encoder, _ in each), sum(decoder for _, decoder in each)

    def tokens_by_source(self, consumed: int) -> dict[str, int]:
        """Those of tokens(), of each source."""
        counts = zip(self._own, self._counts(consumed), strict=True)
        return {pairs.source.name: sum(pairs.tokens_of(count)) for pairs, count in counts}

    def epochs(self, consumed: int) -> dict[str, float | None]:
        """How often each source is read in so many sequences."""
        counts = zip(self._own, self._counts(consumed), strict=True)
        return {pairs.source.name: count / pairs.sequences for pairs, count in counts}


def pair_sequences(
    sources: Sequence[Source],
    weights: Sequence[float],
    section: DataConfig,
    pairing: Pairing,
    *,
    run: int,
    log: Callable[[str], None],
) -> PairSequences:
    """The sequences of these sources, which must be complete. run: how many pairs in a row an encoder-decoder model
    gets of similar length: those of a step. Raises UserError for pairs that are too long."""
    answer = section.answer_length if pairing.format.encoder_decoder else None
    length = sources[0].order.sequence_length
    limits = Limits(length, answer, section.long_pairs)
    opened = [PairSource(one, limits, run=run, budget=section.bad_row_budget) for one in sources]
    for one in opened:
        tokens, left = sum(int(part.sum()) for part in one.tokens), one.left_out
        cut = int((one.pairs.cut > 0).sum())
        what = f"{len(one.pairs):,} pairs with {tokens:,} tokens"
        if answer is None:
            share = tokens / (one.sequences * length)
            what += f" in {one.sequences:,} rows of {length}, {share:.1%} full"
        what += f", {cut:,} with a cut prompt" if cut else ""
        what += f", {left:,} too long and left out" if left else ""
        held_out = " (held out)" if one.source.shards.kind == VALIDATION else ""
        log(f"{one.source.name}{held_out}: {what}")
    return PairSequences(opened, weights, limits)
