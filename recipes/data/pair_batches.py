"""Batches of pairs. b sequences of this process in a step, T sequence length; B, S and T of encoder-decoder models are
as in models/encoder_decoder.py."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from models.documents import Documents
from models.encoder_decoder import EncoderDecoderInputs
from models.loss import IGNORED
from recipes.data.batches import Batches, MicroBatch
from recipes.data.pair_sequences import PADDED_TO, Pairing, PairSequences, PairSource
from recipes.data.text.pair_format import ID, LEARNED


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
        """Rows of whole pairs, each a document of its own; what is left of a row is padding, which has no targets."""
        shape = self._share, self.sequences.sequence_length
        inputs = np.full(shape, self._padding, dtype=np.int64)  # (b, T)
        targets = np.full(shape, IGNORED, dtype=np.int64)
        starts = np.zeros(shape, dtype=bool)
        starts[:, 0] = True
        for row in range(self._share):
            used = self._fill(first + row, inputs[row], targets[row], starts[row])
            if used < shape[1]:
                starts[row, used] = True
            if available is not None and first + row >= available:
                targets[row] = IGNORED
        parts = (torch.from_numpy(one).split(self._micro_batch_size) for one in (inputs, targets, starts))
        return [
            self._pinned(own, their, Documents.from_starts(begin)) for own, their, begin in zip(*parts, strict=True)
        ]

    def _fill(self, number: int, inputs: np.ndarray, targets: np.ndarray, starts: np.ndarray) -> int:
        """Write sequence `number` into a row, (T,) each. Returns how many of its tokens are used."""
        source, pairs = self.sequences.pairs(number)
        used = 0
        for pair in pairs.tolist():
            tokens = source.shortened(pair)
            end = used + len(tokens) - 1
            ids = (tokens & ID).astype(np.int64)
            self._require_rows([int(ids.max())])
            starts[used], inputs[used:end] = True, ids[:-1]
            targets[used:end] = np.where(tokens[1:] & LEARNED, ids[1:], IGNORED)
            used = end
        return used

    def _dealt(self, first: int, available: int | None) -> list[MicroBatch]:
        """Pairs padded to the longest of their micro-batch. Those of a step are dealt by length: in each micro-batch,
        the processes get similarly long ones. Which pairs a step has does not depend on how they are dealt."""
        size, found = self._micro_batch_size, []
        for number in range(first, first + self._global_batch_size):
            source, (pair,) = self.sequences.pairs(number)
            found.append((source, int(pair), available is None or number < available))
        found.sort(key=_lengths, reverse=True)  # the longest first: memory that fits them fits the others
        ranks = self._global_batch_size // self._share
        mine: list[MicroBatch] = []
        for done in range(0, self._share, size):
            own = min(size, self._share - done)
            begin = done * ranks + self._offset // self._share * own
            mine.append(self._padded(found[begin : begin + own]))
        return mine

    def _padded(self, pairs: Sequence[tuple[PairSource, int, bool]]) -> MicroBatch:
        limits = self.sequences.limits
        parts = [source.prompt_and_answer(pair) for source, pair, _ in pairs]
        shape = len(parts), _room((len(prompt) for prompt, _ in parts), limits.prompt)
        encoder = np.full(shape, self._padding, dtype=np.int64)  # (B, S)
        mask = np.zeros(shape, dtype=bool)
        shape = len(parts), _room((len(answer) for _, answer in parts), limits.answer)
        decoder = np.full(shape, self._padding, dtype=np.int64)  # (B, T)
        targets = np.full(shape, IGNORED, dtype=np.int64)
        decoder[:, 0] = self._pairing.decoder_start
        for row, ((prompt, answer), (_, _, counts)) in enumerate(zip(parts, pairs, strict=True)):
            self._require_rows([int(max(prompt.max(), answer.max()))])
            encoder[row, : len(prompt)], mask[row, : len(prompt)] = prompt, True
            decoder[row, 1 : len(answer) + 1] = answer[: shape[1] - 1]  # as transformers shifts labels
            if counts:
                targets[row, : len(answer)] = answer
        inputs = EncoderDecoderInputs(*map(torch.from_numpy, (encoder, mask, decoder)))
        return self._pinned(inputs, torch.from_numpy(targets), None)


def _lengths(found: tuple[PairSource, int, bool]) -> tuple[int, int]:
    source, pair, _ = found
    encoder, decoder = source.tokens
    return -(-int(encoder[pair]) // PADDED_TO), int(decoder[pair])


def _room(lengths: Iterable[int], limit: int | None) -> int:
    room = -(-max(lengths) // PADDED_TO) * PADDED_TO
    return room if limit is None else min(room, limit)  # the model may have no position behind it
