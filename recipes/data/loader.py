"""This process's share of each global batch, read ahead of the step that needs it.

b sequences of this process in a step, T sequence length.
"""

import json
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from recipes.data.sequences import Sequences

# Batches that are read before they are asked for: the next, and one more for a step that is shorter than its batch.
AHEAD = 2


class Loader:
    """Reads batch after batch in a thread. What it read ahead counts for nothing: batch n is batch n, whoever asks."""

    def __init__(
        self, sequences: Sequences, *, global_batch_size: int, rank: int, ranks: int, pin: bool
    ) -> None:
        """rank, ranks: which of how many equal shares of the global batch. pin: for copies to a GPU that do not wait."""
        self.sequences = sequences
        self._size, self._rank, self._share = global_batch_size, rank, global_batch_size // ranks
        self._pin = pin
        self._waiting: deque[tuple[int, Future[Tensor]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")

    def take(self, batch: int) -> Tensor:
        """This process's rows of global batch number `batch`: (b, T + 1) int64 on the host.

        Waits where they are not there yet. Raises UserError when the source has come to an end it should not have.
        """
        if not self._waiting or self._waiting[0][0] != batch:
            self._waiting.clear()
        while len(self._waiting) <= AHEAD:
            number = batch + len(self._waiting)
            self._waiting.append((number, self._thread.submit(self._read, number)))
        return self._waiting.popleft()[1].result()

    def _read(self, batch: int) -> Tensor:
        first = batch * self._size
        # The whole batch, not this process's share, so that all processes stop at the same step where there is trouble.
        self.sequences.require(first, self._size)
        rows = torch.from_numpy(self.sequences.rows(first + self._rank * self._share, self._share))
        return rows.pin_memory() if self._pin else rows

    def close(self) -> None:
        """Stop reading."""
        self.sequences.close()
        self._thread.shutdown(cancel_futures=True)
