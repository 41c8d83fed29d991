"""What a loader takes its micro-batches from."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from models.loss import IGNORED
from recipes.data.sequences import Sequences

if TYPE_CHECKING:
    from models.documents import Documents
    from models.encoder_decoder import EncoderDecoderInputs
    from recipes.data.pair_sequences import PairSequences

# Batches read before they are needed: the next one, and one more in case reading takes longer than a step.
AHEAD = 2
MicroBatch = tuple["Tensor | EncoderDecoderInputs", Tensor, "Documents | None"]
"""Inputs and targets, (B, T) each, and the documents of the inputs; None = each sequence is one document."""


class Batches:
    """Reads batch after batch in a thread. Reading ahead keeps no state: batch n is the same whenever it is read."""

    def __init__(
        self,
        sequences: "Sequences | PairSequences",
        *,
        global_batch_size: int,
        micro_batch_size: int,
        data_rank: int,
        data_ranks: int,
        end_of_document: int | None,
        border_targets: bool = True,
        device: torch.device,
        require_rows: Callable[[Sequence[int]], object] = lambda tokens: None,
    ) -> None:
        """Read nothing yet.

        Args:
            sequences: all sequences, of all processes.
            global_batch_size, micro_batch_size: sequences per optimizer step and per forward pass.
            data_rank, data_ranks: which of how many equal shares of the global batch this process reads.
            end_of_document: id of this token, to keep attention inside documents; None = do not.
            border_targets: whether the target after that token, the first of another document, counts in the loss.
            device: where the batches go.
            require_rows: called with the largest token of each share; raises UserError if the model does not know it.
        """
        self.sequences = sequences
        self._global_batch_size, self._micro_batch_size = global_batch_size, micro_batch_size
        self._share = global_batch_size // data_ranks
        self._offset = data_rank * self._share
        self._end_of_document, self._border_targets = end_of_document, border_targets
        self._device, self._require_rows = device, require_rows
        self._waiting: deque[tuple[int, Future[list[MicroBatch]]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._first_batch = self._first = 0

    def take(self, batch: int) -> list[MicroBatch]:
        """Global batch number `batch`, on the device, without waiting for a GPU.

        Waits while the text is not tokenized yet. Raises UserError if it cannot be.
        """
        if not self._waiting or self._waiting[0][0] != batch:
            self._waiting.clear()
        while len(self._waiting) <= AHEAD:
            number = batch + len(self._waiting)
            self._waiting.append((number, self._thread.submit(self._read, number)))
        return self._on_device(self._waiting.popleft()[1].result())

    def take_once(self, batch: int) -> list[MicroBatch]:
        """Global batch number `batch` of text that is read once: what only fills the last one has ignored targets."""
        return self._on_device(self._read(batch, available=self.sequences.available))

    def close(self) -> None:
        """Stop reading and tokenizing."""
        self.sequences.close()
        self._thread.shutdown(cancel_futures=True)

    def _read(self, batch: int, *, available: int | None = None) -> list[MicroBatch]:
        first = self.first_of(batch)
        # The whole batch, not this process's share, so that all processes stop at the same step if there is a problem.
        self.sequences.require(first, self._global_batch_size)
        return self._micro_batches(first, available)

    def _micro_batches(self, first: int, available: int | None) -> list[MicroBatch]:
        """This process's share of the batch that begins with sequence `first`. available: later ones are ignored."""
        first += self._offset
        rows = torch.from_numpy(cast(Sequences, self.sequences).rows(first, self._share))  # (b, T + 1)
        self._require_rows([int(rows.max())])
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if self._end_of_document is not None and not self._border_targets:
            targets = targets.masked_fill(inputs == self._end_of_document, IGNORED)
        if available is not None and first + self._share > available:
            targets = targets.clone()
            targets[max(0, available - first) :] = IGNORED
        size = self._micro_batch_size
        pairs = zip(inputs.split(size), targets.split(size), strict=True)
        return [self._micro_batch(*pair) for pair in pairs]

    def begin(self, batch: int, sequence: int) -> None:
        """Let this batch begin with this sequence, and the others follow."""
        self._first_batch, self._first = batch, sequence

    def first_of(self, batch: int) -> int:
        """The number of a batch's first sequence."""
        return self._first + (batch - self._first_batch) * self._global_batch_size

    def share_of(self, batch: int) -> range:
        """The numbers of this process's sequences of a batch."""
        first = self.first_of(batch) + self._offset
        return range(first, first + self._share)

    def sources_of(self, batch: int) -> np.ndarray:
        """The source of each of this process's rows of a batch, by its index, in the order of the rows: (b,) int64."""
        return self.sequences.sources_of(self.share_of(batch))

    def _micro_batch(self, inputs: Tensor, targets: Tensor) -> MicroBatch:
        end = self._end_of_document
        documents = None
        if end is not None:
            from models.documents import Documents

            documents = Documents.of(inputs, end_of_document=end)
        if self._device.type == "cuda":
            inputs, targets = inputs.contiguous(), targets.contiguous()
        return self._pinned(inputs, targets, documents)

    def _pinned(
        self, inputs: "Tensor | EncoderDecoderInputs", targets: Tensor, documents: "Documents | None"
    ) -> MicroBatch:
        if self._device.type != "cuda":
            return inputs, targets, documents
        # Pin here, in the reading thread, because it takes as long as a copy.
        pinned = None if documents is None else documents.pin_memory()
        return inputs.pin_memory(), targets.pin_memory(), pinned

    def _on_device(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        return [
            (
                inputs.to(self._device, non_blocking=True),
                targets.to(self._device, non_blocking=True),
                None if documents is None else documents.to(self._device),
            )
            for inputs, targets, documents in micro_batches
        ]
