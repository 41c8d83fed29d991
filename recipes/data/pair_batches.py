"""Batches of pairs. b sequences of this process in a step, T sequence length; B, S and T of encoder-decoder models are
as in models/encoder_decoder.py."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.documents import Documents
from models.encoder_decoder import EncoderDecoderInputs
from models.loss import IGNORED
from recipes.data.batches import Batches, MicroBatch
from recipes.data.pair_sequences import PADDED_TO, Pairing, PairSequences, PairSource
from recipes.data.text.pair_format import ID, LEARNED

PairOfIds = tuple[np.ndarray, np.ndarray, bool]
"""The ids of a prompt and of its answer, (n,) int64 each, and whether the answer is a target."""


class PairBatches(Batches):
    """Reads batch after batch of pairs."""

    sequences: PairSequences

    def __init__(self, sequences: PairSequences, *, pairing: Pairing, end_of_document: int, **options: Any) -> None:
        """end_of_document: the token that ends answers. options: as of Batches."""
        super().__init__(sequences, end_of_document=None, **options)
        self._pairing = pairing
        self._padding = end_of_document if pairing.padding is None else pairing.padding

    def _micro_batches(self, first: int, available: int | None) -> list[MicroBatch]:
        if self._pairing.format.encoder_decoder:
            return self._dealt(first, available)
        return self._packed(first + self._offset, available)

    def _packed(self, first: int, available: int | None) -> list[MicroBatch]:
        rows = []
        for number in range(first, first + self._share):
            source, pairs = self.sequences.pairs(number)
            rows.append([source.shortened(pair) for pair in pairs.tolist()])
            self._require_rows([int((tokens & ID).max()) for tokens in rows[-1]])
        inputs, targets, starts = packed(rows, length=self.sequences.sequence_length, padding=self._padding)
        if available is not None:
            targets[max(0, available - first) :] = IGNORED
        batches = zip(*(tensor.split(self._micro_batch_size) for tensor in (inputs, targets, starts)), strict=True)
        return [self._pinned(ids, own, Documents.from_starts(begins)) for ids, own, begins in batches]

    def _dealt(self, first: int, available: int | None) -> list[MicroBatch]:
        """Pairs padded to the longest of their micro-batch. Those of a step are dealt by length: in each micro-batch,
        the processes get similarly long ones. Which pairs a step has does not depend on how they are dealt."""
        mine: list[MicroBatch] = []
        for pairs in self._deal(first, available):
            texts = [(*source.prompt_and_answer(pair), counts) for source, pair, counts in pairs]
            self._require_rows([int(ids.max()) for prompt, answer, _ in texts for ids in (prompt, answer)])
            limits = self.sequences.limits
            prompts, answers = (len(prompt) for prompt, _, _ in texts), (len(answer) for _, answer, _ in texts)
            shape = _room(prompts, limits.prompt), _room(answers, limits.answer)
            start = self._pairing.decoder_start
            mine.append(self._pinned(*padded(texts, shape=shape, start=start, padding=self._padding), None))
        return mine

    def _deal(self, first: int, available: int | None = None) -> Iterator[list[tuple[PairSource, int, bool]]]:
        """The pairs of each micro-batch: source, number there, and whether they count."""
        size, pairs = self._micro_batch_size, []
        for number in range(first, first + self._global_batch_size):
            source, (pair,) = self.sequences.pairs(number)
            pairs.append((source, int(pair), available is None or number < available))
        pairs.sort(key=_lengths, reverse=True)  # the longest first: memory that fits them fits the others
        ranks = self._global_batch_size // self._share
        for done in range(0, self._share, size):
            count = min(size, self._share - done)
            begin = done * ranks + self._offset // self._share * count
            yield pairs[begin : begin + count]

    def sources_of(self, batch: int) -> np.ndarray:
        if not self._pairing.format.encoder_decoder:
            return super().sources_of(batch)
        order = {one.name: index for index, one in enumerate(self.sequences.sources)}
        return np.array([order[one.source.name] for some in self._deal(self.first_of(batch)) for one, _, _ in some])


def packed(rows: Sequence[Sequence[np.ndarray]], *, length: int, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and where documents begin, (b, T) each, of rows of stored pairs, each a document of its own. What
    is left of a row is padding, which has no targets."""
    shape = len(rows), length
    inputs = np.full(shape, padding, dtype=np.int64)
    targets = np.full(shape, IGNORED, dtype=np.int64)
    starts = np.zeros(shape, dtype=bool)
    starts[:, 0] = True
    for row, pairs in enumerate(rows):
        used = 0
        for tokens in pairs:
            end, ids = used + len(tokens) - 1, (tokens & ID).astype(np.int64)
            starts[row, used], inputs[row, used:end] = True, ids[:-1]
            targets[row, used:end] = np.where(tokens[1:] & LEARNED, ids[1:], IGNORED)
            used = end
        starts[row, used : used + 1] = True
    return torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(starts)


def padded(
    pairs: Sequence[PairOfIds], *, shape: tuple[int, int], start: int, padding: int
) -> tuple[EncoderDecoderInputs, Tensor]:
    """What an encoder-decoder model reads of pairs, and its targets, (B, T). shape: (S, T). start: the token that a
    decoder begins with. padding: the token that fills up."""
    encoder = np.full((len(pairs), shape[0]), padding, dtype=np.int64)  # (B, S)
    mask = np.zeros(encoder.shape, dtype=bool)
    decoder = np.full((len(pairs), shape[1]), padding, dtype=np.int64)  # (B, T)
    targets = np.full(decoder.shape, IGNORED, dtype=np.int64)
    decoder[:, 0] = start
    for row, (prompt, answer, counts) in enumerate(pairs):
        encoder[row, : len(prompt)], mask[row, : len(prompt)] = prompt, True
        decoder[row, 1 : len(answer) + 1] = answer[: shape[1] - 1]  # as transformers shifts labels
        if counts:
            targets[row, : len(answer)] = answer
    return EncoderDecoderInputs(*map(torch.from_numpy, (encoder, mask, decoder))), torch.from_numpy(targets)


def _lengths(pair_of: tuple[PairSource, int, bool]) -> tuple[int, int]:
    source, pair, _ = pair_of
    encoder, decoder = source.tokens
    return -(-int(encoder[pair]) // PADDED_TO), int(decoder[pair])


def _room(lengths: Iterable[int], limit: int | None) -> int:
    room = -(-max(lengths) // PADDED_TO) * PADDED_TO
    return room if limit is None else min(room, limit)  # the model may have no position behind it
