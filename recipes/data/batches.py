"""This process's share of each global batch in micro-batches, read ahead of the step that needs it.

b sequences of this process in a step, B of a micro-batch, T sequence length.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from models.documents import Documents
from models.loss import IGNORED
from recipes.data.sequences import Sequences

# Batches that are read before they are asked for: the next, and one more for a step that is shorter than its reading.
AHEAD = 2

MicroBatch = tuple[Tensor, Tensor, Documents | None]
"""Inputs and targets, (B, T) each, and the documents of the inputs, unless a row is one text to the model."""


class Batches:
    """Reads batch after batch in a thread. What it read ahead counts for nothing: batch n is batch n, whoever asks."""

    def __init__(
        self,
        sequences: Sequences,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        data_rank: int,
        data_ranks: int,
        end_of_document: int | None,
        device: torch.device,
    ) -> None:
        """data_rank, data_ranks: which of how many equal shares of the global batch.

        end_of_document: this token's id, to keep attention inside documents.
        """
        self.sequences = sequences
        self._global_batch_size, self._micro_batch_size = global_batch_size, micro_batch_size
        self._share = global_batch_size // data_ranks
        self._offset = data_rank * self._share
        self._end_of_document = end_of_document
        self._device = device
        self._waiting: deque[tuple[int, Future[list[MicroBatch]]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")

    def take(self, batch: int) -> list[MicroBatch]:
        """Global batch number `batch`, on the device; a GPU is not waited for.

        Waits where the text is not tokenized yet. Raises UserError when it cannot be.
        """
        if not self._waiting or self._waiting[0][0] != batch:
            self._waiting.clear()
        while len(self._waiting) <= AHEAD:
            number = batch + len(self._waiting)
            self._waiting.append((number, self._thread.submit(self._read, number)))
        return self._on_device(self._waiting.popleft()[1].result())

    def take_once(self, batch: int) -> list[MicroBatch]:
        """The same of a text that is read once: what is read again to fill the batch has no targets that count."""
        return self._on_device(self._read(batch, available=self.sequences.available))

    def close(self) -> None:
        """Stop reading, and what tokenizes."""
        self.sequences.close()
        self._thread.shutdown(cancel_futures=True)

    def _read(self, batch: int, *, available: int | None = None) -> list[MicroBatch]:
        first = batch * self._global_batch_size
        # The whole batch, not this process's share, so that all processes stop at the same step where there is trouble.
        self.sequences.require(first, self._global_batch_size)
        first += self._offset
        rows = torch.from_numpy(self.sequences.rows(first, self._share))  # (b, T + 1)
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if available is not None and first + self._share > available:
            targets = targets.clone()
            targets[max(0, available - first) :] = IGNORED
        size = self._micro_batch_size
        pairs = zip(inputs.split(size), targets.split(size), strict=True)
        return [self._micro_batch(own_inputs, own_targets) for own_inputs, own_targets in pairs]

    def _micro_batch(self, inputs: Tensor, targets: Tensor) -> MicroBatch:
        end = self._end_of_document
        documents = None if end is None else Documents.of(inputs, end_of_document=end)
        if self._device.type != "cuda":
            return inputs, targets, documents
        # Here, in the reading thread: pinning takes the time of a copy.
        pinned = None if documents is None else documents.pin_memory()
        return inputs.contiguous().pin_memory(), targets.contiguous().pin_memory(), pinned

    def _on_device(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        return [
            (
                inputs.to(self._device, non_blocking=True),
                targets.to(self._device, non_blocking=True),
                None if documents is None else documents.to(self._device),
            )
            for inputs, targets, documents in micro_batches
        ]
